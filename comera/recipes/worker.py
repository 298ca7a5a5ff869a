"""One run in a process of its own: what it prints goes to a file, signals make it save and stop."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from rich.console import Console

from comera.allocator import reuse_freed_memory
from comera.recipes.run import run
from comera.recipes.run_config import RunConfig

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOG_WIDTH = 120


def work(config: RunConfig, threads: int, messages: Connection) -> None:
    """Carry out one run, in a process of its own that was started with ``SIGNALS`` blocked.

    Args:
        config: The run. What it prints goes to ``log.txt`` in its folder.
        threads: Threads of torch, unless the settings say how many.
        messages: The connection that is sent ``("began", steps)`` and at the end ``("finished",
            "")``, ``("stopped", "")`` or ``("failed", reason)``.
    """
    # The terminal's Ctrl-C goes to the starting process only, which hands it on as SIGTERM: a run
    # that got it twice would stop without saving. What came before is dropped by ignoring it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    folder = Path(config.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_to(folder / "log.txt")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        logging.basicConfig(format="%(message)s", level=logging.INFO)
        reuse_freed_memory()
        torch.set_num_threads(threads)
        console = Console(file=sys.stdout, width=_LOG_WIDTH)
        console.print(f"{config.train.threads or threads} threads")
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
