"""Times of functions that take turns, on a machine that others use too."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

_STAT = Path("/proc/stat")
_SHORTEST = 0.5  # seconds below which the system's counters are too coarse
_TOLERATED = 0.1  # cores that other processes may use
_MORE_ROOM = 1.2  # planned duration of a sample over its least one


def watch_neighbours() -> Callable[[int], str | None]:
    """Begin to watch other processes.

    Returns:
        A function of the threads in use, which returns a sentence if cores were short.
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
    """Return the seconds that all cores were busy since the start of the system, if known."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, *interrupts = map(int, words[:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Timings:
    """Seconds of several runs by name, one number a round; the baseline is one of them."""

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
        return median(self.seconds[name])

    def ratios(self, name: str) -> list[float]:
        """Return baseline over run in each round; above 1 the run is faster."""
        pairs = zip(self.seconds[self.baseline], self.seconds[name], strict=True)
        return [base / own for base, own in pairs]

    def ratio(self, name: str) -> float:
        return median(self.ratios(name))

    def quartiles(self, name: str) -> tuple[float, float]:
        """Return the quartiles of the ratios."""
        values = self.ratios(name)
        if len(values) == 1:
            return values[0], values[0]
        low, _, high = quantiles(values, method="inclusive")
        return low, high

    def with_seconds(self, name: str, seconds: list[float]) -> "Timings":
        return Timings({**self.seconds, name: seconds}, self.baseline)

    def as_dict(self) -> dict[str, Any]:
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

    A first round that does not count finds the number of calls after which a sample takes
    ``at_least`` seconds; the sample is their mean. ``synchronize`` waits for the device.
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
        # In turn, so that other processes slow down all runs alike; from another one on each time,
        # so that none always finds the caches of the same run.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if number == 0:
                calls[name] = warm(name)
            else:
                seconds[name].append(sample(name, calls[name]) / calls[name])
    return Timings(seconds, baseline)


def milliseconds(value: float) -> str:
    """Return milliseconds in about three digits."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
