import os

import pytest

from benchmarks import timing


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
