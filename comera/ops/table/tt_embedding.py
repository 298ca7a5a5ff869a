"""Read rows, or sums of rows over bags, of embedding tables stored as tensor-train matrices.

The first cores contract to the left factor, the others to the right one; a row of the table is a
slice of the left factor times a slice of the right one. A small batch reads few slices of a factor;
they are looked up like rows of a smaller table, whose factors are two parts of the chain.

Shape suffixes are those of :mod:`~comera.ops.table.distinct_rows`; U = slices that are read.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.contract_cores import contract_groups, may_take_kernel
from comera.ops.cores import Chains, contract_chain, rank_gate
from comera.ops.dispatch import is_eager, may_read_values
from comera.ops.kernels import choose
from comera.ops.kernels.lookup_kernel import warps_take
from comera.ops.operator import is_traced
from comera.ops.table.distinct_rows import Lookup, check_range
from comera.ops.table.lookup import ROWS, lookup


class Request(NamedTuple):
    """A request to read rows, or sums of rows over bags, from one table.

    ``indices`` are integers of any shape; for bags ``(N,)``, one bag after the other, whose first
    entries are ``offsets_B``, rising from 0. ``weights_N`` are the weights of all entries in their
    bags, in the dtype of the cores; None for ones. Cores are at least two, ``(left bond, row mode,
    column mode, right bond)`` each; gates are one vector for each inner bond, or none at all. Modes
    may multiply to more than rows and width. Row ``i < H`` is the hot row ``hot_HK[i]``, with a
    basis ``hot_HK[i] @ basis_KD``; row ``i >= H`` is row ``i - H`` of the train. ``checked`` is
    whether the indices were checked before.
    """

    indices: Tensor
    cores: Sequence[Tensor]
    num_embeddings: int
    embedding_dim: int
    gates: Sequence[Tensor] = ()
    threshold: float = 0.0
    hot_HK: Tensor | None = None
    basis_KD: Tensor | None = None
    weights_N: Tensor | None = None
    offsets_B: Tensor | None = None
    checked: bool = False


def tt_embedding(request: Request) -> Tensor:
    """Read rows, or weighted sums of rows over bags; each distinct row is computed once.

    Returns ``(*indices.shape, embedding_dim)``, or ``(B, embedding_dim)`` for bags, in the dtype of
    the cores. Raises ``IndexError`` if an index is out of range (checked on the CPU).
    """
    indices, offsets_B = request.indices, request.offsets_B
    checked = request.checked or check_range(indices, request.num_embeddings)
    starts = None if offsets_B is None else offsets_B.long()
    flat = request._replace(indices=indices.reshape(-1), offsets_B=starts, checked=checked)
    rows = ROWS(*read_factors([flat]), checked)
    return rows if offsets_B is not None else rows.reshape(*indices.shape, request.embedding_dim)


def ttm_to_dense(cores: Sequence[Tensor]) -> Tensor:
    """Contract all cores to the ``(rows, columns)`` table, padding included; differentiable."""
    ((left_VPR, right_WRQ),) = contract_tables([(cores, (), 0.0)])
    table_VWPQ = torch.einsum("vpr,wrq->vwpq", left_VPR, right_WRQ)
    return table_VWPQ.flatten(0, 1).flatten(1)


def contract_tables(
    tables: Sequence[tuple[Sequence[Tensor], Sequence[Tensor], float]],
) -> list[tuple[Tensor, Tensor]]:
    """Contract to ``left (V, P, R)`` and ``right (W, R, Q)``; row v * W + w is left[v] @ right[w].

    Tables are cores, gates and threshold of a :class:`Request` each, of one dtype, that of both
    factors, and one device; a kernel contracts all at once. Without a kernel, or in 16 bits, the
    right factor lies in memory as ``(W, Q, R)``; a kernel in 16 bits pads R.
    """
    groups = [
        Chains([c.flatten(1, 2) for c in cores], list(gates), [], 1, len(cores) // 2, threshold)
        for cores, gates, threshold in tables
    ]
    by_kernel = may_take_kernel(groups)
    by_warps = warps_take(groups[0].cores[0].dtype)  # 16 bytes at a time, whose bond is innermost
    turned = by_warps or not by_kernel
    for group in groups:
        group.padded = by_kernel and by_warps
    factors, found = contract_groups(groups), []
    for (cores, _, _), left_1IR, right_1RO in zip(tables, factors[::2], factors[1::2], strict=True):
        split = len(cores) // 2
        left_V1PR = _rows_first(left_1IR, cores[:split])
        right = _rows_first(right_1RO[0].unsqueeze(-1), cores[split:], turned=turned).squeeze(-1)
        found.append((left_V1PR.squeeze(1), right.mT if turned else right))
    return found


def _rows_first(contracted: Tensor, cores: Sequence[Tensor], *, turned: bool = False) -> Tensor:
    """Permute ``(L, v1 p1 v2 p2 ..., R)`` to ``(V, L, P, R)`` or, turned, to ``(V, P, L, R)``."""
    L, *_, R = contracted.shape
    modes = [size for core in cores for size in core.shape[1:3]]
    rows, columns = range(1, len(modes), 2), range(2, len(modes) + 1, 2)
    order = [*rows, *columns, 0] if turned else [*rows, 0, *columns]
    apart = contracted.reshape(L, *modes, R).permute(*order, len(modes) + 1)
    V, P = math.prod(modes[::2]), math.prod(modes[1::2])
    made = apart.clone(memory_format=torch.contiguous_format)
    return made.view(V, P, L, R) if turned else made.view(V, L, P, R)


def read_factors(requests: Sequence[Request]) -> list[Lookup]:
    """Contract the factors of each table, or only the slices of them that its batch reads.

    Raises ``IndexError`` for an index out of range if slices are selected, which a CPU does.
    """
    in_part = [_in_part(request) for request in requests]
    whole = [r for r, part in zip(requests, in_part, strict=True) if part is None]
    trains = [(request.cores, request.gates, request.threshold) for request in whole]
    contracted = iter(contract_tables(trains) if trains else [])
    found = []
    for request, part in zip(requests, in_part, strict=True):
        indices_N, left_VPR, right_WRQ, rows = part or (
            request.indices, *next(contracted), request.num_embeddings,
        )  # fmt: skip
        others = request.hot_HK, request.basis_KD, request.weights_N, request.offsets_B
        found.append(Lookup(indices_N, left_VPR, right_WRQ, *others, rows, request.embedding_dim))
    return found


def _in_part(request: Request) -> tuple[Tensor, Tensor, Tensor, int] | None:
    """Contract only the slices that a batch reads; return None if whole factors are cheaper.

    Returns the indices renumbered to these slices, the slices of both factors, and the number of
    rows: hot rows, and a row for each pair of slices.
    """
    indices_N, cores, split = request.indices, request.cores, len(request.cores) // 2
    left_whole, right_whole = is_whole(indices_N, cores[:split]), is_whole(indices_N, cores[split:])
    if left_whole and right_whole:
        return None
    if not request.checked:
        check_range(indices_N, request.num_embeddings)
    num_hot = 0 if request.hot_HK is None else request.hot_HK.shape[0]
    pairs = zip(cores, request.gates, strict=False)
    gated = [rank_gate(core, gate, request.threshold) for core, gate in pairs]
    gated += cores[len(gated) :]
    right_W = math.prod(core.shape[1] for core in gated[split:])
    cold_N = (indices_N.long() - num_hot).clamp(min=0)
    left_V1PR, left_N = _slices(gated[:split], cold_N // right_W, left_whole)
    right_WRQ1, right_N = _slices(gated[split:], cold_N % right_W, right_whole)
    # Both as lookups read them, the right factor laid out in memory as (W, Q, R).
    left_VPR, right_WRQ = left_V1PR.flatten(1, 2), right_WRQ1.flatten(2).mT.contiguous().mT
    V, W = left_VPR.shape[0], right_WRQ.shape[0]
    at_N = num_hot + left_N * W + right_N
    if num_hot:
        at_N = torch.where(indices_N < num_hot, indices_N, at_N)
    return at_N, left_VPR, right_WRQ, num_hot + V * W


_DEARER = 2
"""A slice contracted by itself takes up to so many times as long as one of a whole factor."""

_WORTH_IT = 1 << 20
"""Entries that need not be made: finding and gathering slices takes as long as half of them."""


def is_whole(indices_N: Tensor, factor: Sequence[Tensor]) -> bool:
    """Return whether to contract a whole factor rather than only the slices that a batch reads."""
    if len(factor) == 1 or not may_read_values(indices_N):
        return True
    if factor[0].dtype.itemsize < 4:  # slices would be rounded twice
        return True
    slices = math.prod(core.shape[1] for core in factor)
    columns = math.prod(core.shape[2] for core in factor)
    saved = slices - _DEARER * indices_N.shape[0]
    if saved * factor[0].shape[0] * columns * factor[-1].shape[3] < _WORTH_IT:
        return True
    return choose.kernel_refuses("ttm_lookup", factor[0]) is None  # a kernel reads whole factors


def _slices(factor: Sequence[Tensor], numbers_N: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Return slices ``(U, left bond, columns, right bond)`` of gated cores, and each entry's slice.

    ``numbers_N`` numbers each entry's slice in the whole factor, the result numbers it within U.
    """
    if whole:
        return _rows_first(contract_chain(factor), factor), numbers_N
    read_U, at_N = numbers_N.unique(return_inverse=True)
    first, last = (_rows_first(contract_chain(part), part) for part in (factor[:-1], factor[-1:]))
    (V, L, P, _), (W, _, Q, R) = first.shape, last.shape
    others = None, None, None, None
    rows = Lookup(read_U, first.flatten(1, 2), last.flatten(2), *others, V * W, L * P * Q * R)
    return lookup(*rows, True)[0].view(-1, L, P * Q, R), at_N


