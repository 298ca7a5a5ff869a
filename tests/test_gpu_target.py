"""``make gpu``, as far as it goes without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from comera.ops.kernels import launch

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def sanitizer(tmp_path):
    """A stand-in that writes down how it was called, and ends as it is told."""

    def made(body: str = "exit 0") -> list[str]:
        script = tmp_path / "compute-sanitizer"
        script.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@"\n{body}\n')
        script.chmod(0o755)
        return [f"SANITIZER={script}", "GPU_PYTHON=python3"]

    return made


def test_checks_of_memory_and_races_are_skipped_where_there_is_no_sanitizer(tmp_path):
    done = make("sanitize", f"SANITIZER={tmp_path}/compute-sanitizer")
    assert done.returncode == 0
    assert done.stdout.strip() == (
        "memcheck and racecheck are skipped: compute-sanitizer, part of the CUDA toolkit, is not "
        "installed"
    )


TESTED = {
    "contract": "test_contract",
    "ttm": "test_lookup",
    "feed_forward": "test_feed_forward",
}
"""What names of kernels begin with, by the files that run them alone."""


def test_both_tools_run_over_the_operators_tests(sanitizer):
    done = make("sanitize", *sanitizer())
    assert done.returncode == 0
    called = [line for line in done.stdout.splitlines() if line.startswith("1 ")]
    parts = [(tool, *part) for tool in ("memcheck", "racecheck") for part in TESTED.items()]
    for (tool, kernels, file), line in zip(parts, called, strict=True):
        assert line == (
            f"1 --tool {tool} --report-api-errors no --kernel-regex kns={kernels}_ "
            "--error-exitcode 9 --target-processes all "
            f"python3 -m pytest -q -p no:benchmark -m gpu -k on_a_card tests/kernels/{file}.py"
        )


def test_every_kernel_is_looked_at():
    names = [name for file in launch.files() for name in launch.entries(file)]
    assert names
    assert all(name.startswith(tuple(f"{kernels}_" for kernels in TESTED)) for name in names)


def test_what_a_tool_finds_fails_the_target(sanitizer):
    done = make("sanitize", *sanitizer("exit 9"))
    assert done.returncode != 0
    assert f"racecheck of the kernels {list(TESTED)[-1]}_*" in done.stdout  # the others go on


@pytest.mark.slow
def test_a_tool_that_takes_too_long_is_named(sanitizer):
    done = make("sanitize", *sanitizer("sleep 20"), "SANITIZER_SECONDS=1")
    assert done.returncode != 0
    assert "memcheck of contract_* did not end within 1 seconds" in done.stdout


@pytest.mark.parametrize("file", TESTED.values())
def test_the_kernels_have_tests_for_a_card(file):
    """Those that the tools run."""
    text = (ROOT / f"tests/kernels/{file}.py").read_text()
    assert "_on_a_card(" in text
    assert "attention" not in text


def test_the_target_runs_all_stages_in_ten_minutes():
    done = make("-n", "gpu", "GPU_PYTHON=python3")
    assert done.returncode == 0
    assert done.stdout.strip() == "python3 -m benchmarks.card --seconds 600"
