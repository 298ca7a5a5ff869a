"""The kernels that multiply a batch by low-rank factors: one launch forward, two backward.

Several pairs of factors that share their batch are multiplied together. Nothing is added up in an
order that may change: results are the same each time. ``kernels/low_rank_linear.cu`` says how it
works.

Shape suffixes: M = rows of the batch, I = input width, R = bond between the factors, O = output
width.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.kernels.choose import DTYPES, LOW_RANK, NO_RANK
from comera.ops.kernels.launch import launch

# As in low_rank_linear.cu.
_MOST_PAIRS, _MOST_PANELS = 4, 8
_WARPS, _THREADS, _TILE = 8, 256, 32
_PART_ROW, _THIN_PAD = 36, 8

_MOST_RANK = 128
"""Beyond it the products do enough with what they read for cuBLAS to be the better way."""

_BLOCKS = 512
"""So many sum the gradients of factors: a few for each multiprocessor of a large card. A number of
its own for each card would give each card sums in another order."""

_FEWEST_ROWS = 256
"""Of the batch that a block sums, for which it starts: a step of 32 for each of its warps."""


class _Pair(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "left", "right", "t", "u", "y", "left_grad", "right_grad")),
        *((name, ctypes.c_int) for name in (
            "rank", "out", "left_row", "right_row", "t_row", "u_row", "y_row")),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("pairs", "panels", "rows", "in_", "x_row", "ones")),
        ("x", ctypes.c_void_p), ("x_grad", ctypes.c_void_p),
        ("pair_of", ctypes.c_int * _MOST_PANELS), ("column_of", ctypes.c_int * _MOST_PANELS),
        ("panel_of", ctypes.c_int * _MOST_PAIRS),
        ("pair", _Pair * _MOST_PAIRS),
    )  # fmt: skip


def unfit(x_MI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> str | None:
    """Say why kernels do not multiply by these factors on any card, or None."""
    if any(t.dtype != x_MI.dtype or t.device != x_MI.device for t in (*lefts, *rights)):
        return "the batch and the factors are of several dtypes or devices"
    ranks = [left.shape[1] for left in lefts]
    if max(ranks) > _MOST_RANK:
        return f"a bond of {max(ranks)} is above {_MOST_RANK}, where cuBLAS is the better way"
    if len(ranks) > _MOST_PAIRS or sum(map(_panels, ranks)) > _MOST_PANELS:
        return f"bonds of {', '.join(map(str, ranks))} do not go together in one launch"
    return None if all(ranks) else NO_RANK  # torch's products take what has vanished


def multiply(
    x_MI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], ts: Sequence[Tensor],
    bias: bool,
) -> list[Tensor]:  # fmt: skip
    """Compute ``x @ left @ right`` for each pair of factors.

    Args:
        x_MI: The batch.
        lefts: ``(I, R)`` each.
        rights: ``(R, O)`` each; there may be fewer.
        ts: ``(M, R)`` each, where ``x @ left`` is written to.
        bias: Whether the last column of ``x @ left`` is one instead.

    Returns:
        ``(M, O)`` for each of ``rights``.
    """
    x_MI, lefts, rights = _rows(x_MI), _all_rows(lefts), _all_rows(rights)
    ys = [x_MI.new_empty(x_MI.shape[0], right.shape[1]) for right in rights]
    layer = _layer(x_MI, lefts, rights, ys)
    layer.ones = bias
    for pair, t in zip(layer.pair, ts, strict=False):
        pair.t, pair.t_row = t.data_ptr(), t.stride(0)
    launch(
        LOW_RANK, f"low_rank_forward_{_math(x_MI)}", x_MI.device, -(-x_MI.shape[0] // _TILE),
        _THREADS, _shared(layer, x_MI), layer,
    )  # fmt: skip
    return ys


def multiply_backward(
    grads: Sequence[Tensor],
    x_MI: Tensor,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    ts: Sequence[Tensor],
    with_x: bool,
    with_factors: bool,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Return gradients of x, left and right factors; None and empty lists where not wanted.

    Args:
        grads: ``(M, O)`` for each pair, of its result; for pairs that have no right factor
            ``(M, R)``, of ``x @ left``.
        x_MI: The batch.
        lefts: ``(I, R)`` each.
        rights: ``(R, O)`` each; there may be fewer.
        ts: What :func:`multiply` wrote, of the pairs that have a right factor.
        with_x: Whether the gradient of x is wanted.
        with_factors: Whether those of the factors are.
    """
    x_MI, lefts, rights = _rows(x_MI), _all_rows(lefts), _all_rows(rights)
    grads = _all_rows([grad.to(x_MI.dtype) for grad in grads])
    grad_x = torch.empty_like(x_MI, memory_format=torch.contiguous_format) if with_x else None
    us = [x_MI.new_empty(x_MI.shape[0], right.shape[0]) for right in rights]
    us += grads[len(rights) :]
    layer = _layer(x_MI, lefts, rights, grads)
    layer.x_grad = None if grad_x is None else grad_x.data_ptr()
    for pair, t in zip(layer.pair, ts, strict=False):
        pair.t, pair.t_row = t.data_ptr(), t.stride(0)
    for pair, u in zip(layer.pair, us, strict=False):
        pair.u, pair.u_row = u.data_ptr(), u.stride(0)
    shared, math, rows = _shared(layer, x_MI), _math(x_MI), x_MI.shape[0]
    widths = [x_MI.shape[1], *(right.shape[1] for right in rights)]
    jobs = sum(-(-width // _TILE) for width in widths) if with_factors else 0
    splits, rows_each = _splits(rows, jobs)
    counters = x_MI.new_empty(jobs if splits > 1 else 0, dtype=torch.int32)
    launch(
        LOW_RANK, f"low_rank_back_rows_{math}", x_MI.device, -(-rows // _TILE), _THREADS, shared,
        layer, counters, counters.shape[0],
    )  # fmt: skip
    if not with_factors:
        return grad_x, [], []
    make = torch.empty_like if rows else torch.zeros_like
    factors = [make(factor, memory_format=torch.contiguous_format) for factor in (*lefts, *rights)]
    grad_lefts, grad_rights = factors[: len(lefts)], factors[len(lefts) :]
    for pair, grad in zip(layer.pair, grad_lefts, strict=False):
        pair.left_grad = grad.data_ptr()
    for pair, grad in zip(layer.pair, grad_rights, strict=False):
        pair.right_grad = grad.data_ptr()
    numbers = jobs * splits * layer.panels * _TILE**2 if splits > 1 else 0
    partial = x_MI.new_empty(numbers, dtype=torch.float32)
    launch(
        LOW_RANK, f"low_rank_back_columns_{math}", x_MI.device, (jobs, splits) if rows else 0,
        _THREADS, shared, layer, rows_each, partial, counters,
    )  # fmt: skip
    return grad_x, grad_lefts, grad_rights


def _layer(
    x_MI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], ys: Sequence[Tensor]
) -> _Layer:
    ranks = [left.shape[1] for left in lefts]
    layer = _Layer(pairs=len(lefts), panels=sum(map(_panels, ranks)), rows=x_MI.shape[0])
    layer.in_, layer.x_row, layer.x = x_MI.shape[1], x_MI.stride(0), x_MI.data_ptr()
    panel = 0
    for number, (pair, left) in enumerate(zip(layer.pair, lefts, strict=False)):
        pair.rank, pair.left, pair.left_row = left.shape[1], left.data_ptr(), left.stride(0)
        layer.panel_of[number] = panel
        for column in range(0, left.shape[1], _TILE):
            layer.pair_of[panel], layer.column_of[panel] = number, column
            panel += 1
    for pair, right, y in zip(layer.pair, rights, ys, strict=False):
        pair.out, pair.right, pair.right_row = right.shape[1], right.data_ptr(), right.stride(0)
        pair.y, pair.y_row = y.data_ptr(), y.stride(0)
    return layer


def _panels(rank: int) -> int:
    return -(-rank // _TILE)


def _splits(rows: int, jobs: int) -> tuple[int, int]:
    """Return into how many parts the batch is split to be summed, and the rows of each."""
    most = max(1, -(-rows // _FEWEST_ROWS))
    wanted = min(most, max(1, -(-_BLOCKS // max(1, jobs))))
    rows_each = max(1, -(-rows // (wanted * _TILE))) * _TILE
    return max(1, -(-rows // rows_each)), rows_each


def _shared(layer: _Layer, x_MI: Tensor) -> int:
    thin = _TILE * (layer.panels * _TILE + _THIN_PAD)
    return 4 * _WARPS * _TILE * _PART_ROW + x_MI.element_size() * thin


def _math(x_MI: Tensor) -> str:
    tf32 = x_MI.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else DTYPES[x_MI.dtype]


def _rows(tensor: Tensor) -> Tensor:
    """Return a matrix with the numbers of each row side by side, copied only if they are not."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _all_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_rows(tensor) for tensor in tensors]
