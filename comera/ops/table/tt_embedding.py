"""Read rows of an embedding table stored as a tensor-train matrix, or sums of them over bags.

The cores contract to two factors; a row is the product of one slice of each.

Shape suffixes: N = entries, B = bags, V = left and W = right part of a row's number, P and Q = left
and right part of the width, R = the bond between the factors, D = width, H = hot rows, K = their
coordinates: D where they are dense, fewer where they are coordinates in a basis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.dispatch import is_eager
from comera.ops.table.distinct_rows import TableFactors, check_range
from comera.ops.table.lookup import ROWS, Lookup
from comera.ops.table.table_factors import Request, contract_table, read_factors


def tt_embedding_reference(
    indices: Tensor,
    cores: Sequence[Tensor],
    embedding_dim: int,
    hot_HK: Tensor | None = None,
    basis_KD: Tensor | None = None,
) -> Tensor:
    """Compute :func:`tt_embedding` by the dense table instead, for autograd to differentiate."""
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
    checked: bool = False,
) -> Tensor:
    """Gather rows of a table stored as a tensor-train matrix.

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
        checked: Whether the indices were checked before.

    Returns:
        ``(*indices.shape, embedding_dim)`` in the dtype of the cores.

    Raises:
        IndexError: If an index is out of range (checked on the CPU).
    """
    checked = checked or check_range(indices, num_embeddings)  # it still has its shape here
    rows = tt_embedding_bag(
        indices.reshape(-1), None, None, cores, num_embeddings, embedding_dim,
        gates=gates, threshold=threshold, hot_HK=hot_HK, basis_KD=basis_KD, checked=checked,
    )  # fmt: skip
    return rows.reshape(*indices.shape, embedding_dim)


def tt_embedding_bag(
    indices_N: Tensor,
    offsets_B: Tensor | None,
    weights_N: Tensor | None,
    cores: Sequence[Tensor],
    num_embeddings: int,
    embedding_dim: int,
    *,
    gates: Sequence[Tensor] = (),
    threshold: float = 0.0,
    hot_HK: Tensor | None = None,
    basis_KD: Tensor | None = None,
    checked: bool = False,
) -> Tensor:
    """Add up rows over bags, weighted, no row laid out more than once.

    Args:
        indices_N: Integers, bag after bag.
        offsets_B: First entry of each bag, rising from 0; None for rows, each a bag of one.
        weights_N: Weight of every entry, in the dtype of the cores; None for ones.
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        num_embeddings: True number of rows; the row modes may multiply to more.
        embedding_dim: True width; the column modes may multiply to more.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        hot_HK: Rows that stand before those of the tensor train, as in :func:`tt_embedding`.
        basis_KD: Basis of the hot rows; None where they are whole.
        checked: Whether the indices were checked before.

    Returns:
        ``(B, embedding_dim)`` in the dtype of the cores.

    Raises:
        IndexError: If an index is out of range (checked on the CPU).
    """
    checked = checked or check_range(indices_N, num_embeddings)
    num_hot = 0 if hot_HK is None else hot_HK.shape[0]
    table = Request(indices_N, cores, gates, threshold, num_embeddings, num_hot, checked)
    [(rows_N, left_VPR, right_WRQ, num_rows)] = read_factors([table])
    factors = TableFactors(left_VPR, right_WRQ, hot_HK, basis_KD)
    offsets_B = None if offsets_B is None else offsets_B.long()
    return ROWS(Lookup(rows_N, factors, weights_N, offsets_B, num_rows, embedding_dim), checked)


def ttm_to_dense(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> Tensor:
    """Contract all cores to the ``(rows, columns)`` table, padding included; differentiable."""
    left_VPR, right_WRQ = contract_table(cores, gates, threshold)
    table_VWPQ = torch.einsum("vpr,wrq->vwpq", left_VPR, right_WRQ)
    return table_VWPQ.flatten(0, 1).flatten(1)


@dataclass(frozen=True)
class TableBags:
    """The request to one table.

    Attributes:
        indices_N: Rows by their numbers in these factors, bag after bag.
        offsets_B: First entry of each bag, rising from 0.
        weights_N: Weight of every entry, in the dtype of the factors; None for ones.
        left_VPR: Left factor, or the slices of it that are read.
        right_WRQ: Right factor, or such slices; row ``v * W + w`` is ``left[v] @ right[w]``.
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
    """Sum weighted rows over bags, for each table.

    Args:
        tables: Requests to tables whose factors agree in P and Q, in dtype and device; bonds are
            padded to the largest R. Every index is a row of its table: that is not checked here.
        embedding_dim: Width of a row; P * Q may be more.
        places_5T: What :func:`places` returns, on the device of the tables.

    Returns:
        ``(B, embedding_dim)`` for each table, in the dtype of the factors.
    """
    rank = max(table.left_VPR.shape[2] for table in tables)
    left_VPR = torch.cat([_padded(table.left_VPR, 2, rank) for table in tables])
    right_WRQ = _cat([_padded(table.right_WRQ, 1, rank) for table in tables])
    hot = [table.hot_HD for table in tables if table.hot_HD is not None]
    num_hot, all_W = sum(map(len, hot)), right_WRQ.shape[0]
    whole = Lookup(
        _rows_of_the_whole(tables, places_5T, num_hot, all_W),
        TableFactors(left_VPR, right_WRQ, torch.cat(hot) if hot else None, None),
        _weights(tables),
        _offsets(tables),
        num_hot + left_VPR.shape[0] * all_W,
        embedding_dim,
    )
    sums_BD = ROWS(whole, is_eager())
    return list(sums_BD.split([table.offsets_B.shape[0] for table in tables]))


def places(tables: Sequence[TableBags]) -> list[list[int]]:
    """Return where each table stands in the whole: five numbers a table, from shapes alone.

    Its hot rows and its W; then those of the tables before it: hot rows, V and W.
    """
    hots = [0 if table.hot_HD is None else table.hot_HD.shape[0] for table in tables]
    lefts = [table.left_VPR.shape[0] for table in tables]
    rights = [table.right_WRQ.shape[0] for table in tables]
    return [hots, rights, _before(hots), _before(lefts), _before(rights)]


def _rows_of_the_whole(
    tables: Sequence[TableBags], places_5T: Tensor, num_hot: int, all_W: int
) -> Tensor:
    """Number all entries by their rows in the whole, int64 (N,)."""
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


def _padded(factor: Tensor, dim: int, rank: int) -> Tensor:
    """Pad the bond of a factor with zeros up to a rank."""
    more = rank - factor.shape[dim]
    return F.pad(factor, (0, 0) * (2 - dim) + (0, more)) if more else factor


def _cat(factors: Sequence[Tensor]) -> Tensor:
    """Concatenate factors along their rows, bonds innermost in memory where they were."""
    if factors[0].is_contiguous():
        return torch.cat(list(factors))
    return torch.cat([factor.mT for factor in factors]).mT


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
