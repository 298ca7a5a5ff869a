"""Run the runs of a sweep as processes of ``comera train``, here or on other machines.

The settings of a run are in ``FOLDER.yaml`` beside its folder, its output is in ``FOLDER/log.txt``.
SIGINT makes a run save and stop; its exit status and ``result.json`` tell how it ended.
"""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from uuid import uuid4

import torch
import yaml
from rich.console import Console

from comera._command import INTERRUPTED
from comera.extras import check_known, error_prefix, needed_by
from comera.files import write_text
from comera.recipes import run_folder
from comera.recipes.run_config import RunConfig
from comera.train.processes import PARENT, on_stop_signals

LOG = "log.txt"

_STARTED = "$ comera train "
_ERROR = re.compile(r"^error: (.+)|^Traceback .*\n(?:\s.*\n)*(\S.*)", re.MULTILINE)
_EVERY_SECONDS = 0.25
_GRACE_SECONDS = 60.0
_A_WEEK = 7 * 24 * 60
_NOT_SET_UP = NameError, TypeError, ValueError, AssertionError  # what submitit raises

LauncherName = Literal["local", "submitit"]
State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass(eq=False)
class Job:
    """One run of a sweep; ``reason`` tells why it failed."""

    variant: str
    seed: int
    config: RunConfig
    state: State = "waiting"
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def length(self) -> float | None:
        """Steps or seconds; None if the data determine them and the log does not show them yet."""
        if (length := self.config.train.steps or self.config.train.seconds) is not None:
            return length
        found = re.search(r"^\w+ \d+/(\d+): ", last_session(self.folder) or "", re.MULTILINE)
        return int(found[1]) if found else None


def last_session(folder: Path) -> str | None:
    """Return the output of a run of a sweep since its last start; None if it never started."""
    path = folder / LOG
    log = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return log.rpartition(_STARTED)[2] if _STARTED in log else None


def why_failed(printed: str) -> str | None:
    errors = _ERROR.findall(printed)
    return (errors[-1][0] or errors[-1][1]) if errors else None


