"""Read rows of an embedding table that is held as a tensor-train matrix.

The cores join to two halves; a row is the product of one slice of each. Two redundancies go:
every distinct row is made once however often it is asked for, and the halves are joined once
for all rows (CoMERA, arXiv 2405.14377, section 4.2).

Shape suffixes: V = left and W = right part of a row's number, P and Q = left and right part of
the width, R = the bond between the halves, D = width, H = dense rows.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.autocast import without_autocast
from comera.ops.chain import merge_chain
from comera.ops.operator import operator


def tt_embedding_reference(
    indices: Tensor, cores: Sequence[Tensor], embedding_dim: int, hot_HD: Tensor | None = None
) -> Tensor:
    """The same as :func:`tt_embedding` through the dense table, for autograd to differentiate."""
    table = ttm_to_dense(cores)[:, :embedding_dim]
    if hot_HD is not None:
        table = torch.cat([hot_HD, table])
    return torch.nn.functional.embedding(indices, table)


def tt_embedding(
    indices: Tensor,
    cores: Sequence[Tensor],
    num_embeddings: int,
    embedding_dim: int,
    *,
    gates: Sequence[Tensor] = (),
    threshold: float = 0.0,
    hot_HD: Tensor | None = None,
) -> Tensor:
    """Gather rows of a table held as a tensor-train matrix.

    Args:
        indices: Integers of any shape, ``0 <= index < num_embeddings``.
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        num_embeddings: True number of rows; the row modes may multiply to more.
        embedding_dim: True width; the column modes may multiply to more.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        hot_HD: Dense rows that stand before the tensor train: row ``i < H`` is ``hot_HD[i]``,
            row ``i >= H`` is row ``i - H`` of the train.

    Returns:
        ``(*indices.shape, embedding_dim)`` in the dtype of the cores.

    Raises:
        IndexError: If an index is out of range (checked on the CPU).
    """
    left_VPR, right_WRQ = merge_table_halves(cores, gates, threshold)
    flat = indices.reshape(-1)
    rows = _ttm_lookup(flat, left_VPR, right_WRQ, hot_HD, num_embeddings, embedding_dim)
    return rows.reshape(*indices.shape, embedding_dim)


def merge_table_halves(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``left (V, P, R)`` and ``right (W, R, Q)``: row ``v * W + w`` is ``left[v] @ right[w]``."""
    split = len(cores) // 2
    left = merge_chain(cores[:split], gates[:split], threshold)
    right = merge_chain(cores[split:], gates[split:], threshold)
    left_VPR = _rows_before_columns(left, cores[:split])[0]
    right_WRQ = _rows_before_columns(right, cores[split:])[..., 0].transpose(0, 1)
    return left_VPR.contiguous(), right_WRQ.contiguous()


