"""Passes over long vectors: numpy's on the CPU, where they are several times faster than
torch's, and torch's on other devices."""

import numpy as np
import torch
from torch import Tensor

_AT_A_TIME = 1 << 16
"""Values that stay in the cache of a core from pass to pass."""


def ascending(values_n: Tensor) -> Tensor:
    """Sorted."""
    if values_n.is_cpu:
        return torch.from_numpy(np.sort(values_n.numpy()))
    return values_n.sort().values


def median(values_n: Tensor) -> Tensor:
    """The lower of the two in the middle, of one value or more."""
    middle = (len(values_n) - 1) // 2
    if values_n.is_cpu:
        return torch.from_numpy(np.partition(values_n.numpy(), middle))[middle]
    return values_n.kthvalue(middle + 1).values


def positions(mask_n: Tensor) -> Tensor:
    """Where it is true, ascending, int64."""
    if mask_n.is_cpu:
        return torch.from_numpy(np.flatnonzero(mask_n.numpy()))
    return mask_n.nonzero().squeeze(1)


def above(values_n: Tensor, walls_k: Tensor) -> Tensor:
    """How many of at most 255 ascending ``walls_k`` each value lies above, uint8."""
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
