"""The two factors of a tensor-train table, contracted from its cores: whole, or what is read.

The first cores make the left factor, the others the right one, rows and columns apart. A factor has
about as many slices as the root of the table's rows, and a small batch reads few of them. These
slices are rows of a smaller table, whose factors are two parts of the chain, so that they are
looked up like the rows of any table.

Shape suffixes: N = entries, U = slices that are read, V = left and W = right part of a row's
number, P and Q = left and right part of the width, R = the bond between the factors.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comera.ops.contract_cores import CONTRACT, contract_groups, layout_of
from comera.ops.cores import Chains, contract_chain, rank_gate
from comera.ops.dispatch import with_values
from comera.ops.kernels.choose import kernel_refuses
from comera.ops.kernels.lookup_kernel import warps_take
from comera.ops.table.distinct_rows import TableFactors, check_range
from comera.ops.table.lookup import Lookup, lookup

Table = tuple[Sequence[Tensor], Sequence[Tensor], float]
"""Cores, gates and the threshold of a table."""


def contract_table(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Contract to ``left (V, P, R)`` and ``right (W, R, Q)``; row v * W + w is left[v] @ right[w].

    Made by torch, the right factor lies in memory as ``(W, Q, R)``: rows and their gradients are
    products of slices whose bond is innermost.

    Args:
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.

    Returns:
        Two new tensors in the dtype of the cores.
    """
    return contract_tables([(cores, gates, threshold)])[0]