def tt_embedding_bags(tables: Sequence[Lookup], places_5T: Tensor) -> list[Tensor]:
    """Sum weighted rows over bags of several tables at once, as if they were one table.

    All tables have one width, dtype and device, slices of equal widths P and Q, and dense hot rows;
    bonds may differ, and indices are not checked here. ``places_5T`` is what :func:`places`
    returns, on their device. Returns ``(B, D)`` for each table, no views, in the factors' dtype.
    """
    indices_N, left_VPR, right_WRQ, hot_HD, _, weights_N, offsets_B, *_ = zip(*tables, strict=True)
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
    starts = zip(offsets_B, _before(counts), strict=True)
    whole = Lookup(
        _rows_of_the_whole(indices_N, places_5T, num_hot, all_W),
        lefts,
        all_rights,
        torch.cat(hot) if hot else None,
        None,
        weights,
        torch.cat([offsets.long() + n for offsets, n in starts]),
        num_hot + lefts.shape[0] * all_W,
        tables[0].embedding_dim,
    )
    sums = ROWS(whole, is_eager())
    # vmap has no rule for the split without views, and the compiler breaks its graph at is_traced.
    split = sums.unsafe_split_with_sizes if is_eager() and not is_traced() else sums.split
    return list(split([offsets.shape[0] for offsets in offsets_B]))


