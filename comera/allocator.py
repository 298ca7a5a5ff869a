"""Control the C library's cache of freed memory. Imports no torch."""

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

_chosen = False  # whether reuse_freed_memory was called
_enabled = False


def reuse_freed_memory(reuse: bool = True) -> bool:
    """Enable the C library's cache of large freed buffers, for this whole process.

    By default glibc returns every buffer above 32 MiB to the system; on a CPU the page faults of
    new ones can take longer than all products of a tensor-train layer. :class:`~comera.TrainStep`
    on a CPU, ``learn_ranks_`` of transformers' trainers and the command line enable the cache; call
    this in a training loop of your own. The process keeps up to 2 GiB of freed memory. Works on
    Linux with glibc, for CPU memory only.

    Args:
        reuse: False disables the cache. If called before the first ``TrainStep``, the cache stays
            disabled, as with ``COMERA_REUSE_MEMORY=0`` in the environment.

    Returns:
        Whether freed memory is reused from now on.
    """
    global _chosen, _enabled
    _chosen = True
    library = _c_library()
    if library is None:
        return False
    if reuse and not _enabled:
        _enabled = library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) == 1
        _enabled = _enabled and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_MOST) == 1
    elif _enabled and not reuse:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BY_DEFAULT)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_BY_DEFAULT)
        return_freed_memory()
        _enabled = False
    return _enabled


def reuse_by_default(silent: bool = False) -> None:
    """Enable the cache, and log that, unless a call or the environment has decided already."""
    environ = os.environ
    own = "MALLOC_MMAP_THRESHOLD_" in environ or "MALLOC_TRIM_THRESHOLD_" in environ
    own = own or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    if _chosen or own or environ.get("COMERA_REUSE_MEMORY", "1") == "0":
        return
    if reuse_freed_memory() and not silent:
        log.info(
            "up to 2 GiB of freed memory stay with this process for the next tensors, which saves "
            "page faults; comera.reuse_freed_memory(False) or COMERA_REUSE_MEMORY=0 undoes that"
        )


def return_freed_memory() -> None:
    """Return free memory to the system, such as that of the dense weights of a converted model.

    ``TrainStep`` calls it once, before the first step. Does nothing without glibc.
    """
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
