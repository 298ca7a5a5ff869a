"""Calls one after the other, on a GPU as one CUDA graph: the host has no part in their time."""

from collections.abc import Callable, Sequence

import torch

_WARM_UP = 3


def in_turn(runs: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """Return a call that runs all of them."""
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
    return graph.replay
