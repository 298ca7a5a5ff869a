"""The rows of a table made from its two factors, each distinct one once, and their gradients.

Shape suffixes: N = entries, B = bags, S = slots (distinct rows), T = groups of slots that share a
right slice, V = left and W = right part of a row's number, P and Q = left and right part of the
width, R = the bond between them, D = width, H = hot rows, K = their coordinates: D where they are
dense, fewer where they are coordinates in a basis.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import without_autocast
from comera.ops.dispatch import Ways, on_cpu_alone
from comera.ops.table.indices import Slots, sum_by, sum_by_sorted


class TableFactors(NamedTuple):
    """What the rows of a table are read from.

    Attributes:
        left_VPR: Left factor.
        right_WRQ: Right factor: row ``v * W + w`` of the train is ``left[v] @ right[w]``.
        hot_HK: Rows before those of the train; None for none.
        basis_KD: Basis of the hot rows, where these are coordinates; else None.
    """

    left_VPR: Tensor
    right_WRQ: Tensor
    hot_HK: Tensor | None
    basis_KD: Tensor | None

    @property
    def num_hot(self) -> int:
        return 0 if self.hot_HK is None else self.hot_HK.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hot rows, V and W."""
        return self.num_hot, self.left_VPR.shape[0], self.right_WRQ.shape[0]

    def hot_rows(self, rows_N: Tensor) -> Tensor:
        """Gather hot rows by their numbers, ``(N, D)``."""
        assert self.hot_HK is not None, "the table has hot rows"
        hot = self.hot_HK.index_select(0, rows_N)
        return hot if self.basis_KD is None else hot @ self.basis_KD

    def dense_hot(self) -> Tensor | None:
        """Make all hot rows, ``(H, D)``."""
        if self.hot_HK is None or self.basis_KD is None:
            return None if self.hot_HK is None else self.hot_HK.contiguous()
        with without_autocast(self.hot_HK):
            return self.hot_HK @ self.basis_KD