def ttm_to_dense(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> Tensor:
    """The whole ``(rows, columns)`` table, padding included; differentiable."""
    left_VPR, right_WRQ = merge_table_halves(cores, gates, threshold)
    table_VWPQ = torch.einsum("vpr,wrq->vwpq", left_VPR, right_WRQ)
    return table_VWPQ.flatten(0, 1).flatten(1)


def _rows_before_columns(merged: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Undo the interleaving of modes: ``(L, p1 q1 p2 q2, R)`` to ``(L, rows, columns, R)``."""
    modes = [n for core in cores for n in core.shape[1:3]]
    count = len(modes)
    apart = merged.reshape(merged.shape[0], *modes, merged.shape[-1])
    order = [0, *range(1, count, 2), *range(2, count + 1, 2), count + 1]
    rows, cols = math.prod(modes[0::2]), math.prod(modes[1::2])
    return apart.permute(order).reshape(merged.shape[0], rows, cols, merged.shape[-1])


@operator("comera::ttm_lookup")
def _ttm_lookup(
    indices: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HD: Tensor | None,
    num_embeddings: int,
    embedding_dim: int,
) -> Tensor:
    _check_range(indices, num_embeddings)
    rows, inverse = torch.unique(indices, return_inverse=True)
    num_hot, left, right = _pairs(rows, right_WRQ, hot_HD)
    with without_autocast(left_VPR):
        cold = torch.bmm(left_VPR[left], right_WRQ[right]).flatten(1)[:, :embedding_dim]
    if hot_HD is not None:
        cold = torch.cat([hot_HD[rows[:num_hot]], cold])
    return cold[inverse]


@_ttm_lookup.register_fake
def _(indices, left_VPR, right_WRQ, hot_HD, num_embeddings, embedding_dim):
    return left_VPR.new_empty(indices.shape[0], embedding_dim)


@torch.library.custom_op("comera::ttm_lookup_backward", mutates_args=())
def _ttm_lookup_backward(
    grad_BD: Tensor,
    indices: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, inverse = torch.unique(indices, return_inverse=True)
    num_hot, left, right = _pairs(rows, right_WRQ, hot_HD)
    per_row = grad_BD.new_zeros(rows.shape[0], grad_BD.shape[1]).index_add_(0, inverse, grad_BD)
    cold = per_row[num_hot:]
    width = left_VPR.shape[1] * right_WRQ.shape[2]
    cold = torch.nn.functional.pad(cold, (0, width - cold.shape[1]))
    cold = cold.reshape(-1, left_VPR.shape[1], right_WRQ.shape[2])
    with without_autocast(left_VPR):
        to_left = torch.bmm(cold, right_WRQ[right].transpose(1, 2))
        to_right = torch.bmm(left_VPR[left].transpose(1, 2), cold)
    grad_left = torch.zeros_like(left_VPR).index_add_(0, left, to_left)
    grad_right = torch.zeros_like(right_WRQ).index_add_(0, right, to_right)
    grad_hot = grad_BD.new_zeros(0) if hot_HD is None else torch.zeros_like(hot_HD)
    if hot_HD is not None:
        grad_hot[rows[:num_hot]] = per_row[:num_hot]
    return grad_left, grad_right, grad_hot


@_ttm_lookup_backward.register_fake
def _(grad_BD, indices, left_VPR, right_WRQ, hot_HD):
    grad_hot = grad_BD.new_empty(0) if hot_HD is None else torch.empty_like(hot_HD)
    return torch.empty_like(left_VPR), torch.empty_like(right_WRQ), grad_hot


def _setup_context(ctx, inputs, output) -> None:
    indices, left_VPR, right_WRQ, hot_HD, *_ = inputs
    ctx.has_hot = hot_HD is not None
    ctx.save_for_backward(indices, left_VPR, right_WRQ, *([hot_HD] if ctx.has_hot else []))


def _backward(ctx, grad_BD: Tensor):
    indices, left_VPR, right_WRQ, *hot = ctx.saved_tensors
    grads = _ttm_lookup_backward(grad_BD, indices, left_VPR, right_WRQ, hot[0] if hot else None)
    return None, grads[0], grads[1], grads[2] if ctx.has_hot else None, None, None


_ttm_lookup.register_autograd(_backward, setup_context=_setup_context)


def _pairs(rows: Tensor, right_WRQ: Tensor, hot_HD: Tensor | None) -> tuple[int, Tensor, Tensor]:
    """How many of the sorted ``rows`` are dense, and the two half-indices of the others."""
    hot_rows = 0 if hot_HD is None else hot_HD.shape[0]
    num_hot = int(torch.searchsorted(rows, hot_rows)) if hot_rows else 0
    cold = rows[num_hot:] - hot_rows
    return num_hot, cold // right_WRQ.shape[0], cold % right_WRQ.shape[0]


def _check_range(indices: Tensor, num_embeddings: int) -> None:
    if indices.device.type == "cpu" and indices.numel():
        low, high = (int(bound) for bound in torch.aminmax(indices))
        if low < 0 or high >= num_embeddings:
            wrong = low if low < 0 else high
            raise IndexError(
                f"index {wrong} is out of range for an embedding of {num_embeddings} rows "
                f"(0 to {num_embeddings - 1})"
            )
