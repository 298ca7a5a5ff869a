"""A cache of freed memory in the process. Imports no torch."""

import ctypes
import functools
import logging
import os
import sys

log = logging.getLogger("comera")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_FROM_HEAP = 1 << 30
_KEPT_AT_MOST = (1 << 31) - 1
# Where glibc's own thresholds, which follow the largest freed buffer, come to rest.
_LARGEST_BY_DEFAULT = 32 << 20

_chosen = False  # whether somebody has said what is to happen, or it has been said to them
_made = False


def reuse_freed_memory(reuse: bool = True) -> bool:
    """Enable the C library's cache of large freed buffers, for this whole process.

    By default glibc returns every buffer above 32 MiB to the system and gets a new one for the
    next tensor, and each first write to a page of it is a fault: on a CPU that can take longer
    than all products of a tensor-train layer. :class:`~comera.TrainStep` on a CPU, trainers of
    transformers and the command line do this by themselves, so call it in a loop of your own.
    Up to 2 GiB of freed memory then stay with the process. Without effect on GPU memory, and
    elsewhere than on Linux with glibc.

    Args:
        reuse: False leaves freed memory to glibc, or goes back to that. Said before the first
            ``TrainStep``, it stays so; ``COMERA_REUSE_MEMORY=0`` in the environment says the same.

    Returns:
        Whether freed memory is reused from now on.
    """
    global _chosen, _made
    _chosen = True
    library = _c_library()
    if library is None:
        return False
    if reuse and not _made:
        _made = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) == 1
        _made = _made and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST) == 1
    elif _made and not reuse:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BY_DEFAULT)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_BY_DEFAULT)
        return_freed_memory()
        _made = False
    return _made


def reuse_by_default() -> None:
    """Reuse freed memory unless somebody has said what is to happen, and say so once."""
    if _chosen or _is_told_otherwise():
        return
    if reuse_freed_memory():
        log.info(
            "up to 2 GiB of freed memory stay with this process for the next tensors, which saves "
            "page faults; comera.reuse_freed_memory(False) or COMERA_REUSE_MEMORY=0 undoes that"
        )


def return_freed_memory() -> None:
    """Give what is free now back to the system, such as the dense weights of a converted model.

    ``TrainStep`` does it once, before the first step. Nothing happens elsewhere than with glibc.
    """
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)


def _is_told_otherwise() -> bool:
    """Return whether the environment disables the cache, or sets glibc's malloc itself."""
    if os.environ.get("COMERA_REUSE_MEMORY", "1") == "0":
        return True
    own = "MALLOC_MMAP_THRESHOLD_" in os.environ or "MALLOC_TRIM_THRESHOLD_" in os.environ
    return own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    """Return glibc, or None where the C library is another one."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
