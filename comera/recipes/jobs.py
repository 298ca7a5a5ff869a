"""Runs of a sweep: processes of ``comera train``, here or on other machines, a few at a time.

The settings of a run are in ``FOLDER.yaml`` beside its folder, its output is in ``log.txt`` there.
SIGINT makes it save and stop; its exit status and its ``result.json`` say how it ended.
"""

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import uuid4

import torch
import yaml
from rich.console import Console

from comera.extras import did_you_mean, needed_by
from comera.files import replacing
from comera.recipes.data_record import DataRecord, read_record
from comera.recipes.folder import is_finished, other_data, other_settings
from comera.recipes.run_config import RunConfig
from comera.train.stop_signals import PARENT, on_stop_signals

INTERRUPTED = 130
"""Exit status of a command that was stopped by a signal and can be resumed."""

LOG = "log.txt"

_STARTED = "$ comera train "
_ERROR = re.compile(r"^error: (.+)|^Traceback .*\n(?:\s.*\n)*(\S.*)", re.MULTILINE)
_EVERY_SECONDS = 0.25
_GRACE_SECONDS = 60.0
_A_WEEK = 7 * 24 * 60

State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass(eq=False)
class Job:
    """One run.

    Attributes:
        variant: Name of the variant that it trains.
        seed: Seed of the run.
        config: Settings of the run; ``out`` is its folder.
        state: How far it is.
        reason: Why it failed.
    """

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
    def steps(self) -> int | None:
        """Optimizer steps; of a run whose data tell them, once a line of its log does."""
        if self.config.train.steps is not None:
            return self.config.train.steps
        found = re.search(r"^\w+ \d+/(\d+): ", last_session(self.folder) or "", re.MULTILINE)
        return int(found[1]) if found else None


def last_session(folder: Path) -> str | None:
    """Return what a run of a sweep has printed since it was last started; None if it never was."""
    path = folder / LOG
    log = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return log.rpartition(_STARTED)[2] if _STARTED in log else None


def why_failed(printed: str) -> str | None:
    """Return the last error in what a run has printed; None if there is none."""
    errors = _ERROR.findall(printed)
    return (errors[-1][0] or errors[-1][1]) if errors else None


# ── what is finished already ─────────────────────────────────────────────────────────────────────


def find_finished(jobs: Sequence[Job]) -> list[Job]:
    """Mark and return the waiting jobs that are finished already and not to be begun anew."""
    found = [job for job in jobs if job.state == "waiting" and not job.config.overwrite]
    found = [job for job in found if is_finished(job.config)]
    for job in found:
        job.state = "finished"
    return found


