"""Signals that have training save and stop: Ctrl-C, SIGTERM, and that of a closed terminal."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PARENT = "COMERA_PARENT"
"""Environment variable: the process that a run ends with, which is its parent."""


def stop_with_parent() -> None:
    """Send this process SIGINT once its parent has ended in whatever way, if ``PARENT`` is set."""
    parent = os.environ.pop(PARENT, None)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def on_stop_signals(heard: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call ``heard`` with the number of each signal that asks the process to stop, and go on.

    These are SIGINT, SIGTERM and SIGHUP, unless the latter is ignored, as under nohup. A SIGHUP
    after another signal does not count, since the system and the shell both send it. After it,
    output to the terminal, which is gone, is dropped.

    Yields a function that restores the handlers of SIGINT and SIGTERM. Threads other than the main
    one receive no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    terminals = [number for number in (1, 2) if os.isatty(number)]
    numbers: list[int] = []

    def hear(number: int, frame: Any) -> None:
        again = bool(numbers)
        numbers.append(number)
        if number == signal.SIGHUP:
            _let_go(terminals)
        if number != signal.SIGHUP or not again:
            heard(number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
    before = {number: signal.signal(number, hear) for number in caught}

    def give_back() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, before[number])

    try:
        yield give_back
    finally:
        give_back()
        if not ignored:  # a shell may send it only now, while the state is being saved
            hung_up = signal.SIGHUP in numbers
            signal.signal(signal.SIGHUP, signal.SIG_IGN if hung_up else before[signal.SIGHUP])


def _let_go(terminals: list[int]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)
