"""Compute the distinct rows of a table from its two factors, each once, and their gradients.

A row of a tensor-train table is a slice of the left factor times a slice of the right one. Entries
are sorted by right slice, then left slice, so that rows that share their right slice form groups;
one product computes a group. Each distinct row gets a slot: rows of entries are gathered from the
slots, and the gradient of a slot is a sum over a segment of the sorted entries.

Shape suffixes: N = entries, B = bags (or entries, where there are none), S = slots (distinct rows),
T = groups of slots that share a right slice, V = left and W = right slices, P and Q = width of a
left and of a right slice, R = the bond between them, D = width, H = hot rows, K = numbers that a
hot row has: D if it is dense, fewer if they are coordinates in a basis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import without_autocast
from comera.ops.dispatch import is_eager, is_on_cpu, may_read_values
from comera.ops.operator import is_traced

_MOST = 8  # rows of a group at most: more make no faster products, and more slots that stay empty

_MOST_KEY = torch.iinfo(torch.int64).max


class Lookup(NamedTuple):
    """A request to read rows, or sums of rows over bags, from the factors of a table.

    Row ``H + v * W + w`` is ``left[v] @ right[w]``; the other attributes are those of a
    :class:`~comera.ops.table.tt_embedding.Request`.
    """

    indices_N: Tensor
    left_VPR: Tensor
    right_WRQ: Tensor
    hot_HK: Tensor | None
    basis_KD: Tensor | None
    weights_N: Tensor | None
    offsets_B: Tensor | None
    num_embeddings: int
    embedding_dim: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of hot rows, V and W."""
        hot = 0 if self.hot_HK is None else self.hot_HK.shape[0]
        return hot, self.left_VPR.shape[0], self.right_WRQ.shape[0]

    def hot_rows(self, rows_N: Tensor) -> Tensor:
        """Return the hot rows of these numbers, ``(N, D)``."""
        assert self.hot_HK is not None, "the table has hot rows"
        hot = self.hot_HK.index_select(0, rows_N)
        return hot if self.basis_KD is None else hot @ self.basis_KD


class Sorted(NamedTuple):
    """The gradient of a lookup's result, and the keys and entries that the lookup returned."""

    grad_BD: Tensor
    keys_N: Tensor
    order_N: Tensor
    with_weights: bool


@dataclass(frozen=True)
class Slots:
    """Slots of distinct rows: first hot rows, then the rows of the train in groups.

    ``hot`` are numbers of the hot rows that occur, ``left_S`` the left slice of each slot of the
    train's rows, and ``right_T`` the right slice of each group of ``group`` slots, in rising order;
    groups are filled up with left slice 0. ``of_sorted_N`` is the slot of each sorted entry.
    """

    hot: Tensor
    left_S: Tensor
    right_T: Tensor
    group: int
    of_sorted_N: Tensor

    @property
    def count(self) -> int:
        return self.hot.shape[0] + self.left_S.shape[0]

    def of_entries(self, order_N: Tensor) -> Tensor:
        """Return the slot of each entry in the original order; ``order_N`` sorted the entries."""
        return torch.empty_like(order_N).scatter_(0, order_N, self.of_sorted_N)


def sorted_rows(rows_N: Tensor, hot_rows: int, left_V: int, right_W: int) -> tuple[Tensor, Tensor]:
    """Return the sorted keys of all entries' rows, and the entry that each key comes from.

    The key of a hot row is its number; row ``H + v * W + w`` has key ``H + w * V + v``.
    """
    cold = rows_N.long() - hot_rows
    keys = hot_rows + cold % right_W * left_V + cold // right_W
    if hot_rows:
        keys = torch.where(cold < 0, rows_N.long(), keys)
    return _sorted(keys)


def make_slots(keys_N: Tensor, hot_rows: int, left_V: int, right_W: int) -> Slots:
    """Assign a slot to each distinct key; ``keys_N`` are sorted."""
    first = torch.ones_like(keys_N, dtype=torch.bool)
    torch.ne(keys_N[1:], keys_N[:-1], out=first[1:])
    distinct = keys_N[first]
    num_hot = int(torch.searchsorted(distinct, hot_rows)) if hot_rows else 0
    cold = distinct[num_hot:] - hot_rows
    left, right = cold % left_V, cold // left_V
    group = 1  # doubled as long as at most a fifth of the slots stay empty
    while group < _MOST and 2 * (2 * group - 1) * right_W <= cold.shape[0]:
        group *= 2
    slot = torch.arange(distinct.shape[0], device=keys_N.device)
    if group > 1:
        counts_W = torch.bincount(right, minlength=right_W)
        groups_W = (counts_W + group - 1) // group
        right_T = torch.repeat_interleave(groups_W)
        empty_before_W = group * (groups_W.cumsum(0) - groups_W) - (counts_W.cumsum(0) - counts_W)
        shift = empty_before_W.index_select(0, right)
        slot[num_hot:] += shift
        left_S = left.new_zeros(group * right_T.shape[0])
        left_S.scatter_(0, slot[num_hot:] - num_hot, left)
    else:
        left_S, right_T = left, right
    of_sorted_N = slot.index_select(0, first.cumsum(0) - 1)
    return Slots(distinct[:num_hot], left_S, right_T, group, of_sorted_N)


