"""Runs on several inputs in turn, so that none is found in a cache; on a GPU as one CUDA graph."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

_ROTATED = 128 << 20
"""Bytes of all inputs of an operator on a GPU together: twice the cache of an H200."""

_WARM_UP = 3
_MOST_COPIES = 16


def copies_of(device: torch.device, nbytes: float) -> int:
    """Return how many inputs of so many bytes are worth taking in turn."""
    if device.type != "cuda":
        return 2
    return min(_MOST_COPIES, max(2, math.ceil(_ROTATED / nbytes)))


def in_turn(runs: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """Return a call that runs all of them, on a GPU as one CUDA graph: the host costs no time."""
    if device.type != "cuda":
        return lambda: [run() for run in runs]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            for run in runs:
                run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for run in runs:
            run()
    return _Replayed(graph, runs)


@dataclass(frozen=True)
class _Replayed:
    """A graph, and the runs it captured: the graph alone keeps no tensor that it reads."""

    graph: torch.cuda.CUDAGraph
    runs: Sequence[Callable[[], object]]

    def __call__(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def tf32_products(on: bool) -> Iterator[None]:
    """Enable or disable tf32 for products of float32 on a card."""
    before = torch.backends.cuda.matmul.fp32_precision  # the older name raises after a newer one
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("high" if before == "tf32" else "highest")
        torch.backends.cuda.matmul.fp32_precision = before
