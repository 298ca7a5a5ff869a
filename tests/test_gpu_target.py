"""``make gpu``, as far as it goes without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_both_tools_run_over_the_kernels_tests(sanitizer):
    done = make("sanitize", *sanitizer())
    assert done.returncode == 0
    called = [line for line in done.stdout.splitlines() if line.startswith("1 ")]
    for tool, line in zip(("memcheck", "racecheck"), called, strict=True):
        assert line == (
            f"1 --tool {tool} --error-exitcode 9 --target-processes all "
            "python3 -m pytest -q -m gpu -k on_a_card tests/kernels"
        )


def test_what_a_tool_finds_fails_the_target(sanitizer):
    done = make("sanitize", *sanitizer("exit 9"))
    assert done.returncode != 0
    assert "racecheck" not in done.stdout


def test_a_tool_that_takes_too_long_is_named(sanitizer):
    done = make("sanitize", *sanitizer("sleep 20"), "SANITIZER_SECONDS=1")
    assert done.returncode != 0
    assert "memcheck did not end within 1 seconds" in done.stdout


def test_the_kernels_have_tests_for_a_card():
    """Those that the tools run."""
    files = [p for p in (ROOT / "tests/kernels").glob("test_*.py") if "on_a_card(" in p.read_text()]
    assert {"test_merge.py", "test_look_up.py"} <= {path.name for path in files}


def test_all_parts_are_in_one_dated_file():
    done = make("-n", "gpu", "GPU_PYTHON=python3")
    assert done.returncode == 0
    for part in ("doctor", "pytest -q -m gpu", "bench kernels", "--dtype bfloat16", "bench step"):
        assert part in done.stdout
    assert "sanitize" in done.stdout
    assert "runs/gpu-20" in done.stdout