def sum_by_sorted(values: Tensor, rows: Tensor, of_rows: Tensor, count: int,
                  weights: Tensor | None = None) -> Tensor:  # fmt: skip
    """Compute ``out[k]`` for k < count: the sum of ``values[rows[i]]`` where ``of_rows[i] == k``.

    ``of_rows`` never falls; ``weights`` scales each of the rows.
    """
    if not rows.shape[0] or not values.shape[1]:
        return values.new_zeros(count, values.shape[1])
    counts = torch.bincount(of_rows, minlength=count)
    starts = counts.cumsum(0) - counts
    return F.embedding_bag(rows, values, starts, mode="sum", per_sample_weights=weights)


def sum_by(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Compute ``out[k]``, the sum of ``values[i]`` where ``places[i] == k``, in a fixed order."""
    found, order = _sorted(places)
    return sum_by_sorted(values, order, found, count)


def _sorted(keys_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sort keys stably; return the sorted keys, and the original position of each."""
    count = keys_N.shape[0]
    # numpy sorts whole numbers several times as fast, so each takes its place along, if both fit.
    if keys_N.device.type != "cpu" or not count or keys_N.numpy().max() >= _MOST_KEY // count:
        found = keys_N.sort(stable=True)
        return found.values, found.indices
    packed = torch.from_numpy(np.sort((keys_N * count + torch.arange(count)).numpy()))
    values = packed // count
    return values, packed - values * count


def check_integers(indices: Tensor) -> None:
    """Raise ``TypeError`` unless indices are integers; a boolean mask is refused, too."""
    if indices.dtype == torch.bool:
        raise TypeError(
            "indices are torch.bool, and no mask selects rows of a table: give the rows' numbers, "
            "such as mask.nonzero() has them"
        )
    if indices.is_floating_point() or indices.is_complex():
        raise TypeError(f"indices are {indices.dtype}; they must be whole numbers, such as int64")


def check_range(indices: Tensor, num_embeddings: int) -> bool:
    """Raise ``IndexError`` for the first index out of range, ``TypeError`` for non-integers.

    The range is checked only if values can be read (on a CPU). Returns False while compiling or
    tracing, where the operator has to check the range when it runs.
    """
    check_integers(indices)
    if not may_read_values(indices) or not indices.numel():
        return is_eager() and not is_traced()
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low >= 0 and high < num_embeddings:
        return True
    place = ((indices < 0) | (indices >= num_embeddings)).nonzero()[0].tolist()
    where = f" at {place[0] if len(place) == 1 else tuple(place)}" if place else ""
    raise IndexError(
        f"index {int(indices[tuple(place)])}{where} is out of range for an embedding of "
        f"{num_embeddings} rows (0 to {num_embeddings - 1})"
    )


def every_row(given: Lookup) -> Tensor:
    """Compute a row for every entry, so sizes are static; differentiable repeatedly."""
    indices_N, left_VPR, right_WRQ, num_hot = *given[:3], given.sizes[0]
    cold = (indices_N.long() - num_hot).clamp(min=0)
    left = left_VPR.index_select(0, cold // right_WRQ.shape[0])
    turned_WQR, at = right_WRQ.mT, cold % right_WRQ.shape[0]
    if turned_WQR.is_contiguous():  # gathered as it lies: otherwise that takes half as long again
        right = turned_WQR.index_select(0, at).mT
    else:
        right = right_WRQ.index_select(0, at)
    with without_autocast(left_VPR):
        rows = torch.bmm(left, right).flatten(1)[:, : given.embedding_dim]
        if given.hot_HK is None:
            return rows
        hot = given.hot_rows(indices_N.long().clamp(max=num_hot - 1))
    return torch.where((indices_N < num_hot).unsqueeze(1), hot, rows)


_PIECE = 1 << 19
"""Entries of slices that a CPU gathers at once: they are still in its cache when they are used."""


def _pieces(slots: Slots, given: Lookup) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield pieces of the groups with their slices ``(T, group * P, R)`` and ``(T, Q, R)``."""
    left_VPR, turned_WQR = given.left_VPR, given.right_WRQ.mT.contiguous()
    _, P, R = left_VPR.shape
    count, tall = slots.right_T.shape[0], slots.group * P
    at_once = max(1, count)
    if is_on_cpu(left_VPR):
        at_once = max(1, _PIECE // max(1, (tall + turned_WQR.shape[1]) * R))
    for start in range(0, count, at_once):
        piece = slice(start, min(start + at_once, count))
        left_S = slots.left_S[piece.start * slots.group : piece.stop * slots.group]
        left = left_VPR.index_select(0, left_S).view(piece.stop - piece.start, tall, R)
        yield piece, left, turned_WQR.index_select(0, slots.right_T[piece])


def make_rows(slots: Slots, given: Lookup) -> Tensor:
    """Compute the row of every slot, ``(S, D)``."""
    left_VPR = given.left_VPR
    P, Q = left_VPR.shape[1], given.right_WRQ.shape[2]
    cold = left_VPR.new_empty(slots.right_T.shape[0], slots.group * P, Q)
    with without_autocast(left_VPR):
        for piece, left, right in _pieces(slots, given):
            torch.bmm(left, right.mT, out=cold[piece])
        cold = cold.view(slots.left_S.shape[0], P * Q)[:, : given.embedding_dim]
        if given.hot_HK is None:
            return cold.contiguous()
        return torch.cat([given.hot_rows(slots.hot), cold])


def factor_grads(slots: Slots, grad_TGQ: Tensor, given: Lookup) -> tuple[Tensor, Tensor]:
    """Return both factors' gradients; ``grad_TGQ`` is the rows' gradient ``(T, group * P, Q)``."""
    left_VPR = given.left_VPR
    (V, P, R), (W, _, Q) = left_VPR.shape, given.right_WRQ.shape
    to_left = left_VPR.new_empty(slots.right_T.shape[0], slots.group * P, R)
    # Narrow numbers are rounded once, when all pieces are summed.
    wide = torch.promote_types(left_VPR.dtype, torch.float32)
    grad_right = left_VPR.new_zeros(W, Q * R, dtype=wide)
    with without_autocast(left_VPR):
        for piece, left, right in _pieces(slots, given):
            torch.bmm(grad_TGQ[piece], right, out=to_left[piece])
            to_right = torch.bmm(grad_TGQ[piece].mT, left).flatten(1).to(wide)
            sums, right_T = grad_right, slots.right_T[piece]
            if is_on_cpu(to_right):  # to the rows between the first and the last
                first, last = int(right_T[0]), int(right_T[-1])
                sums, right_T = sums[first : last + 1], right_T - first
            each = torch.arange(to_right.shape[0], device=to_right.device)
            sums += sum_by_sorted(to_right, each, right_T, sums.shape[0])
    grad_left = sum_by(to_left.view(slots.left_S.shape[0], P * R), slots.left_S, V)
    turned_WQR = grad_right.to(left_VPR.dtype).view(W, Q, R)
    return grad_left.view_as(left_VPR), turned_WQR.mT


def bag_of_entries(offsets_B: Tensor, entries: int) -> Tensor:
    """Return the number of each entry's bag; the first offset must be zero."""
    each = torch.arange(entries, device=offsets_B.device)
    return torch.searchsorted(offsets_B, each, right=True) - 1


def hot_grads(grad_ND: Tensor, rows: Tensor, given: Lookup) -> tuple[Tensor | None, Tensor | None]:
    """Return gradients of hot rows and basis; ``grad_ND`` are those of the distinct ``rows``."""
    hot_HK, basis_KD = given.hot_HK, given.basis_KD
    if hot_HK is None:
        return None, None
    grad_hot, grad_basis = torch.zeros_like(hot_HK), None
    if basis_KD is not None:
        with without_autocast(grad_ND):
            grad_basis = hot_HK[rows].T @ grad_ND
            grad_ND = grad_ND @ basis_KD.T
    grad_hot[rows] = grad_ND
    return grad_hot, grad_basis


def lying_as(like: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype and memory layout of ``like``."""
    same = tensor.stride() == like.stride() and tensor.dtype == like.dtype
    return tensor if same else torch.empty_like(like).copy_(tensor)
