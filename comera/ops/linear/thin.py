"""The thin products of a batch with the left factors of several layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.factors import last_of_each
from comera.ops.product import affine


def times_left(x: Tensor, lefts: Sequence[Tensor], bias: bool) -> Tensor:
    """Return all ``x @ left`` side by side, ones in the last column of each if there is a bias."""
    left = lefts[0] if len(lefts) == 1 else torch.cat(list(lefts), 1)
    if not bias:
        return affine(x, left)
    return affine(x, left, last_of_each([each.shape[1] for each in lefts], x))
