"""Pack positions and codes into bytes of which an entropy coder makes few."""

import math

import numpy as np
from numpy.typing import NDArray

from comera.checkpoint.streams import Bytes, DamagedError


def to_gaps(positions_k: NDArray[np.int64]) -> Bytes:
    """Turn ascending positions into distances, a byte each; 255 says that more follow."""
    gaps = np.diff(positions_k, prepend=-1) - 1
    if not len(gaps) or gaps.max() < 255:
        return gaps.astype(np.uint8)
    more, last = np.divmod(gaps, 255)
    ends = np.cumsum(more + 1) - 1
    out = np.full(ends[-1] + 1, 255, np.uint8)
    out[ends] = last
    return out


def from_gaps(gaps: Bytes, count: int, below: int) -> NDArray[np.int64]:
    """Return ``count`` positions, all under ``below``, of which :func:`to_gaps` made ``gaps``.

    Raises:
        DamagedError: If they are more or fewer, or lie beyond.
    """
    ends = np.flatnonzero(gaps != 255)
    if len(ends) != count:
        raise DamagedError(f"there are {len(ends)} kept entries where {count} are stated")
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
    if count and (ends[-1] != len(gaps) - 1 or positions[-1] >= below):
        raise DamagedError(f"a kept entry lies beyond the {below} of its tensor")
    return positions


def codes_to_a_byte(size: int) -> int:
    """Return how many codes under ``size`` fit into a byte."""
    return max(1, int(math.log(256) / math.log(max(2, size)) + 1e-9))


def pack(codes_n: Bytes, size: int) -> Bytes:
    """Put as many codes, all under ``size``, as fit into a byte, as the digits of its value.

    zstd spends no less than a bit on a byte: few codes are better taken together.
    """
    each = codes_to_a_byte(size)
    digits = np.zeros((-(-len(codes_n) // each), each), np.uint8)
    digits.reshape(-1)[: len(codes_n)] = codes_n
    packed = digits[:, 0].copy()
    for k in range(1, each):
        packed *= max(2, size)
        packed += digits[:, k]
    return packed


def unpack(packed: Bytes, size: int, count: int) -> Bytes:
    """Return the ``count`` codes that :func:`pack` put into bytes."""
    each = codes_to_a_byte(size)
    digits = np.empty((len(packed), each), np.uint8)
    rest = packed
    for k in range(each - 1, -1, -1):
        rest, digits[:, k] = np.divmod(rest, np.uint8(max(2, size))) if k else (rest, rest)
    return digits.reshape(-1)[:count]
