"""Read rows of an embedding table stored as a tensor-train matrix, or sums of them over bags.

The cores contract to two factors; a row is the product of one slice of each.

Shape suffixes: N = entries, B = bags, V = left and W = right part of a row's number, P and Q = left
and right part of the width, R = the bond between the factors, D = width, H = hot rows, K = their
coordinates: D where they are dense, fewer where they are coordinates in a basis.
"""

from collections.abc import Sequence

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
    offsets_B = None if offsets_B is None else offsets_B.long()
    request = Request(
        indices_N, cores, num_embeddings, embedding_dim, gates, threshold, hot_HK, basis_KD,
        weights_N, offsets_B, checked,
    )  # fmt: skip
    [lookup] = read_factors([request])
    return ROWS(lookup, checked)


def ttm_to_dense(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> Tensor:
    """Contract all cores to the ``(rows, columns)`` table, padding included; differentiable."""
    left_VPR, right_WRQ = contract_table(cores, gates, threshold)
    table_VWPQ = torch.einsum("vpr,wrq->vwpq", left_VPR, right_WRQ)
    return table_VWPQ.flatten(0, 1).flatten(1)


def tt_embedding_bags(tables: Sequence[Lookup], places_5T: Tensor) -> list[Tensor]:
    """Sum weighted rows over bags, for each table.

    Args:
        tables: Lookups of bags in tables of one width whose factors agree in P and Q, in dtype and
            device, and whose hot rows are dense; bonds are padded to the largest R. Every index is
            a row of its table: that is not checked here.
        places_5T: As :func:`places` returns it, on the device of the tables.

    Returns:
        ``(B, D)`` for each table, in the dtype of the factors.
    """
    indices_N, factors, weights_N, offsets_B, *_ = zip(*tables, strict=True)
    left_VPR, right_WRQ, hot_HD, _ = zip(*factors, strict=True)
    rank = max(left.shape[2] for left in left_VPR)
    lefts = torch.cat([_padded(left, 2, rank) for left in left_VPR])
    rights = [_padded(right, 1, rank) for right in right_WRQ]
    if rights[0].is_contiguous():
        all_rights = torch.cat(rights)
    else:  # the bond stays innermost in memory
        all_rights = torch.cat([right.mT for right in rights]).mT
    hot = [rows for rows in hot_HD if rows is not None]
    num_hot, all_W = sum(map(len, hot)), all_rights.shape[0]
    counts = [indices.shape[0] for indices in indices_N]
    weights = None
    if any(w is not None for w in weights_N):
        pairs = zip(weights_N, counts, strict=True)
        weights = torch.cat([lefts.new_ones(n) if w is None else w for w, n in pairs])
    offsets = zip(offsets_B, _before(counts), strict=True)
    whole = Lookup(
        _rows_of_the_whole(indices_N, places_5T, num_hot, all_W),
        TableFactors(lefts, all_rights, torch.cat(hot) if hot else None, None),
        weights,
        torch.cat([starts.long() + n for starts, n in offsets]),
        num_hot + lefts.shape[0] * all_W,
        tables[0].embedding_dim,
    )
    return list(ROWS(whole, is_eager()).split([starts.shape[0] for starts in offsets_B]))


def places(tables: Sequence[Lookup]) -> list[list[int]]:
    """Return where each table stands in the whole: five numbers a table, from shapes alone.

    Its hot rows and its W; then those of the tables before it: hot rows, V and W.
    """
    hots, lefts, rights = map(list, zip(*(table.factors.sizes for table in tables), strict=True))
    return [hots, rights, _before(hots), _before(lefts), _before(rights)]


def _rows_of_the_whole(
    indices: Sequence[Tensor], places_5T: Tensor, num_hot: int, all_W: int
) -> Tensor:
    """Number all entries by their rows in the whole, int64 (N,)."""
    indices_N = torch.cat([each.long() for each in indices])
    pairs = zip(places_5T.split(1, 1), indices, strict=True)
    of_each = [column.expand(-1, each.shape[0]) for column, each in pairs]
    hot_N, right_N, hot_before_N, left_before_N, right_before_N = torch.cat(of_each, 1)
    cold_N = indices_N - hot_N
    left_N = left_before_N + cold_N.div(right_N, rounding_mode="floor")
    found_N = num_hot + left_N * all_W + right_before_N + cold_N % right_N
    return torch.where(cold_N < 0, hot_before_N + indices_N, found_N) if num_hot else found_N


def _padded(factor: Tensor, dim: int, rank: int) -> Tensor:
    """Pad the bond of a factor with zeros up to a rank."""
    more = rank - factor.shape[dim]
    return F.pad(factor, (0, 0) * (2 - dim) + (0, more)) if more else factor


def _before(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]
