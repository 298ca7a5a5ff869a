"""Passes over long vectors: numpy's on the CPU, where they are several times faster than
torch's, and torch's on other devices."""

import numpy as np
import torch
from torch import Tensor

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
