"""Sums over bags of rows of several tensor-train tables, looked up as one.

The halves of all tables stand one below the other. A row of any table is then a row of the whole,
``left[v] @ right[w]``, and what is asked of the tables one list of entries: as many operations as
one table takes, however many there are.

Shape suffixes: T = tables, N = entries of all of them, B = bags of all of them; V, W, P, Q, R, H
and D as in :mod:`comera.ops.look_up`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.tt_embedding import sums_of_rows


@dataclass(frozen=True)
class TableBags:
    """What is asked of one table.

    Attributes:
        indices_N: Rows by their numbers in these halves, bag after bag.
        offsets_B: First entry of each bag, rising from 0.
        weights_N: Of every entry, in the dtype of the halves; None for ones.
        left_VPR: Left half, or the slices of it that are read.
        right_WRQ: Right half, or such slices; row ``v * W + w`` is ``left[v] @ right[w]``.
        hot_HD: Rows that stand before those of the train; None for none.
    """

    indices_N: Tensor
    offsets_B: Tensor
    weights_N: Tensor | None
    left_VPR: Tensor
    right_WRQ: Tensor
    hot_HD: Tensor | None


def tt_embedding_bags(
    tables: Sequence[TableBags], embedding_dim: int, places_5T: Tensor
) -> list[Tensor]:
    """Weighted sums over bags of rows, of each table.

    Args:
        tables: Their halves agree in P and Q, in dtype and device; bonds are padded to the largest
            R. Every index is a row of its table: that is not checked here.
        embedding_dim: Width of a row; P * Q may be more.
        places_5T: What :func:`places` returns, on the device of the tables.

    Returns:
        ``(B, embedding_dim)`` for each table, in the dtype of the halves.
    """
    rank = max(table.left_VPR.shape[2] for table in tables)
    left_VPR = torch.cat([_padded(table.left_VPR, 2, rank) for table in tables])
    right_WRQ = _cat([_padded(table.right_WRQ, 1, rank) for table in tables])
    hot = [table.hot_HD for table in tables if table.hot_HD is not None]
    num_hot, all_W = sum(map(len, hot)), right_WRQ.shape[0]
    sums_BD = sums_of_rows(
        _rows_of_the_whole(tables, places_5T, num_hot, all_W),
        _offsets(tables),
        _weights(tables),
        left_VPR,
        right_WRQ,
        torch.cat(hot) if hot else None,
        None,
        num_hot + left_VPR.shape[0] * all_W,
        embedding_dim,
    )
    return list(sums_BD.split([table.offsets_B.shape[0] for table in tables]))


def places(tables: Sequence[TableBags]) -> list[list[int]]:
    """Where each table stands in the whole: five numbers a table, known from shapes alone.

    Its hot rows and its W; then those of the tables before it: hot rows, V and W.
    """
    hots = [0 if table.hot_HD is None else table.hot_HD.shape[0] for table in tables]
    lefts = [table.left_VPR.shape[0] for table in tables]
    rights = [table.right_WRQ.shape[0] for table in tables]
    return [hots, rights, _before(hots), _before(lefts), _before(rights)]


def _rows_of_the_whole(
    tables: Sequence[TableBags], places_5T: Tensor, num_hot: int, all_W: int
) -> Tensor:
    """All entries by the numbers of their rows in the whole, int64 (N,)."""
    counts = [table.indices_N.shape[0] for table in tables]
    indices_N = torch.cat([table.indices_N.long() for table in tables])
    of_each = [
        column.expand(-1, n) for column, n in zip(places_5T.split(1, 1), counts, strict=True)
    ]
    hot_N, right_N, hot_before_N, left_before_N, right_before_N = torch.cat(of_each, 1)
    cold_N = indices_N - hot_N
    left_N = left_before_N + cold_N.div(right_N, rounding_mode="floor")
    found_N = num_hot + left_N * all_W + right_before_N + cold_N % right_N
    return torch.where(cold_N < 0, hot_before_N + indices_N, found_N) if num_hot else found_N


def _padded(half: Tensor, dim: int, rank: int) -> Tensor:
    """Its bond with zeros up to a rank."""
    more = rank - half.shape[dim]
    return F.pad(half, (0, 0) * (2 - dim) + (0, more)) if more else half


def _cat(halves: Sequence[Tensor]) -> Tensor:
    """One below the other, bonds innermost in memory where they were."""
    if halves[0].is_contiguous():
        return torch.cat(list(halves))
    return torch.cat([half.mT for half in halves]).mT


def _before(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]


def _offsets(tables: Sequence[TableBags]) -> Tensor:
    before = _before([table.indices_N.shape[0] for table in tables])
    return torch.cat([t.offsets_B.long() + n for t, n in zip(tables, before, strict=True)])


def _weights(tables: Sequence[TableBags]) -> Tensor | None:
    if all(table.weights_N is None for table in tables):
        return None
    like = tables[0].left_VPR
    return torch.cat(
        [
            like.new_ones(table.indices_N.shape[0]) if table.weights_N is None else table.weights_N
            for table in tables
        ]
    )