def resolve(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Mark the jobs that are finished already, and check that the others can begin.

    Args:
        jobs: All of them.
        overwrite: Begin a run anew whose folder holds other settings, or that was begun with other
            data.

    Raises:
        ValueError: If a folder holds such a run and may not be overwritten.
        FileNotFoundError: If the data of a run that was begun are not there.
    """
    for job in jobs:
        if job.state != "waiting" or job.config.overwrite or find_finished([job]):
            continue
        difference = other_settings(job.config)
        if difference is not None and not overwrite:
            raise ValueError(
                f"{job.folder} holds a run with other settings ({difference}); choose another "
                "out, or start such runs again with --overwrite=true"
            )
        anew = difference is not None or _has_other_data(job, overwrite)
        job.config = dataclasses.replace(job.config, overwrite=anew)


def reopen_other_data(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Check that finished runs saw the data which those that are still to be trained will see.

    Where all are finished, or read other files, nothing is read.

    Args:
        jobs: The jobs as :func:`resolve` left them.
        overwrite: Mark finished runs of other data as waiting, to be begun anew.

    Raises:
        ValueError: If there is one and it may not be overwritten.
        FileNotFoundError: If the data are not there.
    """
    needed = [job.config.data for job in jobs if job.state == "waiting"]
    for job in jobs:
        if (
            job.state == "finished"
            and job.config.data in needed
            and _has_other_data(job, overwrite)
        ):
            job.state = "waiting"
            job.config = dataclasses.replace(job.config, overwrite=True)


def _has_other_data(job: Job, overwrite: bool) -> bool:
    """Return whether the data changed since a run was begun; raise if that may not be."""
    if read_record(job.folder) is None:
        return False
    difference = other_data(job.folder, DataRecord(job.config.data.digests()))
    if difference is not None and not overwrite:
        raise ValueError(
            f"{job.folder} holds a run that was begun with other data ({difference}); restore "
            "them, choose another out, or start such runs again with --overwrite=true"
        )
    return difference is not None


# ── where runs are started ───────────────────────────────────────────────────────────────────────

LauncherName = Literal["local", "submitit", "ray"]
LAUNCHERS: tuple[LauncherName, ...] = get_args(LauncherName)


class Started(ABC):
    """A run that a launcher has started, or put into a queue."""

    @abstractmethod
    def poll(self) -> int | str | None:
        """Return its exit status, or why a cluster ended it; None until it has ended."""

    @abstractmethod
    def stop(self) -> None:
        """Make it save and stop; called again, stop at once."""


class Launcher(ABC):
    """Starts runs.

    Attributes:
        at_once: Runs at a time; None leaves that to a queue.
    """

    at_once: int | None = 1

    @abstractmethod
    def start(self, folder: str, overwrite: bool) -> Started:
        """Start a run by the settings beside its folder."""

    def close(self) -> None:  # noqa: B027
        """Close what was opened."""


def make_launcher(
    name: LauncherName,
    settings: Mapping[str, Mapping[str, Any]],
    out: Path,
    at_once: int | None,
    console: Console,
) -> Launcher:
    """Make a launcher by its name.

    Args:
        name: One of ``LAUNCHERS``.
        settings: Settings of launchers by name, as the sweep's file has them.
        out: Folder of the sweep, which every machine sees under this name.
        at_once: Runs at a time; None for one here, and as many as a queue takes elsewhere.
        console: Receives a line about the cluster that is used.

    Raises:
        ValueError: If there is no launcher of that name, or it has no such settings.
        MissingPackageError: If its package is not installed.
    """
    if name not in LAUNCHERS:
        raise ValueError(f"launcher={name} is no launcher{did_you_mean(name, LAUNCHERS)}")
    if at_once is not None and at_once < 1:
        raise ValueError(f"jobs={at_once} must be at least 1")
    if name == "local":
        return Local(at_once or 1)
    if name == "submitit":
        return Submitit(settings.get(name, {}), out, at_once, console)
    return Ray(settings.get(name, {}), at_once)


def start_run(
    folder: str, overwrite: bool, cwd: str = ".", threads: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start ``comera train`` by the settings beside a folder, as a child that ends with its parent.

    Args:
        folder: Folder of the run.
        overwrite: Begin it anew.
        cwd: The folder that relative paths are meant from.
        threads: Threads of torch, unless the settings say how many; None leaves that to torch.
    """
    words = [f"{folder}.yaml", *["--overwrite=true"] * overwrite]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), PARENT: str(os.getpid())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    log = Path(cwd, folder, LOG)
    log.parent.mkdir(parents=True, exist_ok=True)
    # Slurm sends these to all processes of a job whose time is up; submitit alone answers. Ray
    # blocks SIGINT.
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


class Local(Launcher):
    """Starts runs as processes of this machine, which share the threads that torch would use."""

    def __init__(self, at_once: int) -> None:
        self.at_once: int = at_once
        self._threads = max(1, torch.get_num_threads() // at_once)

    def start(self, folder: str, overwrite: bool) -> Started:
        return _Process(start_run(folder, overwrite, threads=self._threads))


class _Process(Started):
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)


@dataclass
class Remote:
    """A run for submitit or Ray to call, in a process that they have started on some machine.

    Args:
        folder: Folder of the run.
        overwrite: Begin it anew.
        cwd: The folder that relative paths are meant from.
        permit: The run stops when this file is gone; empty for none.
    """

    folder: str
    overwrite: bool
    cwd: str
    permit: str = ""
    _process: Any = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        """Train it; returns the exit status of ``comera train``."""
        if self._is_revoked():
            return INTERRUPTED
        self._process = start_run(self.folder, self.overwrite, self.cwd)
        asked = False
        try:
            while self._process.poll() is None:
                time.sleep(_EVERY_SECONDS)
                if not asked and self._is_revoked():
                    asked = True
                    self._process.send_signal(signal.SIGINT)
        except KeyboardInterrupt:  # Ray's way to cancel
            asked = True
            self._stop()
        status = self._process.returncode
        if status == INTERRUPTED and not asked and self.permit:
            # Slurm told all processes of the job. If it is to be queued again, submitit is told
            # next, and this process does not come back from here.
            time.sleep(_GRACE_SECONDS)
        return status

    def checkpoint(self) -> Any:
        """Save and stop: submitit calls this where time is up, and what it gets is queued again."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        return DelayedSubmission(dataclasses.replace(self, overwrite=False))

    def _stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def _is_revoked(self) -> bool:
        return bool(self.permit) and not Path(self.permit).exists()


class Submitit(Launcher):
    """Hands runs to Slurm through submitit; where there is no Slurm, to processes started by it.

    A run whose time is up saves and goes back into the queue. Every machine sees the folder of the
    sweep and the data under the same names.

    Args:
        settings: What ``submitit.AutoExecutor.update_parameters`` takes, such as ``timeout_min``,
            ``gpus_per_node`` and ``slurm_partition``; and ``cluster``, to be ``slurm`` or
            ``local``.
        out: Folder of the sweep; submitit keeps its files in ``submitit`` there.
        at_once: Runs in the queue at a time; None for all, or for one where there is no Slurm.
        console: Receives a line that says whether there is Slurm.

    Raises:
        ValueError: For settings that submitit does not know.
    """

    def __init__(
        self, settings: Mapping[str, Any], out: Path, at_once: int | None, console: Console
    ) -> None:
        with needed_by("--launcher=submitit"):
            from submitit import AutoExecutor
        parameters = dict(settings)
        cluster = parameters.pop("cluster", None)
        # The run of this command holds the file: runs stop when it is gone, wherever they are.
        self._permit = (out / f".runs-{uuid4().hex}").absolute()
        try:
            self._executor = AutoExecutor((out / "submitit").absolute(), cluster)
            if self._executor.cluster == "local":
                parameters.setdefault("timeout_min", _A_WEEK)
            self._executor.update_parameters(**parameters)
        except (NameError, ValueError, AssertionError) as problem:
            raise ValueError(f"submitit={dict(settings)}: {problem}") from None
        local = self._executor.cluster == "local"
        self.at_once = at_once or (1 if local else None)
        where = "processes of this machine, as there is no Slurm" if local else "Slurm"
        console.print(f"submitit starts the runs through {where}", markup=False)
        self._permit.touch()

    def start(self, folder: str, overwrite: bool) -> Started:
        run = Remote(folder, overwrite, os.getcwd(), str(self._permit))
        return _Submitted(self._executor.submit(run), self._permit)

    def close(self) -> None:
        self._permit.unlink(missing_ok=True)


class _Submitted(Started):
    def __init__(self, job: Any, permit: Path) -> None:
        self._job, self._permit = job, permit

    def poll(self) -> int | str | None:
        if not self._permit.exists() and self._job.state in ("PENDING", "REQUEUED"):
            self._job.cancel(check=False)
            return INTERRUPTED
        if not self._job.done():
            return None
        try:
            return self._job.result()
        except Exception as problem:  # whatever the run or the cluster came to
            return f"its job {self._job.job_id} ended: {str(problem).strip()}"

    def stop(self) -> None:
        if not self._permit.exists():
            self._job.cancel(check=False)
        self._permit.unlink(missing_ok=True)


class Ray(Launcher):
    """Hands runs to the machines of a Ray cluster, or to a Ray of this machine.

    Every machine sees the folder of the sweep and the data under the same names.

    Args:
        settings: ``address`` of a cluster, ``auto`` for the one that this machine is part of; and
            what a task takes, such as ``num_cpus`` and ``num_gpus``.
        at_once: Runs that Ray knows of at a time; None for all.

    Raises:
        ValueError: For settings that Ray does not know.
    """

    def __init__(self, settings: Mapping[str, Any], at_once: int | None) -> None:
        with needed_by("--launcher=ray"):
            import ray
        options = dict(settings)
        address = options.pop("address", None)
        try:
            self._task: Any = ray.remote(lambda run: run()).options(**options)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"ray={dict(settings)}: {problem}") from None
        self._ray, self.at_once = ray, at_once
        try:
            ray.init(
                address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR
            )
        except ConnectionError as problem:
            raise ValueError(f"ray={dict(settings)}: {problem}") from None

    def start(self, folder: str, overwrite: bool) -> Started:
        return _Tasked(self._ray, self._task.remote(Remote(folder, overwrite, os.getcwd())))

    def close(self) -> None:
        self._ray.shutdown()


class _Tasked(Started):
    def __init__(self, ray: Any, result: Any) -> None:
        self._ray, self._result, self._stopping = ray, result, False

    def poll(self) -> int | str | None:
        ended, _ = self._ray.wait([self._result], timeout=0)
        if not ended:
            return None
        try:
            return self._ray.get(self._result)
        except self._ray.exceptions.TaskCancelledError:
            return INTERRUPTED
        except Exception as problem:  # whatever the run or the cluster came to
            return f"its task ended: {str(problem).strip()}"

    def stop(self) -> None:
        self._ray.cancel(self._result, force=self._stopping)
        self._stopping = True


# ── running them ─────────────────────────────────────────────────────────────────────────────────


def run_jobs(
    jobs: list[Job],
    launcher: Launcher | None = None,
    overwrite: bool = False,
    watch: Callable[[], None] = lambda: None,
    more: Callable[[], Sequence[Job]] = lambda: (),
) -> bool:
    """Run all jobs that are not finished, in their order.

    A job that fails does not stop the others. Ctrl-C, SIGTERM or a terminal that is closed is
    handed on to every running job, which saves and stops; a second one stops them at once.

    Args:
        jobs: The jobs as :func:`resolve` left them; their states are kept up to date.
        launcher: Where they run; None for one after the other here.
        overwrite: Begin a run anew whose folder holds other settings.
        watch: Called when states have changed, and several times a second.
        more: Called when there is room for a job and none can begin; returns jobs that are added
            to the list, or nothing if there are none now.

    Returns:
        Whether all jobs were run; False after a signal.
    """
    launcher = launcher or Local(1)
    running: dict[Job, Started] = {}
    signals: list[int] = []
    handed_on = 0
    # Only noted: what a launcher does to stop a run may not be done in the middle of anything.
    with on_stop_signals(signals.append):
        try:
            while True:
                while not signals and _has_room(launcher, running):
                    job = _next(jobs, overwrite)
                    if job is not None:
                        _write_settings(job.config)
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
                    status = run.poll()
                    if status is not None:
                        del running[job]
                        _close(job, status, bool(signals))
        finally:  # there are none left, unless a callback raised
            for run in running.values():
                run.stop()


def _has_room(launcher: Launcher, running: Mapping[Job, Started]) -> bool:
    return launcher.at_once is None or len(running) < launcher.at_once


def _next(jobs: Sequence[Job], overwrite: bool) -> Job | None:
    """Return the first job that waits and can begin."""
    for job in jobs:
        if job.state == "waiting":
            try:
                resolve([job], overwrite)
            except (ValueError, OSError) as problem:
                job.state, job.reason = "failed", str(problem)
            if job.state == "waiting":
                return job
    return None


def _write_settings(config: RunConfig) -> None:
    """Write the settings of a run beside its folder, for ``comera train``."""
    settings = dataclasses.asdict(dataclasses.replace(config, overwrite=False))
    path = Path(f"{config.out}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        text = yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False)
        temporary.write_text(text, encoding="utf-8")


def _close(job: Job, status: int | str, stopped: bool) -> None:
    """Set the state of a job whose run has ended."""
    error = status if isinstance(status, str) else why_failed(last_session(job.folder) or "")
    if status == 0:
        job.state = "finished"
    elif status in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM) or (stopped and not error):
        job.state = "stopped"
    else:
        job.state = "failed"
        job.reason = error or f"its process ended with exit code {status}"
