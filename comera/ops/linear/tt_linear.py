"""Multiply by matrices stored as tensor trains, without ever forming them.

The input cores contract to a narrow ``(I, R)`` matrix and the output cores to ``(R, O)``; the batch
is multiplied by these two only. That costs ``B * R * (I + O)`` instead of ``B * I * O``; autograd
saves only x, the narrow ``x @ left`` and the factors (CoMERA, arXiv 2405.14377, section 4).
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.ops.context import autocast_together, products_are_fp8
from comera.ops.cores import contract_chain
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_concrete, is_recorded
from comera.ops.product import NODE_FROM, affine


class Factors(NamedTuple):
    """The factors ``(I, R)`` and ``(R, O)`` of a layer's weight, ``x @ left @ right``.

    ``has_bias``: whether the last row of ``right`` is the bias; ``x @ left`` then ends with a one.
    """

    left: Tensor
    right: Tensor
    has_bias: bool


def factorized_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Compute ``x @ left @ right`` for each pair of factors, all in one pass over x.

    x is ``(*, I)``, the factors are ``(I, R)`` and ``(R, O)``, as ``contract_groups`` makes them; O
    may differ, and with ``bias`` the last row of each right factor is a bias. Returns ``(*, O)``
    for each pair. The dtype is autocast's where autocast is on, unless the factors are float64.
    Raises ``RuntimeError`` if x has another width than the layer.
    """
    check_width(x_BI, lefts[0].shape[0])
    x_BI, *factors = autocast_together(x_BI, *lefts, *rights)
    lefts, rights = factors[: len(lefts)], factors[len(lefts) :]
    is_fp8 = products_are_fp8() and x_BI.dtype == torch.bfloat16 and not is_recorded()
    if is_fp8 and all(each.numel() for each in (x_BI, *factors)):  # a layer may have no rank left
        from comera.ops.linear.fp8 import fp8_linears  # few cards ever multiply so

        return fp8_linears(x_BI, lefts, rights, bias)
    x = x_BI if x_BI.dim() == 2 else x_BI.reshape(-1, x_BI.shape[-1])
    t, widths = times_left(x, lefts, bias), [left.shape[1] for left in lefts]
    ts = [t] if len(lefts) == 1 else t.split(widths, 1)
    ys = [affine(each, right) for each, right in zip(ts, rights, strict=True)]
    return ys if x_BI.dim() == 2 else [y.view(*x_BI.shape[:-1], y.shape[1]) for y in ys]


def times_left(x: Tensor, lefts: Sequence[Tensor], bias: bool) -> Tensor:
    """Return all ``x @ left`` side by side; if ``bias``, the last column of each is ones."""
    left = lefts[0] if len(lefts) == 1 else torch.cat(list(lefts), 1)
    if not bias:
        return affine(x, left)
    return affine(x, left, last_of_each([each.shape[1] for each in lefts], x))


def low_rank_linear(
    x_BI: Tensor, left_IR: Tensor, right_RO: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return ``x @ left @ right + bias``, ``(*, O)``, in eager mode; x is ``(*, I)``.

    The factors are those of :func:`~comera.ops.contract_cores.contract_layer`. Dtypes and errors
    are those of :func:`factorized_linears`.
    """
    check_width(x_BI, left_IR.shape[0])
    x_BI, left_IR, right_RO, bias_O = autocast_together(x_BI, left_IR, right_RO, bias_O)
    x = x_BI if x_BI.dim() == 2 else x_BI.reshape(-1, x_BI.shape[-1])
    if x.shape[0] * max(left_IR.numel(), right_RO.numel()) < NODE_FROM:
        t = torch.mm(x, left_IR)  # as affine() computes it, with fewer calls
        y = torch.mm(t, right_RO) if bias_O is None else torch.addmm(bias_O, t, right_RO)
    else:
        y = affine(affine(x, left_IR), right_RO, bias_O)
    return y if x_BI.dim() == 2 else y.view(*x_BI.shape[:-1], y.shape[1])


def check_width(x_BI: Tensor, width: int) -> None:
    """Raise ``RuntimeError`` as nn.Linear does if x has another width than the layer."""
    if x_BI.dim() == 0:
        raise RuntimeError(f"the input is one number, but this layer takes a width of {width}")
    if x_BI.shape[-1] != width:
        raise RuntimeError(
            f"the input has width {x_BI.shape[-1]} (shape {tuple(x_BI.shape)}), "
            f"but this layer takes {width}"
        )


def reconstructed_linear(x_BI: Tensor, factors: Factors) -> Tensor:
    """Multiply by the dense matrix: faster for large batches if ``R * (I + O) > I * O``."""
    left_IR, right_RO, has_bias = factors
    check_width(x_BI, left_IR.shape[0])
    weight_IO = affine(left_IR, right_RO)  # a bias' row of right meets a column of zeros in left
    y = affine(x_BI.reshape(-1, x_BI.shape[-1]), weight_IO, right_RO[-1] if has_bias else None)
    return y.view(*x_BI.shape[:-1], y.shape[-1])


def tt_to_dense(cores: Sequence[Tensor], split: int) -> Tensor:
    """Contract all cores of a tensor train to its ``(out, in)`` matrix; differentiable."""
    left = contract_chain(cores[:split])
    right = contract_chain(cores[split:])
    return (left[0] @ right[..., 0]).T


def set_ones_(t: Tensor, has_bias: bool) -> None:
    """Set the last column of ``x @ left`` to one, for the bias in the last row of ``right``."""
    if has_bias:
        t.select(-1, -1).fill_(1)


_rows: dict[tuple[Any, ...], Tensor] = {}


def last_of_each(widths: Sequence[int], like: Tensor) -> Tensor:
    """Return one row with a block for each width: zeros, then a one. Cached: do not write to it."""
    is_cached = is_eager() and is_concrete(like) and not torch._C._are_functorch_transforms_active()
    key = *widths, like.dtype, like.device
    row = _rows.get(key) if is_cached else None  # a captured graph may read an older one
    if row is not None:
        return row
    with torch.inference_mode(False) if is_cached else contextlib.nullcontext():
        row = torch.zeros(sum(widths), dtype=like.dtype, device=like.device)
        # All at once where that is possible: on a card each is a launch.
        one_width = len(set(widths)) == 1
        for part in [row.view(len(widths), -1)] if one_width else row.split(list(widths)):
            set_ones_(part, True)
    if is_cached and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        _rows[key] = row
    return row