def resolve(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Mark the jobs that are finished, and check that the other jobs can begin.

    With ``overwrite`` a run with other settings or data restarts; otherwise raises ``ValueError``.
    Data are compared if a waiting run reads them, and raise ``FileNotFoundError`` if missing.
    """

    def begin_anew(job: Job, what: str) -> None:
        if not overwrite:
            raise ValueError(
                f"{job.folder} holds a run {what} another out, or start such runs again with "
                "--overwrite=true"
            )
        job.state, job.config = "waiting", dataclasses.replace(job.config, overwrite=True)

    for job in jobs:
        begun = run_folder.begun_run(job.config)
        if begun and begun.is_finished(job.folder):
            job.state = "finished"
        elif begun and begun.difference is not None:
            begin_anew(job, f"with other settings ({begun.difference}); choose")
    needed = [job.config.data for job in jobs if job.state == "waiting"]
    for job in jobs:
        known = job.config.overwrite or job.config.data not in needed
        if known or run_folder.read_record(job.folder) is None:
            continue
        found = run_folder.DataRecord(job.config.data.digests())
        if (difference := run_folder.other_data(job.folder, found)) is not None:
            begin_anew(job, f"that was begun with other data ({difference}); restore them, choose")


class Started(NamedTuple):
    """A run that was started or queued."""

    poll: Callable[[], int | str | None]  # exit status, or error of its cluster; None until it ends
    stop: Callable[[], object]  # makes it save and stop; called again, stops it at once


class Launcher(NamedTuple):
    """How to start runs at some place: this machine, a cluster."""

    start: Callable[[str, bool], Started]  # takes the folder of a run, and whether it begins anew
    at_once: int | None  # number of runs at a time; None leaves it to a queue
    close: Callable[[], object] = lambda: None


def make_launcher(
    name: LauncherName,
    settings: Mapping[str, Any],
    out: Path,
    at_once: int | None,
    console: Console,
) -> Launcher:
    """Make a launcher of runs below the folder ``out``, which has this path on all machines.

    ``settings`` are those of submitit, as in the sweep's file. Raises ``ValueError`` if the
    launcher or a setting is unknown, and ``MissingPackageError`` if submitit is missing.
    """
    check_known(name, get_args(LauncherName), f"launcher={name} is no launcher")
    if name == "submitit":
        return _submitit(settings, out, at_once, console)
    # Runs share the threads that torch would use.
    threads = max(1, torch.get_num_threads() // (at_once or 1))

    def start(folder: str, overwrite: bool) -> Started:
        process = start_run(folder, overwrite, threads=threads)
        return Started(process.poll, lambda: process.send_signal(signal.SIGINT))

    return Launcher(start, at_once or 1)


def start_run(
    folder: str, overwrite: bool, cwd: str = ".", threads: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start ``comera train`` by the settings beside a folder, as a child that ends with its parent.

    Paths are relative to ``cwd``. ``threads`` is torch's default number of threads; None leaves it.
    """
    words = [f"{folder}.yaml", *["--overwrite=true"] * overwrite]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), PARENT: str(os.getpid())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    log = Path(cwd, folder, LOG)
    log.parent.mkdir(parents=True, exist_ok=True)
    # Slurm sends these to all processes of a job whose time is up; submitit alone answers.
    before = signal.pthread_sigmask(signal.SIG_SETMASK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{_STARTED}{' '.join(words)}\n")
            file.flush()
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "comera", "train", *words],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # The terminal's Ctrl-C goes to this process alone, which hands it on: a run that
                # got it twice would stop without saving.
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Remote:
    """A run for submitit to call, in a process that it has started on some machine.

    Paths are relative to ``cwd``. The run stops once the file named by ``permit`` is deleted.
    """

    folder: str
    overwrite: bool
    cwd: str
    permit: str = ""
    _process: Any = field(default=None, init=False, repr=False)

    @property
    def is_revoked(self) -> bool:
        return bool(self.permit) and not Path(self.permit).exists()

    def __call__(self) -> int:
        if self.is_revoked:
            return INTERRUPTED
        self._process = start_run(self.folder, self.overwrite, self.cwd)
        asked = False
        while (status := self._process.poll()) is None:
            time.sleep(_EVERY_SECONDS)
            if not asked and self.is_revoked:
                asked = True
                self._process.send_signal(signal.SIGINT)
        if status == INTERRUPTED and not asked and self.permit:
            # Slurm told all processes of the job. If it is to be queued again, submitit is told
            # next, and this process does not come back from here.
            time.sleep(_GRACE_SECONDS)
        return status

    def checkpoint(self) -> Any:
        """Save and stop the run; submitit calls this when time is up, and queues the result."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        return DelayedSubmission(dataclasses.replace(self, overwrite=False))


def _submitit(
    settings: Mapping[str, Any], out: Path, at_once: int | None, console: Console
) -> Launcher:
    """Start runs through Slurm; without Slurm as processes of submitit, one at a time by default.

    A run whose time is up saves and goes back into the queue. The settings are those of
    ``submitit.AutoExecutor.update_parameters``, and ``cluster``: ``slurm`` or ``local``.
    """
    with needed_by("--launcher=submitit"):
        from submitit import AutoExecutor
    parameters = dict(settings)
    with error_prefix(f"submitit={parameters}: ", _NOT_SET_UP):
        executor = AutoExecutor((out / "submitit").absolute(), parameters.pop("cluster", None))
        is_local = executor.cluster == "local"
        if is_local:
            parameters.setdefault("timeout_min", _A_WEEK)
        executor.update_parameters(**parameters)
    where = "processes of this machine, as there is no Slurm" if is_local else "Slurm"
    console.print(f"submitit starts the runs through {where}", markup=False)
    # This process holds the file: runs stop when it is gone, wherever they are.
    permit = (out / f".runs-{uuid4().hex}").absolute()
    permit.touch()

    def start(folder: str, overwrite: bool) -> Started:
        run, asked = Remote(folder, overwrite, os.getcwd(), str(permit)), itertools.count()
        job = executor.submit(run)

        def poll() -> int | str | None:
            if run.is_revoked and job.state in ("PENDING", "REQUEUED"):
                job.cancel(check=False)
                return INTERRUPTED
            try:
                return job.result() if job.done() else None
            except Exception as problem:  # whatever the run or the cluster came to
                return f"its job {job.job_id} ended: {str(problem).strip()}"

        def stop() -> None:
            permit.unlink(missing_ok=True)
            if next(asked):
                job.cancel(check=False)

        return Started(poll, stop)

    at_once = at_once or (1 if is_local else None)
    return Launcher(start, at_once, lambda: permit.unlink(missing_ok=True))


def run_jobs(
    jobs: list[Job],
    launcher: Launcher,
    watch: Callable[[], None] = lambda: None,
    more: Callable[[], Sequence[Job]] = lambda: (),
) -> bool:
    """Run all waiting jobs in their order; return False after a signal.

    A job that fails does not stop the others. Ctrl-C, SIGTERM or a closed terminal is passed on to
    every running job, which saves and stops; a second signal stops them at once. ``watch`` is
    called several times a second, ``more`` for jobs to append when there is room and none waits.
    """
    running: dict[Job, Started] = {}
    signals: list[int] = []
    handed_on = 0
    # Only collected: a launcher must not be interrupted while it starts or stops a run.
    with on_stop_signals(signals.append):
        try:
            while True:
                while not signals and (launcher.at_once or len(running) + 1) > len(running):
                    job = next((job for job in jobs if job.state == "waiting"), None)
                    if job is not None:
                        write_settings(job.config)
                        running[job] = launcher.start(job.config.out, job.config.overwrite)
                        job.state = "running"
                    elif added := more():
                        jobs.extend(added)
                    else:
                        break
                watch()
                if not running:
                    return not signals
                time.sleep(_EVERY_SECONDS)
                while handed_on < len(signals):
                    handed_on += 1
                    for run in running.values():
                        run.stop()
                for job, run in list(running.items()):
                    if (status := run.poll()) is not None:
                        del running[job]
                        _close(job, status, bool(signals))
        finally:  # there are none left, unless a callback raised
            for run in running.values():
                run.stop()


def write_settings(config: RunConfig) -> None:
    """Write the settings of a run beside its folder, for ``comera train``."""
    settings = {"out": config.out, **run_folder.settings_of(config)}
    write_text(Path(f"{config.out}.yaml"), yaml.safe_dump(settings, sort_keys=False))


def _close(job: Job, status: int | str, stopped: bool) -> None:
    error = status if isinstance(status, str) else why_failed(last_session(job.folder) or "")
    if status == 0:
        job.state = "finished"
    elif status in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM) or (stopped and not error):
        job.state = "stopped"
    else:
        job.state = "failed"
        job.reason = error or f"its process ended with exit code {status}"
