"""Where the runs of a sweep are started: on this machine, by submitit (Slurm), or by Ray.

One run in a process of its own: what it prints goes to a file, signals make it save and stop.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import uuid4

import torch
from rich.console import Console

from comera.allocator import reuse_freed_memory
from comera.extras import did_you_mean, needed_by
from comera.recipes.run import run
from comera.recipes.run_config import RunConfig

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOT_FOR_RUNS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""What Slurm sends to every process of a job whose time is up, and submitit alone answers; and
what the starting process gets from its terminal, and hands on."""
_LOG_WIDTH = 120
_EVERY_SECONDS = 0.5
_GRACE_SECONDS = 60.0


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait; a process started meanwhile has them wait until it asks.

    Without that, Ctrl-C in the seconds of its imports would be lost, or print a traceback.
    """
    resource_tracker.ensure_running()  # starting it unblocks them: not in between, then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *_NOT_FOR_RUNS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_message(messages: Connection) -> tuple[str, str] | None:
    """Return the next thing that :func:`work` has said, None if there is nothing."""
    with contextlib.suppress(EOFError):
        if messages.poll():
            return messages.recv()
    return None


@dataclass
class Remote:
    """A run for another library to call, in a process that it has started on some machine.

    The run has a process of its own, which the caller's tells to stop: by Ctrl-C, or as a file is
    gone.

    Args:
        config: The run.
        cwd: The folder that relative paths are meant from.
        permit: The run stops when this file is gone; empty for none.
    """

    config: RunConfig
    cwd: str
    permit: str = ""
    _process: Any = field(default=None, init=False, repr=False)

    def __call__(self) -> tuple[str, str]:
        """Carry it out; returns what :func:`work` says at the end."""
        if self._is_revoked():
            return "stopped", ""
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe(duplex=False)
        self._process = context.Process(target=work, args=(self.config, None, its, self.cwd))
        with signals_blocked():
            self._process.start()
        its.close()
        asked = False
        try:
            while self._process.exitcode is None:
                wait([self._process.sentinel], timeout=_EVERY_SECONDS)
                if not asked and self._is_revoked():
                    asked = True
                    self._process.terminate()
        except KeyboardInterrupt:  # Ray's way to cancel
            asked = True
            self._stop()
        said = "failed", f"its process ended with exit code {self._process.exitcode}"
        while (message := take_message(mine)) is not None:
            said = message if message[0] != "began" else said
        if said[0] == "stopped" and not asked and self.permit:
            # Slurm told all processes of the job. If it is to be queued again, submitit is told
            # next, and this process does not come back from here.
            time.sleep(_GRACE_SECONDS)
        return said

    def checkpoint(self) -> Any:
        """Save and stop: submitit calls this where time is up, and what it gets is queued again."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        later = dataclasses.replace(self.config, overwrite=False)
        return DelayedSubmission(Remote(later, self.cwd, self.permit))

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join()

    def _is_revoked(self) -> bool:
        return bool(self.permit) and not Path(self.permit).exists()


def work(
    config: RunConfig, threads: int | None, messages: Connection, cwd: str | None = None
) -> None:
    """Carry out one run, in a process of its own that was started with ``SIGNALS`` blocked.

    Args:
        config: The run. What it prints goes to ``log.txt`` in its folder.
        threads: Threads of torch, unless the settings say how many; None leaves that to torch.
        messages: The connection that is sent ``("began", steps)`` and at the end ``("finished",
            "")``, ``("stopped", "")`` or ``("failed", reason)``.
        cwd: The folder that relative paths are meant from, where it is not this process'.
    """
    # The terminal's Ctrl-C goes to the starting process only, which hands it on as SIGTERM: a run
    # that got it twice would stop without saving. What came before is dropped by ignoring it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    for number in _NOT_FOR_RUNS:
        signal.signal(number, signal.SIG_IGN)
    try:
        if cwd is not None:
            os.chdir(cwd)
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        _write_to(folder / "log.txt")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *_NOT_FOR_RUNS))
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        logging.basicConfig(format="%(message)s", level=logging.INFO)
        reuse_freed_memory()
        if threads is not None:
            torch.set_num_threads(threads)
        console = Console(file=sys.stdout, width=_LOG_WIDTH)
        console.print(f"{config.train.threads or torch.get_num_threads()} threads")
        outcomes = run(config, console, True, lambda steps: messages.send(("began", str(steps))))
        said = "finished" if outcomes else "stopped", ""
    except KeyboardInterrupt:
        said = "stopped", ""
    except Exception as problem:
        traceback.print_exc()
        plain = isinstance(problem, ValueError | OSError)
        said = "failed", str(problem) if plain else f"{type(problem).__name__}: {problem}"
    for number in SIGNALS:  # nothing is left to stop
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        messages.send(said)