def places(tables: Sequence[Lookup]) -> list[list[int]]:
    """Return five lists with a number for each table: its place when all are joined to one table.

    They are hot rows and W of the table, then the sums of hot rows, V and W of all tables before.
    """
    hots, lefts, rights = map(list, zip(*(table.sizes for table in tables), strict=True))
    return [hots, rights, _before(hots), _before(lefts), _before(rights)]


def _rows_of_the_whole(
    indices: Sequence[Tensor], places_5T: Tensor, num_hot: int, all_W: int
) -> Tensor:
    indices_N = torch.cat([each.long() for each in indices])
    pairs = zip(places_5T.split(1, 1), indices, strict=True)
    of_each = [column.expand(-1, each.shape[0]) for column, each in pairs]
    hot_N, right_N, hot_before_N, left_before_N, right_before_N = torch.cat(of_each, 1)
    cold_N = indices_N - hot_N
    left_N = left_before_N + cold_N.div(right_N, rounding_mode="floor")
    found_N = num_hot + left_N * all_W + right_before_N + cold_N % right_N
    return torch.where(cold_N < 0, hot_before_N + indices_N, found_N) if num_hot else found_N


def _padded(factor: Tensor, dim: int, rank: int) -> Tensor:
    more = rank - factor.shape[dim]
    return F.pad(factor, (0, 0) * (2 - dim) + (0, more)) if more else factor


def _before(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]