def contract_tables(tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    """Apply :func:`contract_table` to each table; kernels contract all of them in one launch.

    Args:
        tables: Arguments of :func:`contract_table` for each, all of one dtype and device.
    """
    chains = [
        Chains([c.flatten(1, 2) for c in cores], list(gates), [], 1, len(cores) // 2, threshold)
        for cores, gates, threshold in tables
    ]
    by_kernel = CONTRACT.refusal_of_graph(chains[0].cores[0], chains) is None
    by_warps = warps_take(chains[0].cores[0].dtype)  # 16 bytes at a time, whose bond is innermost
    padded, turned = by_kernel and by_warps, by_warps or not by_kernel
    factors = contract_groups(
        [core for chain in chains for core in chain.cores],
        [gate for chain in chains for gate in chain.gates],
        [],
        [n for c in chains for n in layout_of(c.cores, c.gates, [], 1, c.split, padded)],
        [chain.threshold for chain in chains],
    )
    found = []
    for (cores, _, _), left_1IR, right_1RO in zip(tables, factors[::2], factors[1::2], strict=True):
        split = len(cores) // 2
        left_V1PR = _rows_first(left_1IR, cores[:split])
        right = _rows_first(right_1RO[0].unsqueeze(-1), cores[split:], turned=turned).squeeze(-1)
        found.append((left_V1PR.squeeze(1), right.mT if turned else right))
    return found


def _rows_first(contracted: Tensor, cores: Sequence[Tensor], *, turned: bool = False) -> Tensor:
    """Copy ``(L, v1 p1 v2 p2 ..., R)`` to ``(V, L, P, R)`` or, turned, to ``(V, P, L, R)``."""
    L, *_, R = contracted.shape
    modes = [size for core in cores for size in core.shape[1:3]]
    rows, columns = range(1, len(modes), 2), range(2, len(modes) + 1, 2)
    order = [*rows, *columns, 0] if turned else [*rows, 0, *columns]
    apart = contracted.reshape(L, *modes, R).permute(*order, len(modes) + 1)
    V, P = math.prod(modes[::2]), math.prod(modes[1::2])
    made = apart.clone(memory_format=torch.contiguous_format)
    return made.view(V, P, L, R) if turned else made.view(V, L, P, R)


class Request(NamedTuple):
    """The request to one table: rows, or sums of rows over bags.

    Attributes:
        indices_N: Rows to read.
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        num_embeddings: Rows of the table; the row modes may multiply to more.
        embedding_dim: Width of a row; the column modes may multiply to more.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        hot_HK: Rows before those of the train; None for none.
        basis_KD: Basis of the hot rows; None where they are whole.
        weights_N: Weight of every entry in its bag; None for ones.
        offsets_B: First entry of each bag, rising from 0; None for rows, each a bag of one.
        checked: Whether the indices were checked before.
    """

    indices_N: Tensor
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


def read_factors(requests: Sequence[Request]) -> list[Lookup]:
    """Contract the factors of each table, or only the slices of them that its batch reads.

    Returns:
        Lookups whose indices number the rows of these factors.

    Raises:
        IndexError: If an index is out of range (checked on the CPU, where slices are selected).
    """
    in_part = [_in_part(request) for request in requests]
    whole = [a for a, some in zip(requests, in_part, strict=True) if some is None]
    trains = [(request.cores, request.gates, request.threshold) for request in whole]
    contracted = iter(contract_tables(trains) if trains else [])
    found = []
    for request, some in zip(requests, in_part, strict=True):
        indices_N, left_VPR, right_WRQ, num_embeddings = some or (
            request.indices_N, *next(contracted), request.num_embeddings,
        )  # fmt: skip
        factors = TableFactors(left_VPR, right_WRQ, request.hot_HK, request.basis_KD)
        bags = request.weights_N, request.offsets_B
        found.append(Lookup(indices_N, factors, *bags, num_embeddings, request.embedding_dim))
    return found


def _in_part(request: Request) -> tuple[Tensor, Tensor, Tensor, int] | None:
    """Read the slices a batch needs; None where both factors had better be contracted whole.

    Returns:
        Indices among the rows of these slices, slices of the left and of the right factor, and how
        many rows there are, hot ones included.
    """
    indices_N, cores = request.indices_N, request.cores
    split = len(cores) // 2
    left_whole = why_whole(indices_N, cores[:split])
    right_whole = why_whole(indices_N, cores[split:])
    if left_whole and right_whole:
        return None
    if not request.checked:
        check_range(indices_N, request.num_embeddings)
    num_hot = 0 if request.hot_HK is None else request.hot_HK.shape[0]
    gated = [
        rank_gate(core, gate, request.threshold)
        for core, gate in zip(cores, request.gates, strict=False)
    ]
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


def why_whole(indices_N: Tensor, factor: Sequence[Tensor]) -> str | None:
    """Return why a factor is contracted whole; None where the slices of a batch cost less."""
    reason = with_values(indices_N)
    if reason is not None:
        return reason
    if len(factor) == 1:
        return "it is one core"
    if factor[0].dtype.itemsize < 4:
        return "the dtype is narrower than float32"  # slices would be rounded twice
    slices = math.prod(core.shape[1] for core in factor)
    columns = math.prod(core.shape[2] for core in factor)
    saved = slices - _DEARER * indices_N.shape[0]
    if saved * factor[0].shape[0] * columns * factor[-1].shape[3] < _WORTH_IT:
        return "many of its slices are read"
    by_kernel = kernel_refuses("ttm_lookup", factor[0]) is None
    return "a kernel reads whole factors" if by_kernel else None


def _slices(
    factor: Sequence[Tensor], numbers_N: Tensor, whole: str | None
) -> tuple[Tensor, Tensor]:
    """Return slices ``(U, left bond, columns, right bond)``, and which of these each entry reads.

    Args:
        factor: Cores, the gates multiplied in.
        numbers_N: Slice that each entry reads, among all of the factor.
        whole: A reason to return all slices, or None.
    """
    if whole is not None:
        return _rows_first(contract_chain(factor), factor), numbers_N
    read_U, at_N = numbers_N.unique(return_inverse=True)
    first, last = (_rows_first(contract_chain(part), part) for part in (factor[:-1], factor[-1:]))
    (V, L, P, _), (W, _, Q, R) = first.shape, last.shape
    slices, _, _ = lookup(
        read_U, first.flatten(1, 2), last.flatten(2), None, None, None, None, V * W, L * P * Q * R,
        True,
    )  # fmt: skip
    return slices.view(-1, L, P * Q, R), at_N
