import os

import pytest

from benchmarks import timing
from benchmarks.timing import Timings, alternate


class Clock:
    """Time that passes only where a run says so."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def run(self, name, *seconds):
        left = list(seconds)

        def call():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call

    def __call__(self):
        return self.now


def test_ratios_are_taken_round_by_round():
    clock = Clock()
    runs = {"a": clock.run("a", 100, 2, 4, 6, 8), "b": clock.run("b", 50, 1, 1, 3, 2)}
    timings = alternate(runs, 4, "a", clock=clock)
    assert timings.seconds == {"a": [2, 4, 6, 8], "b": [1, 1, 3, 2]}  # the warm-up is left out
    assert timings.median("a") == 5
    assert timings.ratios("b") == [2, 4, 2, 4]
    assert timings.ratio("b") == 3
    assert timings.quartiles("b") == (2, 4)
    assert timings.as_dict()["summary"]["b"] == {"median_ms": 1500, "ratio": 3}


def test_each_round_begins_with_another_run():
    clock = Clock()
    runs = {name: clock.run(name, 1) for name in "abc"}
    alternate(runs, 3, "a", clock=clock)
    assert "".join(clock.order) == "abc" + "bca" + "cab" + "abc"


def test_a_short_run_is_called_several_times_a_sample():
    clock = Clock()
    runs = {"short": clock.run("short", 0.001), "long": clock.run("long", 1)}
    timings = alternate(runs, 2, "long", at_least=0.02, clock=clock)
    assert timings.median("short") == pytest.approx(0.001)
    assert clock.order.count("long") == 3
    assert clock.order.count("short") > 3 * 20


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match=r"runs of \[1, 2\] rounds"):
        Timings({"a": [1.0], "b": [1.0, 2.0]}, "a")
    with pytest.raises(ValueError, match="baseline='c' must be one of 'a'"):
        Timings({"a": [1.0]}, "c")
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        alternate({"a": lambda: None}, 0, "a")


def test_other_numbers_take_the_place_of_a_run():
    timings = Timings({"a": [1.0, 2.0], "b": [1.0, 1.0]}, "a").with_seconds("b", [4.0, 4.0])
    assert timings.ratios("b") == [0.25, 0.5]


class Machine:
    """A system of two cores whose counters and clocks a test sets."""

    def __init__(self, monkeypatch, tmp_path):
        self.stat, self.wall, self.own = tmp_path / "stat", 0.0, 0.0
        monkeypatch.setattr(timing, "_STAT", self.stat)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(timing.time, "process_time", lambda: self.own)
        monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
        self.show(0)

    def show(self, busy):
        ticks = int(busy * os.sysconf("SC_CLK_TCK"))
        self.stat.write_text(f"cpu  {ticks} 0 0 999 999 0 0 0 0 0\ncpu0 1 1\n")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("others", "threads", "said"), [(0, 2, False), (10, 2, True), (10, 1, False), (15, 1, True)]
)
def test_others_are_named_where_cores_are_short(machine, others, threads, said):
    verdict = timing.watch_neighbours()
    machine.wall, machine.own = 10, 10
    machine.show(10 + others)
    line = verdict(threads)
    assert (line is not None) == said
    assert line is None or f"other processes took {others / 10} of 2 cores" in line


def test_nothing_is_said_of_moments_or_of_systems_that_do_not_count(machine):
    verdict = timing.watch_neighbours()
    machine.wall = 0.1
    machine.show(50)
    assert verdict(2) is None
    machine.stat.unlink()
    machine.wall = 10
    assert verdict(2) is None
    assert timing.watch_neighbours()(2) is None
