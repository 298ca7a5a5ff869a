"""The two factors of a tensor-train matrix, by which a batch is multiplied."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.ops.dispatch import is_eager, may_keep
from comera.ops.operator import is_concrete


class Factors(NamedTuple):
    """The two factors of a layer's weight, ``x @ left @ right``.

    Attributes:
        left: ``(I, R)``.
        right: ``(R, O)``.
        has_bias: Whether the last row of ``right`` is a bias, for which x has a one.
    """

    left: Tensor
    right: Tensor
    has_bias: bool


def set_ones_(t: Tensor, has_bias: bool) -> None:
    """Set the last column of ``x @ left`` to one, which the last row of ``right`` is added by."""
    if has_bias:
        t.select(-1, -1).fill_(1)


def last_of_each(widths: Sequence[int], like: Tensor) -> Tensor:
    """Return a row of zeros with a one at the end of each stretch, kept from call to call.

    Args:
        widths: Of the stretches.
        like: A tensor of the dtype and device wanted.

    Returns:
        ``(sum of widths,)``, not to be written to: added to factors' products side by side it does
        what :func:`set_ones_` does.
    """
    if not (is_eager() and is_concrete(like)):
        return _last_of_each(widths, like.dtype, like.device)
    key = *widths, like.dtype, like.device
    row = _rows.get(key)  # a graph that is captured may read what was there before it
    if row is None:
        with torch.inference_mode(False):
            row = _last_of_each(widths, like.dtype, like.device)
        if may_keep(like):
            _rows[key] = row
    return row


_rows: dict[tuple[Any, ...], Tensor] = {}


def _last_of_each(widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    row = torch.zeros(sum(widths), dtype=dtype, device=device)
    # All at once where that is possible: on a card each is a launch.
    one_width = len(set(widths)) == 1
    for part in [row.view(len(widths), -1)] if one_width else row.split(list(widths)):
        set_ones_(part, True)
    return row
