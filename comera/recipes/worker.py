"""One run in a process of its own: what it prints goes to a file, signals make it save and stop."""

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from comera.allocator import reuse_freed_memory
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
