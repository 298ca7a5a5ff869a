"""Keep freed memory in the process. Nothing here imports torch."""

import ctypes
import functools
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_FROM_HEAP = 1 << 30
_KEPT_AT_MOST = (1 << 31) - 1


@functools.cache
def reuse_freed_memory() -> bool:
    """Let the C library keep large freed buffers for the next ones, for this whole process.

    By default glibc returns every buffer above 32 MiB to the system and gets a new one for the
    next tensor, and each first write to a page of it is a fault: on a CPU that can take longer
    than the thin products of a tensor-train layer. Call this once, before training on a CPU. Up
    to 2 GiB of freed memory then stay with the process. Without effect on GPU memory, and
    elsewhere than on Linux with glibc.

    Returns:
        Whether the setting was made.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) == 1
    return done and mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST) == 1
