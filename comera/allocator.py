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
    than all products of a tensor-train layer. Call this once, before training on a CPU. Up
    to 2 GiB of freed memory then stay with the process. Without effect on GPU memory, and
    elsewhere than on Linux with glibc.

    Returns:
        Whether the setting was made.
    """
    library = _c_library()
    if library is None:
        return False
    done = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) == 1
    return done and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST) == 1


def return_freed_memory() -> None:
    """Give what is free now back to the system, such as the dense weights of a converted model.

    ``TrainStep`` does it once, before the first step. Nothing happens elsewhere than with glibc.
    """
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    """Return glibc, or None where the C library is another one."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
