"""Many runs, each in a process of its own, a few at a time."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from comera.recipes.data_record import DataRecord, read_record
from comera.recipes.folder import is_finished, other_data, other_settings
from comera.recipes.launchers import Launcher, Local, Started, signals_blocked
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task_kinds import kind_of
from comera.train.stop_signals import on_stop_signals

_EVERY_SECONDS = 0.5

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
        steps: Optimizer steps of the run, once they are known.
        anew: Train it though it is finished.
    """

    variant: str
    seed: int
    config: RunConfig
    state: State = "waiting"
    reason: str = ""
    steps: int | None = None
    anew: bool = False

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.out)


@dataclass
class Watcher:
    """Callbacks on jobs while they run, each described by what it is called with.

    Attributes:
        began: A job whose process was started.
        ended: A job that finished, failed or stopped.
        looked: The running jobs, about twice a second.
    """

    began: Callable[[Job], None] = lambda job: None
    ended: Callable[[Job], None] = lambda job: None
    looked: Callable[[Sequence[Job]], None] = lambda jobs: None


@dataclass
class _Running:
    job: Job
    run: Started


def resolve(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Mark the jobs that are finished already, and find out what stands in the way of the others.

    Args:
        jobs: All of them.
        overwrite: Begin a run anew whose folder holds other settings, or that was begun with other
            data.

    Raises:
        ValueError: If a folder holds such a run and may not be overwritten.
        FileNotFoundError: If the data of a run that was begun are not there.
    """
    for job in jobs:
        if job.state != "waiting" or find_finished([job]):
            continue
        difference = other_settings(job.config)
        if difference is not None and not overwrite:
            raise ValueError(
                f"{job.folder} holds a run with other settings ({difference}); choose another "
                "out, or start such runs again with --overwrite=true"
            )
        anew = difference is not None or job.anew or _has_other_data(job, overwrite)
        job.config = dataclasses.replace(job.config, overwrite=anew)


def find_finished(jobs: Sequence[Job]) -> list[Job]:
    """Mark and return the jobs that are finished already; what others are does not matter."""
    found = [job for job in jobs if job.state == "waiting" and not job.anew]
    found = [job for job in found if is_finished(job.config)]
    for job in found:
        job.state = "finished"
    return found


def reopen_other_data(jobs: Sequence[Job], overwrite: bool = False) -> None:
    """Make sure that finished runs saw the data which those that are still to be trained will see.

    Where all are finished, or read other files, nothing is read.

    Args:
        jobs: The jobs as :func:`resolve` left them.
        overwrite: Mark finished runs of other data as waiting, to be begun anew.

    Raises:
        ValueError: If there is one and it may not be overwritten.
        FileNotFoundError: If the data are not there.
    """
    needed = [_data_settings(job) for job in jobs if job.state == "waiting"]
    for job in jobs:
        finished = job.state == "finished" and _data_settings(job) in needed
        if finished and _has_other_data(job, overwrite):
            job.state, job.anew = "waiting", True
            job.config = dataclasses.replace(job.config, overwrite=True)


def _has_other_data(job: Job, overwrite: bool) -> bool:
    """Tell whether a run was begun with other data than are there now; raise if that may not be."""
    if read_record(job.folder) is None:
        return False
    difference = other_data(job.folder, DataRecord(kind_of(job.config).data_digests(job.config)))
    if difference is not None and not overwrite:
        raise ValueError(
            f"{job.folder} holds a run that was begun with other data ({difference}); restore "
            "them, choose another out, or start such runs again with --overwrite=true"
        )
    return difference is not None


def _data_settings(job: Job) -> tuple[Any, ...]:
    config = job.config
    return config.masked_text, config.causal_text, config.nli, config.clicks


def run_jobs(
    jobs: list[Job],
    launcher: Launcher | None = None,
    overwrite: bool = False,
    watcher: Watcher | None = None,
    more: Callable[[], Sequence[Job]] = lambda: (),
) -> bool:
    """Run all jobs that are not finished, in their order.

    A job that fails does not stop the others. Ctrl-C, SIGTERM or a
    terminal that is closed is handed on to every running job, which saves and stops; a second one
    stops them at once.

    Args:
        jobs: The jobs as :func:`resolve` left them; their states are kept up to date.
        launcher: Where they run; None for one after the other here.
        overwrite: Begin a run anew whose folder holds other settings.
        watcher: Callbacks that are called as jobs start, run and end.
        more: Called when there is room for a job and none can begin; returns jobs that are added
            to the list, or nothing if there are none now.

    Returns:
        Whether all jobs were run; False after a signal.
    """
    watcher = watcher or Watcher()
    launcher = launcher or Local(1)
    running: list[_Running] = []
    handed_on = 0
    try:
        with _counted_signals() as signals:
            while True:
                while not signals and _has_room(launcher, running):
                    job = _next(jobs, overwrite, watcher)
                    if job is None:
                        added = more()
                        if not added:
                            break
                        jobs.extend(added)
                        continue
                    with signals_blocked():  # until the new process is among those that get them
                        if signals:
                            break
                        running.append(_Running(job, launcher.start(job.config)))
                        job.state = "running"
                    watcher.began(job)
                if not running:
                    return not signals
                sentinels = [r.run.sentinel for r in running if r.run.sentinel is not None]
                wait(sentinels, timeout=_EVERY_SECONDS)
                while handed_on < len(signals):
                    handed_on += 1
                    for one in running:
                        one.run.stop()
                for one in list(running):
                    ended = one.run.look()
                    one.job.steps = one.run.steps
                    if ended:
                        running.remove(one)
                        _close(one, bool(signals))
                        watcher.ended(one.job)
                watcher.looked([one.job for one in running])
    finally:  # there are none left, unless a watcher raised
        for one in running:
            one.run.stop()


def _has_room(launcher: Launcher, running: Sequence[_Running]) -> bool:
    return launcher.at_once is None or len(running) < launcher.at_once


def _next(jobs: Sequence[Job], overwrite: bool, watcher: Watcher) -> Job | None:
    """Return the first job that can begin now."""
    for job in jobs:
        if job.state != "waiting":
            continue
        try:
            resolve([job], overwrite)
        except (ValueError, OSError) as problem:
            job.state, job.reason = "failed", str(problem)
        if job.state != "waiting":
            watcher.ended(job)
        else:
            return job
    return None


def _close(one: _Running, stopped: bool) -> None:
    """Note how a run ended."""
    kind, text = one.run.said
    if kind in ("finished", "stopped"):
        one.job.state = "finished" if kind == "finished" else "stopped"
    elif stopped and not text:  # by a second signal, in the middle of something
        one.job.state = "stopped"
    else:
        one.job.state = "failed"
        one.job.reason = text or one.run.ending()
    one.run.close()


@contextlib.contextmanager
def _counted_signals() -> Iterator[list[int]]:
    """Collect signals to stop instead of ending by them."""
    found: list[int] = []
    # Only noted: what a launcher does to stop a run may not be done in the middle of anything.
    with on_stop_signals(found.append):
        yield found
