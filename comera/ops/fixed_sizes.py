"""Whether operations must take the same course whatever the numbers are, as in a CUDA graph.

A graph is recorded once and replayed: what it does may depend on shapes, not on values, and
nothing may be read back to the host. Some operations here have another, faster way where that is
allowed; inside of :func:`fixed_sizes` they do without, on every device.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_depth = 0  # one for all threads: in another one it only costs time


@contextlib.contextmanager
def fixed_sizes() -> Iterator[None]:
    """Inside, forward and backward passes are such as a CUDA graph can hold."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def sizes_are_fixed(like: Tensor) -> bool:
    """Inside of :func:`fixed_sizes`, and while anybody captures a graph on the tensor's device."""
    return _depth > 0 or (like.is_cuda and torch.cuda.is_current_stream_capturing())


def is_free_on_cpu(tensor: Tensor) -> bool:
    """Whether what only a CPU does well may be done: loops over pieces, looks at numbers."""
    return tensor.device.type == "cpu" and _depth == 0