def every_row(indices_N: Tensor, factors: TableFactors, embedding_dim: int) -> Tensor:
    """Make every entry's row for itself, all sizes fixed by the arguments.

    By operations of torch alone, so it can be differentiated as often as one likes.
    """
    left_VPR, right_WRQ, num_hot = factors.left_VPR, factors.right_WRQ, factors.num_hot
    cold = (indices_N.long() - num_hot).clamp(min=0)
    left = left_VPR.index_select(0, cold // right_WRQ.shape[0])
    turned_WQR, at = right_WRQ.mT, cold % right_WRQ.shape[0]
    if turned_WQR.is_contiguous():  # gathered as it lies: otherwise that takes half as long again
        right = turned_WQR.index_select(0, at).mT
    else:
        right = right_WRQ.index_select(0, at)
    with without_autocast(left_VPR):
        rows = torch.bmm(left, right).flatten(1)[:, :embedding_dim]
        if factors.hot_HK is None:
            return rows
        hot = factors.hot_rows(indices_N.long().clamp(max=num_hot - 1))
    return torch.where((indices_N < num_hot).unsqueeze(1), hot, rows)


_PIECE = 1 << 19
"""Entries of slices that a CPU gathers at once: they are still in its cache when they are used."""


def _pieces(slots: Slots, factors: TableFactors) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield groups piece by piece, and their slices ``(T, group * P, R)`` and ``(T, Q, R)``.

    Those of the right factor lie turned, as
    :func:`~comera.ops.table.table_factors.contract_table` makes them: products of many
    small matrices take up to four times as long where the rows of what they make are as short as Q.
    """
    left_VPR, turned_WQR = factors.left_VPR, factors.right_WRQ.mT.contiguous()
    _, P, R = left_VPR.shape
    count, tall = slots.right_T.shape[0], slots.group * P
    at_once = _groups_at_a_time(left_VPR, count, (tall + turned_WQR.shape[1]) * R)
    for start in range(0, count, at_once):
        piece = slice(start, min(start + at_once, count))
        left_S = slots.left_S[piece.start * slots.group : piece.stop * slots.group]
        left = left_VPR.index_select(0, left_S).view(piece.stop - piece.start, tall, R)
        yield piece, left, turned_WQR.index_select(0, slots.right_T[piece])


_groups_at_a_time = Ways("groups_at_a_time", lambda new: (new(320, 8, 32), 1024, 512))


@_groups_at_a_time.way("as many as stay in the cache", lambda left, *_: on_cpu_alone(left))
def _groups_in_cache(left_VPR: Tensor, count: int, numbers_each: int) -> int:
    return max(1, _PIECE // max(1, numbers_each))


@_groups_at_a_time.way("all")
def _all_groups(left_VPR: Tensor, count: int, numbers_each: int) -> int:
    return max(1, count)


def make_rows(slots: Slots, factors: TableFactors, embedding_dim: int) -> Tensor:
    """Make the rows of all slots, ``(S, D)``."""
    left_VPR = factors.left_VPR
    P, Q = left_VPR.shape[1], factors.right_WRQ.shape[2]
    cold = left_VPR.new_empty(slots.right_T.shape[0], slots.group * P, Q)
    with without_autocast(left_VPR):
        for piece, left, right in _pieces(slots, factors):
            torch.bmm(left, right.mT, out=cold[piece])
        cold = cold.view(slots.left_S.shape[0], P * Q)[:, :embedding_dim]
        if factors.hot_HK is None:
            return cold.contiguous()
        return torch.cat([factors.hot_rows(slots.hot), cold])


def factor_grads(slots: Slots, grad_TGQ: Tensor, factors: TableFactors) -> tuple[Tensor, Tensor]:
    """Sum gradients of both factors from those of rows of all groups, ``(T, group * P, Q)``."""
    left_VPR = factors.left_VPR
    (V, P, R), (W, _, Q) = left_VPR.shape, factors.right_WRQ.shape
    to_left = left_VPR.new_empty(slots.right_T.shape[0], slots.group * P, R)
    # Narrow numbers are rounded once, when all pieces are summed.
    wide = torch.promote_types(left_VPR.dtype, torch.float32)
    grad_right = left_VPR.new_zeros(W, Q * R, dtype=wide)
    with without_autocast(left_VPR):
        for piece, left, right in _pieces(slots, factors):
            torch.bmm(grad_TGQ[piece], right, out=to_left[piece])
            to_right = torch.bmm(grad_TGQ[piece].mT, left).flatten(1)
            _add_sorted_(grad_right, to_right.to(wide), slots.right_T[piece])
    grad_left = sum_by(to_left.view(slots.left_S.shape[0], P * R), slots.left_S, V)
    turned_WQR = grad_right.to(left_VPR.dtype).view(W, Q, R)
    return grad_left.view_as(left_VPR), turned_WQR.mT


_add_sorted_ = Ways("add_sorted", lambda new: (new(100, 256), new(64, 256), new(64)))


@_add_sorted_.way("to the rows between the first and the last", lambda _, v, __: on_cpu_alone(v))
def _add_between_(sums: Tensor, values: Tensor, of_values: Tensor) -> None:
    """Add each value to the row that it is of; these rise."""
    first, last = int(of_values[0]), int(of_values[-1])
    _add_to_all_(sums[first : last + 1], values, of_values - first)


@_add_sorted_.way("to all rows")
def _add_to_all_(sums: Tensor, values: Tensor, of_values: Tensor) -> None:
    each = torch.arange(values.shape[0], device=values.device)
    sums += sum_by_sorted(values, each, of_values, sums.shape[0])


def sum_bags(made_SD: Tensor, at_N: Tensor, offsets_B: Tensor, weights_N: Tensor | None) -> Tensor:
    """Sum over each bag the rows that its entries are at."""
    if not at_N.shape[0]:  # torch refuses an empty table
        return made_SD.new_zeros(offsets_B.shape[0], made_SD.shape[1])
    return F.embedding_bag(at_N, made_SD, offsets_B, mode="sum", per_sample_weights=weights_N)


def bag_of_entries(offsets_B: Tensor, entries: int) -> Tensor:
    """Find which bag each entry is in; entries before the first bag do not occur."""
    each = torch.arange(entries, device=offsets_B.device)
    return torch.searchsorted(offsets_B, each, right=True) - 1


def hot_grads(grad_ND: Tensor, rows: Tensor, factors: TableFactors) -> tuple[Tensor, Tensor]:
    """Make gradients of the hot rows and of their basis; empty tensors for what there is not.

    Args:
        grad_ND: Gradients of the distinct hot rows that were read.
        rows: Numbers of those rows.
        factors: Factors of the table.
    """
    _, _, hot_HK, basis_KD = factors
    grad_hot, grad_basis = empty_like(hot_HK, grad_ND), empty_like(basis_KD, grad_ND)
    if hot_HK is None:
        return grad_hot, grad_basis
    if basis_KD is not None:
        with without_autocast(grad_ND):
            grad_basis = hot_HK[rows].T @ grad_ND
            grad_ND = grad_ND @ basis_KD.T
    grad_hot.zero_()[rows] = grad_ND
    return grad_hot, grad_basis


def lying_as(like: Tensor, tensor: Tensor) -> Tensor:
    """Return the same numbers in the dtype and memory layout of another tensor."""
    same = tensor.stride() == like.stride() and tensor.dtype == like.dtype
    return tensor if same else torch.empty_like(like).copy_(tensor)


def empty_like(tensor: Tensor | None, of_type: Tensor) -> Tensor:
    """Make an empty tensor like another; one without elements, of that dtype, for None."""
    return of_type.new_empty(0) if tensor is None else torch.empty_like(tensor)
