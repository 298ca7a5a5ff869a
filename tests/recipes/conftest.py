import contextlib
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from comera.recipes import jobs
from comera.recipes.cli import main


def run_here(folder, overwrite, cwd=".", threads=None):
    """Train a run of a sweep in this process at once, in place of one of its own."""
    words = ["train", f"{folder}.yaml", *["--overwrite=true"] * overwrite]
    log = Path(folder, jobs.LOG)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        print("$ comera", *words)
        try:
            status = main(words)
        except Exception:
            traceback.print_exc()
            status = 1
    return SimpleNamespace(poll=lambda: status)


def wait_for(happened, process=None):
    """Wait for what another process does, before it ends."""
    until = time.monotonic() + 300
    while not happened():
        assert process is None or process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def runs_here(monkeypatch):
    """Runs of a sweep are trained in this process: for tests that are not about how they start."""
    monkeypatch.setattr(jobs, "start_run", run_here)
