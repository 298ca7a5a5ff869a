"""Pack positions and codes into bytes of which an entropy coder makes few.

Passes over long vectors: numpy's on the CPU, where they are several times faster than
torch's, and torch's on other devices.

What a checkpoint leaves out: small changes of weights, and small moments with them.

ExCP, arXiv 2406.11257, section 3.3; the bound of 2.5 medians is the authors' code's.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


_AT_A_TIME = 1 << 16
"""Values that stay in the cache of a core from pass to pass."""


def ascending(values_n: Tensor) -> Tensor:
    """Sort the values."""
    if values_n.is_cpu:
        return torch.from_numpy(np.sort(values_n.numpy()))
    return values_n.sort().values


def sample(values_n: Tensor, step: int) -> Tensor:
    """Take one of every ``step`` values, and the least and the largest of all.

    Which one is drawn by chance, always the same: every ``step``-th may lie in the same few columns
    of a matrix, and say nothing of the others.
    """
    if step == 1:
        return values_n
    starts = torch.arange(0, len(values_n) - step + 1, step)
    drawn = starts + torch.randint(step, starts.shape, generator=torch.Generator().manual_seed(0))
    return torch.cat(
        (values_n[drawn.to(values_n.device)], *map(torch.atleast_1d, values_n.aminmax()))
    )


def norm(values: Tensor) -> float:
    """Return the root of the sum of squares of any tensor; not finite if a value is not."""
    found = float(torch.linalg.vector_norm(values)) if values.dtype == torch.float32 else 0.0
    if 1e-15 < found < 1e15:  # no square left the range of float32 that counts
        return found
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def median(values_n: Tensor) -> Tensor:
    """Return the lower of the two in the middle, of one value or more."""
    middle = (len(values_n) - 1) // 2
    if values_n.is_cpu:
        return torch.from_numpy(np.partition(values_n.numpy(), middle))[middle]
    return values_n.kthvalue(middle + 1).values


def positions(mask_n: Tensor) -> Tensor:
    """Return where it is true, ascending, int64."""
    if mask_n.is_cpu:
        return torch.from_numpy(np.flatnonzero(mask_n.numpy()))
    return mask_n.nonzero().squeeze(1)


def above(values_n: Tensor, walls_k: Tensor) -> Tensor:
    """Count, uint8, how many of at most 255 ascending ``walls_k`` each value lies above."""
    if not values_n.is_cpu or len(walls_k) > 32:
        return torch.bucketize(values_n, walls_k).to(torch.uint8)
    values, walls = values_n.numpy(), walls_k.numpy()
    count = np.zeros(len(values), np.uint8)
    above = np.empty(_AT_A_TIME, bool)
    for start in range(0, len(values), _AT_A_TIME):
        some, counted = (x[start : start + _AT_A_TIME] for x in (values, count))
        for wall in walls:  # a pass of comparisons is faster than a search a value
            counted += np.greater(some, wall, out=above[: len(some)]).view(np.uint8)
    return torch.from_numpy(count)


MOST_MEDIANS = 2.5
"""No change of a weight larger than so many medians is left out."""


def changed_weights(change_n: Tensor, second: Tensor | None, alpha: float) -> Tensor:
    """Mark the weights that have changed enough to be kept.

    Those with ``|change| > median|change| * min(2.5, alpha / sqrt(mean(second)))``: where
    gradients are large, smaller changes are kept too.

    Args:
        change_n: Change of the weights since the last checkpoint, float32 (n,).
        second: The second moments, of any shape; None if the optimizer keeps none.
        alpha: 0 or more, and 0 keeps every change there is; the paper's is 5e-5.

    Returns:
        bool (n,).
    """
    size = change_n.abs()
    root = 0.0 if second is None else float(second.mean(dtype=torch.float64)) ** 0.5
    medians = min(MOST_MEDIANS, alpha / root if root else MOST_MEDIANS) if alpha else 0.0
    return size > median(size) * medians


def large_moments(first_n: Tensor, mean: float, beta: float) -> Tensor:
    """Mark the moments that are kept: those with ``|first| > beta * mean``.

    Args:
        first_n: First moments that may be kept, float32 (n,).
        mean: Mean magnitude of all first moments of the parameter.
        beta: 0 or more; the paper's is 2.

    Returns:
        bool (n,). First and second moments are left out together: a first moment over a second
        of zero would be an update without bound.
    """
    return first_n.abs() > beta * mean
