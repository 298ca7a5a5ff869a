"""Read rows of an embedding table that is held as a tensor-train matrix.

The cores join to two halves; a row is the product of one slice of each. Two redundancies go:
every distinct row is made once however often it is asked for, and the halves are joined once
for all rows (CoMERA, arXiv 2405.14377, section 4.2).

Shape suffixes: V = left and W = right part of a row's number, P and Q = left and right part of
the width, R = the bond between the halves, D = width, H = hot rows, K = their coordinates: D where
they are dense, fewer where they are coordinates in a basis.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.autocast import without_autocast
from comera.ops.chain import merge_chain
from comera.ops.operator import operator


def tt_embedding_reference(
    indices: Tensor,
    cores: Sequence[Tensor],
    embedding_dim: int,
    hot_HK: Tensor | None = None,
    basis_KD: Tensor | None = None,
) -> Tensor:
    """The same as :func:`tt_embedding` through the dense table, for autograd to differentiate."""
    table = ttm_to_dense(cores)[:, :embedding_dim]
    if hot_HK is not None:
        table = torch.cat([hot_HK if basis_KD is None else hot_HK @ basis_KD, table])
    return torch.nn.functional.embedding(indices, table)


def tt_embedding(
    indices: Tensor,
    cores: Sequence[Tensor],
    num_embeddings: int,
    embedding_dim: int,
    *,
    gates: Sequence[Tensor] = (),
    threshold: float = 0.0,
    hot_HK: Tensor | None = None,
    basis_KD: Tensor | None = None,
) -> Tensor:
    """Gather rows of a table held as a tensor-train matrix.

    Args:
        indices: Integers of any shape, ``0 <= index < num_embeddings``.
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        num_embeddings: True number of rows; the row modes may multiply to more.
        embedding_dim: True width; the column modes may multiply to more.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        hot_HK: Rows that stand before the tensor train: row ``i < H`` is ``hot_HK[i]``, row
            ``i >= H`` is row ``i - H`` of the train.
        basis_KD: Basis of the hot rows, where row ``i < H`` is ``hot_HK[i] @ basis_KD``.

    Returns:
        ``(*indices.shape, embedding_dim)`` in the dtype of the cores.

    Raises:
        IndexError: If an index is out of range (checked on the CPU).
    """
    left_VPR, right_WRQ = merge_table_halves(cores, gates, threshold)
    flat = indices.reshape(-1)
    rows = _ttm_lookup(flat, left_VPR, right_WRQ, hot_HK, basis_KD, num_embeddings, embedding_dim)
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
    hot_HK: Tensor | None,
    basis_KD: Tensor | None,
    num_embeddings: int,
    embedding_dim: int,
) -> Tensor:
    _check_range(indices, num_embeddings)
    rows, inverse = torch.unique(indices, return_inverse=True)
    num_hot, left, right = _pairs(rows, right_WRQ, hot_HK)
    with without_autocast(left_VPR):
        made = torch.bmm(left_VPR[left], right_WRQ[right]).flatten(1)[:, :embedding_dim]
        if hot_HK is not None:
            hot = hot_HK[rows[:num_hot]]
            made = torch.cat([hot if basis_KD is None else hot @ basis_KD, made])
    return made[inverse]


@_ttm_lookup.register_fake
def _(indices, left_VPR, right_WRQ, hot_HK, basis_KD, num_embeddings, embedding_dim):
    return left_VPR.new_empty(indices.shape[0], embedding_dim)


@torch.library.custom_op("comera::ttm_lookup_backward", mutates_args=())
def _ttm_lookup_backward(
    grad_BD: Tensor,
    indices: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HK: Tensor | None,
    basis_KD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, inverse = torch.unique(indices, return_inverse=True)
    num_hot, left, right = _pairs(rows, right_WRQ, hot_HK)
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
    return grad_left, grad_right, *_hot_grads(per_row[:num_hot], rows[:num_hot], hot_HK, basis_KD)


def _hot_grads(
    grad_ND: Tensor, rows: Tensor, hot_HK: Tensor | None, basis_KD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of the hot rows and their basis, from the gradients of distinct rows; empty for None."""
    grad_hot, grad_basis = _empty_like(hot_HK, grad_ND), _empty_like(basis_KD, grad_ND)
    if hot_HK is None:
        return grad_hot, grad_basis
    if basis_KD is not None:
        with without_autocast(grad_ND):
            grad_basis = hot_HK[rows].T @ grad_ND
            grad_ND = grad_ND @ basis_KD.T
    grad_hot.zero_()[rows] = grad_ND
    return grad_hot, grad_basis


def _empty_like(tensor: Tensor | None, of_type: Tensor) -> Tensor:
    return of_type.new_empty(0) if tensor is None else torch.empty_like(tensor)


@_ttm_lookup_backward.register_fake
def _(grad_BD, indices, left_VPR, right_WRQ, hot_HK, basis_KD):
    halves = torch.empty_like(left_VPR), torch.empty_like(right_WRQ)
    return *halves, _empty_like(hot_HK, grad_BD), _empty_like(basis_KD, grad_BD)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, _, _ = inputs
    ctx.given = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _backward(ctx, grad_BD: Tensor):
    saved = iter(ctx.saved_tensors)
    indices, *tensors = (next(saved) if given else None for given in ctx.given)
    grads = _ttm_lookup_backward(grad_BD, indices, *tensors)
    wanted = [grad if given else None for grad, given in zip(grads, ctx.given[1:], strict=True)]
    return None, *wanted, None, None


_ttm_lookup.register_autograd(_backward, setup_context=_setup_context)


def _pairs(rows: Tensor, right_WRQ: Tensor, hot_HK: Tensor | None) -> tuple[int, Tensor, Tensor]:
    """How many of the sorted ``rows`` are hot, and the two half-indices of the others."""
    hot_rows = 0 if hot_HK is None else hot_HK.shape[0]
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