def _write_to(path: Path) -> None:
    """Let everything that this process prints, from C too, be appended to a file."""
    with path.open("a", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115


def _stop_with_parent() -> None:
    """Save and stop when the starting process is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a run of a sweep is started by another process"
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


LauncherName = Literal["local", "submitit", "ray"]
LAUNCHERS: tuple[LauncherName, ...] = get_args(LauncherName)

_A_WEEK = 7 * 24 * 60


class Started(ABC):
    """A run that a launcher has started, or put into a queue.

    Attributes:
        steps: Its optimizer steps, once they are known.
        said: ``("finished", "")``, ``("stopped", "")`` or ``("failed", reason)``, once it has said
            so; before that ``("", "")``.
    """

    steps: int | None = None
    said: tuple[str, str] = ("", "")

    @property
    def sentinel(self) -> int | None:
        """Return what ``multiprocessing.connection.wait`` can wait for until it ends, if any."""
        return None

    @abstractmethod
    def look(self) -> bool:
        """Take what it has said so far; tell whether it has ended."""

    @abstractmethod
    def stop(self) -> None:
        """Have it save and stop; called again, stop at once."""

    @abstractmethod
    def ending(self) -> str:
        """Say how one ended that has not said so itself."""

    def close(self) -> None:  # noqa: B027
        """Let go of one that has ended."""


class Launcher(ABC):
    """Starts runs.

    Attributes:
        at_once: Runs at a time; None leaves that to a queue.
    """

    at_once: int | None = 1

    @abstractmethod
    def start(self, config: RunConfig) -> Started:
        """Start a run."""

    def close(self) -> None:  # noqa: B027
        """Let go of what was opened."""


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
        console: Where it says what it makes use of.

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


class Local(Launcher):
    """Starts runs as processes of this machine, which share the threads that torch would use."""

    def __init__(self, at_once: int) -> None:
        self.at_once: int = at_once
        self._threads = max(1, torch.get_num_threads() // at_once)

    def start(self, config: RunConfig) -> Started:
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(config, self._threads, its))
        with signals_blocked():
            process.start()
        its.close()
        return _Process(process, mine)


class _Process(Started):
    def __init__(self, process: Any, messages: Connection) -> None:
        self._process, self._messages = process, messages

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def look(self) -> bool:
        ended = self._process.exitcode is not None  # before the last messages are taken
        while (message := take_message(self._messages)) is not None:
            kind, text = message
            if kind == "began":
                self.steps = int(text)
            else:
                self.said = kind, text
        return ended

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, ValueError):  # it has just ended
            os.kill(self._process.pid, signal.SIGTERM)

    def ending(self) -> str:
        return f"its process ended with exit code {self._process.exitcode}"

    def close(self) -> None:
        self._messages.close()
        self._process.close()


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
        console: Where it says whether there is Slurm.

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

    def start(self, config: RunConfig) -> Started:
        job = self._executor.submit(Remote(config, os.getcwd(), str(self._permit)))
        return _Submitted(job, self._permit, config.train.steps)

    def close(self) -> None:
        self._permit.unlink(missing_ok=True)


class _Submitted(Started):
    def __init__(self, job: Any, permit: Path, steps: int | None) -> None:
        self._job, self._permit, self._reason, self.steps = job, permit, "", steps

    def look(self) -> bool:
        stopping = not self._permit.exists()
        if stopping and self._job.state in ("PENDING", "REQUEUED"):
            self._job.cancel(check=False)
            self.said = "stopped", ""
            return True
        if not self._job.done():
            return False
        try:
            self.said = self._job.result()
        except Exception as problem:  # whatever the run or the cluster came to
            self._reason = str(problem).strip()
        return True

    def stop(self) -> None:
        if not self._permit.exists():
            self._job.cancel(check=False)
        self._permit.unlink(missing_ok=True)

    def ending(self) -> str:
        return f"its job {self._job.job_id} ended: {self._reason}"


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
            self._task = ray.remote(_call).options(**options)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"ray={dict(settings)}: {problem}") from None
        self._ray, self.at_once = ray, at_once
        try:
            ray.init(
                address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR
            )
        except ConnectionError as problem:
            raise ValueError(f"ray={dict(settings)}: {problem}") from None

    def start(self, config: RunConfig) -> Started:
        result = self._task.remote(Remote(config, os.getcwd()))
        return _Tasked(self._ray, result, config.train.steps)

    def close(self) -> None:
        self._ray.shutdown()


def _call(run: Remote) -> tuple[str, str]:
    return run()


class _Tasked(Started):
    def __init__(self, ray: Any, result: Any, steps: int | None) -> None:
        self._ray, self._result, self.steps = ray, result, steps
        self._stopping, self._reason = False, ""

    def look(self) -> bool:
        ended, _ = self._ray.wait([self._result], timeout=0)
        if not ended:
            return False
        try:
            self.said = self._ray.get(self._result)
        except self._ray.exceptions.TaskCancelledError:
            self.said = "stopped", ""
        except Exception as problem:  # whatever the run or the cluster came to
            self._reason = str(problem).strip()
        return True

    def stop(self) -> None:
        self._ray.cancel(self._result, force=self._stopping)
        self._stopping = True

    def ending(self) -> str:
        return f"its task ended: {self._reason}"
