"""Seconds spent in training steps: on a GPU those of running them, not those of launching them."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A moment in the course of a device, which comes when all that was asked of it before is done.

    Marks are compared with marks of the same device.
    """

    def has_come(self) -> bool:
        """Say whether the device has got there; waits for nothing."""

    def wait(self) -> None:
        """Wait until the device has got there."""

    def seconds_since(self, before: Self) -> float:
        """Return the seconds between an earlier mark and this one; both must have come."""


class StepClock:
    """Sums the seconds of training steps; nothing in between waits for the device.

    A GPU runs behind what launches its work. So each step is put between two marks, which say
    later when the device began with it and when it was through; what it does between two steps,
    an evaluation for one, is in no step.

    Args:
        device: The device on which the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark, self._seconds = _marks_of(device), 0.0
        self._open: collections.deque[tuple[Mark, Mark]] = collections.deque()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count the seconds of what is done inside; none if it raises."""
        began = self._mark()
        yield
        self._open.append((began, self._mark()))
        while self._open and self._open[0][1].has_come():
            self._close()

    def add(self, seconds: float) -> None:
        """Add the seconds of earlier steps, such as those before a run was resumed."""
        self._seconds += seconds

    def seconds(self) -> float:
        """Return the seconds of all steps so far; waits until the device is through with them."""
        while self._open:
            self._open[0][1].wait()
            self._close()
        return self._seconds

    def _close(self) -> None:
        began, ended = self._open.popleft()
        self._seconds += ended.seconds_since(began)


def _marks_of(device: torch.device) -> Callable[[], Mark]:
    """Return a function that marks the end of everything asked of a device by then."""
    return (lambda: _CudaMark(device)) if device.type == "cuda" else _HostMark


class _HostMark:
    """A mark on a CPU, where all is done when a call returns."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def has_come(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, before: "_HostMark") -> float:
        return self._at - before._at


class _CudaMark:
    """A mark on a GPU: an event on the present stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def has_come(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, before: "_CudaMark") -> float:
        return before._event.elapsed_time(self._event) / 1e3
