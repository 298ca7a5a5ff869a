"""The packages that comera is compared with: pinned, importable, not misled by its folders."""

import importlib
import itertools
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.peers import _load
from tests.peers import PACKAGES, peer

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def test_every_peer_is_in_the_extra_and_pinned():
    names = {requirement.split(">=")[0] for requirement in EXTRAS["peers"]}
    assert names == set(PACKAGES.values())
    assert names <= set(PINNED)
    made = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "PEERS :=" in line)
    assert names == set(made.replace('"', "").split()[2:]) - {"--no-deps"}


def test_a_package_has_one_lower_bound_in_all_extras():
    bounds: dict[str, set[str]] = {}
    for requirement in [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]:
        name, _, bound = requirement.partition(">=")
        bounds.setdefault(name, set()).add(bound)
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


@pytest.mark.parametrize("module", PACKAGES)
def test_a_peer_is_the_version_that_is_pinned_and_can_be_imported(module):
    peer(module)
    assert version(PACKAGES[module]) == PINNED[PACKAGES[module]]


def test_a_peer_does_not_bring_another_torch():
    assert version("torch").split("+")[0] == PINNED["torch"]


def test_the_stand_in_for_bitsandbytes_stays_nowhere():
    galore = peer("galore_torch")
    assert "bitsandbytes" not in sys.modules or importlib.util.find_spec("bitsandbytes")
    assert _load("galore_torch", "galore-torch") is galore
    assert peer("galore_torch") is galore


@pytest.mark.slow
def test_transformers_in_the_folder_of_the_project_finds_no_package_kernels():
    """It looks for PyPI's ``kernels`` and would take functions from it; here is a folder of that
    name, which the working directory puts on the path."""
    peer("transformers")
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import transformers, comera, torch, importlib.metadata as m\n"
        "from transformers.utils import is_kernels_available\n"
        "import transformers.integrations.hub_kernels, transformers.modeling_utils\n"
        "installed = any(d.metadata['Name'] == 'kernels' for d in m.distributions())\n"
        "assert installed or not is_kernels_available()\n"
        "config = transformers.LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=48,\n"
        "    num_hidden_layers=1, num_attention_heads=4)\n"
        "model = transformers.LlamaForCausalLM(config)\n"
        "comera.tensorize_(model, comera.TTConfig(rank=4, target_modules='all-linear'))\n"
        "print(tuple(model(torch.arange(5)[None]).logits.shape))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(1, 5, 60)\n"


@pytest.mark.slow
def test_skips_are_counted_by_reason_at_the_end(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('k', range(3))\n"
        "def test_a(k): pytest.skip('no moon')\n"
        "@pytest.mark.skipif(True, reason='no sun')\n"
        "def test_b(): pass\n"
        "def test_c(): pytest.importorskip('no_such_module')\n"
        "def test_d(): pass\n"
    )
    # As the tests are run, by a worker: without one the same reports come from one process less.
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-n", "1"]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    place = lines.index("skipped, by reason:")
    assert lines[place + 1 : place + 4] == [
        "  3  no moon",
        "  1  could not import 'no_such_module': No module named 'no_such_module'",
        "  1  no sun",
    ]
    assert len(lines) <= place + 5
