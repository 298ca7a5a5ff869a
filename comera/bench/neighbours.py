"""Whether other processes were at work while something was timed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")
_SHORTEST = 0.5
"""Seconds below which the system's counters are too coarse."""

_TOLERATED = 0.1
"""Cores that others may take from a process without a word."""


def watch_neighbours() -> Callable[[int], str | None]:
    """Start here; the result, called with the threads in use, is a line if cores were short.

    Where the system does not count, it is never one.
    """
    busy, own, began = _busy_seconds(), time.process_time(), time.perf_counter()

    def verdict(threads: int) -> str | None:
        passed, now = time.perf_counter() - began, _busy_seconds()
        if busy is None or now is None or passed < _SHORTEST:
            return None
        others = (now - busy - (time.process_time() - own)) / passed
        cores = os.cpu_count() or 1
        if others < max(0, cores - threads) + _TOLERATED:
            return None
        return (
            f"other processes took {others:.1f} of {cores} cores meanwhile: these times are of a "
            "busy machine"
        )

    return verdict


def _busy_seconds() -> float | None:
    """Of all cores since the start of the system."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, *interrupts = map(int, words[:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
