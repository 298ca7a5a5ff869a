"""Sweeps through submitit, and the process that a run has there."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

import comera
from comera._command import INTERRUPTED
from comera.recipes.jobs import Remote, make_launcher, write_settings
from comera.recipes.sweep import make_jobs
from comera.train.log import last_logged
from tests.peers import peer
from tests.recipes.conftest import wait_for
from tests.recipes.test_sweep import carried_out, content, sweep_of, written  # noqa: F401

ROOT = Path(comera.__file__).parents[1]


def test_settings_that_a_launcher_does_not_know(content, tmp_path):  # noqa: F811
    peer("submitit")
    with pytest.raises(ValueError, match="launcher=slrum is no launcher"):
        make_launcher("slrum", {}, tmp_path, None, Console(quiet=True))
    with pytest.raises(ValueError, match=r"submitit=.'gpus': 3.: Unknown|need to be prefixed"):
        make_launcher("submitit", {"gpus": 3}, tmp_path, None, Console(quiet=True))
    content["submitit"] = 4
    with pytest.raises(ValueError, match="submitit=4 must be a mapping"):
        sweep_of(content, tmp_path)


def test_without_its_package_a_launcher_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ModuleNotFoundError, match=r"submitit needs submitit: .*comera\[submitit\]"):
        make_launcher("submitit", {}, tmp_path, None, Console(quiet=True))


@pytest.mark.slow
def test_a_launcher_finishes_one_run_and_ctrl_c_saves_the_other(content, tmp_path):  # noqa: F811
    """Without a cluster: as processes of submitit."""
    peer("submitit")
    content["variants"] = {"dense": {"tensorize": None}, "long": {"train.steps": 100_000}}
    content["base"]["out"] = "elsewhere"
    content["out"] = "out"  # relative, as most people write it
    command = [sys.executable, "-m", "comera", "sweep", str(written(content, tmp_path))]
    quick, long = (tmp_path / "out" / name / "seed-0" for name in ("dense", "long"))
    with subprocess.Popen(
        [*command, "--launcher=submitit"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:

        def ready():
            return (quick / "result.json").is_file() and last_logged(long, "loss")

        try:
            wait_for(ready, process)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130, printed
    assert "stopped; it can be resumed" in printed
    assert any((long / "checkpoints").glob("step-*"))
    assert not (long / "result.json").exists()
    assert "preparing data" in (long / "log.txt").read_text()
    # Later, by processes of this machine: what is finished is not trained again.
    content["variants"] = {"dense": {"tensorize": None}}
    content["out"] = str(tmp_path / "out")
    status, printed = carried_out(content, tmp_path)
    assert (status, "1 of them finished" in printed) == (0, True)


@pytest.mark.slow
def test_a_run_whose_time_is_up_saves_and_goes_on_from_there(content, tmp_path):  # noqa: F811
    """As submitit asks for it; the second time the sweep has been stopped."""
    peer("submitit")
    content["variants"] = {"dense": {"tensorize": None, "train.steps": 100_000}}
    (job,) = make_jobs(sweep_of(content, tmp_path))
    write_settings(job.config)
    said = {}

    def started(name, remote):
        thread = threading.Thread(target=lambda: said.__setitem__(name, remote()))
        thread.start()
        return thread

    first = Remote(job.config.out, True, str(tmp_path))
    thread = started("first", first)
    wait_for(lambda: last_logged(job.folder, "loss"))
    later = first.checkpoint().function
    thread.join()
    saved = max(int(path.name[5:]) for path in (job.folder / "checkpoints").glob("step-*"))
    assert not later.overwrite
    later.permit = str(tmp_path / "permit")
    Path(later.permit).touch()
    thread = started("later", later)
    wait_for(lambda: last_logged(job.folder, "loss")[0] > saved)
    Path(later.permit).unlink()
    thread.join()
    assert said == {"first": INTERRUPTED, "later": INTERRUPTED}
    assert Remote(job.config.out, False, str(tmp_path), later.permit)() == INTERRUPTED  # at once
    again = max(int(path.name[5:]) for path in (job.folder / "checkpoints").glob("step-*"))
    assert again > saved
