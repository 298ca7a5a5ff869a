"""Tests that need a GPU, on the simulated card: what is written for cards is not to rot."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_what_is_written_for_a_card_runs_on_the_simulated_one(tmp_path):
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider",
        "-p", "tests.simulated_card.plugin", "-m", "gpu", "tests/simulated_card", "tests/nn",
        "tests/optim", "tests/train/test_cuda_graphs.py", "-k", "not test_cuda_graphs or plain",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    assert "launch: contract_f32" in ran.stdout
