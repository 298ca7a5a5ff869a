"""Programs of ``torch.export`` in another process, as the README says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import comera

ROOT = Path(__file__).parents[2]
LOAD = """
import sys
{first}
import torch
made = torch.export.load(sys.argv[1])
x, y = torch.load(sys.argv[2])
torch.testing.assert_close(made.module()(x), y)
"""


def run(model, x, folder, first):
    torch.export.save(torch.export.export(model, (x,)), folder / "program.pt2")
    torch.save((x, model(x).detach()), folder / "numbers.pt")
    words = [folder / "program.pt2", folder / "numbers.pt"]
    code = LOAD.format(first=first)
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_an_exported_program_runs_where_comera_is_imported_and_nowhere_else(tmp_path):
    model = nn.Sequential(nn.Embedding(500, 24), nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 24))
    model = comera.tensorize_(model, comera.TTConfig(rank=4, order=2)).eval()
    x = torch.randint(0, 500, (5, 3))
    done = run(model, x, tmp_path, "import comera")
    assert done.returncode == 0, done.stderr
    done = run(model, x, tmp_path, "")
    assert done.returncode != 0
    assert "comera" in done.stderr
    assert "custom op" in done.stderr


def test_one_of_blocks_runs_without_comera(tmp_path):
    layer = comera.BTTLinear(12, 6).eval()
    done = run(layer, torch.randn(5, 12), tmp_path, "sys.modules['comera'] = None")
    assert done.returncode == 0, done.stderr
