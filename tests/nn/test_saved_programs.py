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


@pytest.mark.slow
def test_an_exported_program_runs_where_comera_is_imported_and_nowhere_else(tmp_path):
    model = nn.Sequential(nn.Embedding(500, 24), nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 24))
    model = comera.tensorize_(model, comera.TTConfig(rank=4, order=2)).eval()
    x = torch.randint(0, 500, (5, 3))
    made = torch.export.export(model, (x,))
    torch.export.save(made, tmp_path / "program.pt2")
    torch.save((x, model(x).detach()), tmp_path / "numbers.pt")

    def load(first: str) -> subprocess.CompletedProcess:
        words = [tmp_path / "program.pt2", tmp_path / "numbers.pt"]
        code = LOAD.format(first=first)
        return subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True
        )

    done = load("import comera")
    assert done.returncode == 0, done.stderr
    done = load("")
    assert done.returncode != 0
    assert "comera" in done.stderr
    assert "custom op" in done.stderr
