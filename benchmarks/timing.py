"""Times of functions that take turns, on a machine that others use too."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

_STAT = Path("/proc/stat")
_SHORTEST = 0.5
"""Seconds below which the system's counters are too coarse."""

_TOLERATED = 0.1
"""Cores that others may take from a process without a word."""

_MORE_ROOM = 1.2
"""Calls of a sample are counted out for so many times its least duration."""


def watch_neighbours() -> Callable[[int], str | None]:
    """Begin to watch other processes.

    Returns:
        A function of the threads in use. It returns a line if cores were short, and None where they
        were not or the system does not count.
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
    """Return the seconds that all cores were busy since the start of the system."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, *interrupts = map(int, words[:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Timings:
    """Seconds of several runs, one number a round.

    Args:
        seconds: Seconds of each round by name of the run; all runs have equally many rounds, and at
            least one.
        baseline: Name of the run that the others are compared with.

    Raises:
        ValueError: If the baseline is no run, or the runs differ in rounds or have none.
    """

    seconds: Mapping[str, list[float]]
    baseline: str

    def __post_init__(self) -> None:
        rounds = {len(values) for values in self.seconds.values()}
        if len(rounds) != 1 or 0 in rounds:
            raise ValueError(f"runs of {sorted(rounds)} rounds cannot be compared")
        if self.baseline not in self.seconds:
            raise ValueError(
                f"baseline={self.baseline!r} must be one of {', '.join(map(repr, self.seconds))}"
            )

    def median(self, name: str) -> float:
        """Return the median seconds of a run."""
        return median(self.seconds[name])

    def ratios(self, name: str) -> list[float]:
        """Return baseline over run in each round; above 1 the run is faster."""
        pairs = zip(self.seconds[self.baseline], self.seconds[name], strict=True)
        return [base / own for base, own in pairs]

    def ratio(self, name: str) -> float:
        """Return the median of the ratios."""
        return median(self.ratios(name))

    def quartiles(self, name: str) -> tuple[float, float]:
        """Return the bounds between which the middle half of the ratios lies."""
        values = self.ratios(name)
        if len(values) == 1:
            return values[0], values[0]
        low, _, high = quantiles(values, method="inclusive")
        return low, high

    def with_seconds(self, name: str, seconds: list[float]) -> "Timings":
        """Return the same timings with other numbers for one run."""
        return Timings({**self.seconds, name: seconds}, self.baseline)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for a JSON file."""
        summary = {
            name: {"median_ms": 1e3 * self.median(name), "ratio": self.ratio(name)}
            for name in self.seconds
        }
        return {"baseline": self.baseline, "summary": summary, "seconds": dict(self.seconds)}


def alternate(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    baseline: str,
    at_least: float = 0.0,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time each run once a round, in turn; each round begins with another one.

    A round before the others does not count. It finds out how often a short run has to be called.

    Args:
        runs: What to time, by name.
        repeats: Rounds that count.
        baseline: Name of the run that the others are compared with.
        at_least: Seconds a sample should take: a shorter run is called several times in a row,
            and the sample is their mean.
        synchronize: Waits until the device has finished.
        clock: Seconds from any origin.

    Raises:
        ValueError: If ``repeats`` is below one.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    names = list(runs)
    calls: dict[str, int] = {}

    def sample(name: str, count: int) -> float:
        run = runs[name]
        synchronize()
        began = clock()
        for _ in range(count):
            run()
        synchronize()
        return clock() - began

    def warm(name: str) -> int:
        # No more than tenfold at once: the length of a short sample is mostly noise.
        count, took = 1, sample(name, 1)
        while took < at_least:
            count = max(count + 1, min(10 * count, int(_MORE_ROOM * at_least / took * count) + 1))
            took = sample(name, count)
        return count

    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1 + repeats):
        # In turn, so that others on the machine slow down all runs alike, and from another one on
        # each time, so that none always finds the caches that the same run has left.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if number == 0:
                calls[name] = warm(name)
            else:
                seconds[name].append(sample(name, calls[name]) / calls[name])
    return Timings(seconds, baseline)


def milliseconds(value: float) -> str:
    """Return about three digits of milliseconds, whatever the magnitude."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
