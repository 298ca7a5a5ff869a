"""Contract the cores of a tensor-train table to its two factors, rows and columns apart.

Shape suffixes: V = left and W = right part of a row's number, P and Q = left and right part of the
width, R = the bond between the factors.

Make of a table's factors only the slices that are read, where those are few.

A factor has about as many slices as the root of the table's rows, and a batch reads no more of them
than it has entries. The slices are rows of a smaller table, whose factors are the two parts of the
chain, and are read like the rows of any table.

Shape suffixes: N = entries, U = slices that are read, V = left and W = right part of a row's
number, P and Q = left and right part of the width, R = the bond between the factors.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.ops.contract_cores import CONTRACT, contract_by_torch, contract_groups, layout_of
from comera.ops.cores import Chains, contract_chain, rank_gate
from comera.ops.dispatch import Case, Times, Ways, with_values
from comera.ops.kernels.choose import kernel_refuses
from comera.ops.kernels.warp_lookup_kernel import takes
from comera.ops.operator import operator, recomputed_grads
from comera.ops.table.distinct_rows import check_range
from comera.ops.table.lookup import lookup

Table = tuple[Sequence[Tensor], Sequence[Tensor], float]
"""Cores, gates and the threshold of a table."""


def contract_table(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Contract to ``left (V, P, R)`` and ``right (W, R, Q)``; row v * W + w is left[v] @ right[w].

    Where torch makes it, the right factor lies in memory as ``(W, Q, R)``: rows are made, and their
    gradients taken, of slices whose bond is innermost.

    Args:
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.

    Returns:
        Two tensors in the dtype of the cores.
    """
    return contract_tables([(cores, gates, threshold)])[0]


def contract_tables(tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    """Apply :func:`contract_table` to each table; by kernels all at once.

    Args:
        tables: What :func:`contract_table` takes of each, all of one dtype and device.
    """
    chains = [
        Chains([c.flatten(1, 2) for c in cores], list(gates), [], 1, len(cores) // 2, threshold)
        for cores, gates, threshold in tables
    ]
    return _TABLES(chains, tables)


def _case(chains: Sequence[Chains], tables: Sequence[Table]) -> Case:
    core = chains[0].cores[chains[0].split]
    return core, chains[0].factor_dtype, (len(chains), core.shape[0])


_TABLES = Ways(
    "contract_tables",
    lambda new: ([Chains([new(1, 64, 32), new(32, 64, 1)], [], [], 1, 1, 0.0)], []),
    Times("contract_cores", _case),
)


def _not_together(chains: Sequence[Chains], tables: Sequence[Table]) -> str | None:
    return CONTRACT.refusal_of_graph(chains[0].cores[0], chains)


@_TABLES.way("all at once, as layers", _not_together, kernel="contract_cores")
def _together(chains: Sequence[Chains], tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    by_warps = takes(chains[0].cores[0].dtype)  # 16 bytes at a time, whose bond is innermost
    factors = contract_groups(
        [core for chain in chains for core in chain.cores],
        [gate for chain in chains for gate in chain.gates],
        [],
        [n for c in chains for n in layout_of(c.cores, c.gates, [], 1, c.split, padded=by_warps)],
        [chain.threshold for chain in chains],
    )
    found = []
    for (cores, _, _), left_1IR, right_1RO in zip(tables, factors[::2], factors[1::2], strict=True):
        split = len(cores) // 2
        left, right = _left_apart(left_1IR[0], cores[:split]), right_1RO[0]
        found.append((left, _right_apart(right, cores[split:], turned=by_warps)))
    return found


@_TABLES.way("one by one")
def _one_by_one(chains: Sequence[Chains], tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    return [_contract_table(list(c), list(g), threshold) for c, g, threshold in tables]


@operator("comera::contract_table")
def _contract_table(
    cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    return _table_by_torch(cores, gates, threshold)


def _table_by_torch(
    cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    split = len(cores) // 2
    flat = [core.flatten(1, 2) for core in cores]
    left, right = contract_by_torch(Chains(flat, gates, [], 1, split, threshold, padded=False))
    return _left_apart(left[0], cores[:split]), _right_apart(right[0], cores[split:], turned=True)


@_contract_table.register_fake
def _(cores, gates, threshold):
    split = len(cores) // 2
    (V, P), (W, Q) = _sizes(cores[:split]), _sizes(cores[split:])
    R = cores[split].shape[0]
    return cores[0].new_empty(V, P, R), cores[0].new_empty(W, Q, R).mT


def _setup_context(ctx, inputs, output) -> None:
    cores, gates, ctx.threshold = inputs
    ctx.num_cores = len(cores)
    ctx.save_for_backward(*cores, *gates)


def _backward(ctx, *grads: Tensor):
    saved = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    count = ctx.num_cores

    def run(*params: Tensor) -> tuple[Tensor, Tensor]:
        return _table_by_torch(params[:count], params[count:], ctx.threshold)

    with without_autocast(grads[0]):
        found = list(recomputed_grads(run, saved, grads))
    return found[:count], found[count:], None


_contract_table.register_autograd(_backward, setup_context=_setup_context)


def _sizes(cores: Sequence[Tensor]) -> tuple[int, int]:
    """Count rows and columns of a part of the train."""
    return math.prod(core.shape[1] for core in cores), math.prod(core.shape[2] for core in cores)


def _left_apart(contracted: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Undo the interleaving of modes: ``(v1 p1 v2 p2, R)`` to ``(V, P, R)``."""
    count, modes = len(cores), _modes(cores)
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2), 2 * count]
    rank = contracted.shape[-1]
    return _new(contracted.view(*modes, rank).permute(order), cores).view(*_sizes(cores), rank)


def _right_apart(contracted: Tensor, cores: Sequence[Tensor], *, turned: bool) -> Tensor:
    """Permute ``(R, w1 q1 w2 q2)`` to ``(W, R, Q)``, in memory ``(W, Q, R)`` if turned."""
    count, modes = len(cores), _modes(cores)
    rows, columns = range(1, 2 * count, 2), range(2, 2 * count + 1, 2)
    order = [*rows, *columns, 0] if turned else [*rows, 0, *columns]
    rank, (W, Q) = contracted.shape[0], _sizes(cores)
    made = _new(contracted.view(rank, *modes).permute(order), cores)
    return made.view(W, Q, rank).mT if turned else made.view(W, rank, Q)


def _modes(cores: Sequence[Tensor]) -> list[int]:
    """List row mode and column mode of each core in turn."""
    return [size for core in cores for size in core.shape[1:3]]


def _new(tensor: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Copy to a contiguous tensor, never a view: an operator may not return its input."""
    return tensor.to(cores[0].dtype, copy=True, memory_format=torch.contiguous_format)


_DEARER = 2
"""A slice contracted by itself takes up to so many times as long as one of a whole factor."""

_WORTH_IT = 1 << 20
"""Entries that need not be made: finding and gathering slices takes as long as half of them."""


class Request(NamedTuple):
    """The request to one table.

    Attributes:
        indices_N: Rows to read; the first ``num_hot`` are none of the train's.
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        num_embeddings: Rows of the table; the row modes may multiply to more.
        num_hot: Rows before those of the train.
        checked: Whether the indices have been looked at.
    """

    indices_N: Tensor
    cores: Sequence[Tensor]
    gates: Sequence[Tensor]
    threshold: float
    num_embeddings: int
    num_hot: int
    checked: bool


class ReadFactors(NamedTuple):
    """What a lookup takes.

    Attributes:
        indices_N: Rows by their numbers in what follows.
        left_VPR: Left factor, or the slices of it that are read.
        right_WRQ: Right factor, or the slices of it that are read.
        num_embeddings: Rows that there are in all, hot ones included.
    """

    indices_N: Tensor
    left_VPR: Tensor
    right_WRQ: Tensor
    num_embeddings: int


def read_factors(request: Request) -> ReadFactors:
    """Contract the factors of a table, or only what a batch reads of them.

    Raises:
        IndexError: If an index is out of range (checked on the CPU, where slices are sought out).
    """
    return read_factors_of([request])[0]


def read_factors_of(tables: Sequence[Request]) -> list[ReadFactors]:
    """Apply :func:`read_factors` to each table; kernels contract all they can in one go."""
    in_part = [_in_part(request) for request in tables]
    whole = [a for a, some in zip(tables, in_part, strict=True) if some is None]
    trains = [(request.cores, request.gates, request.threshold) for request in whole]
    contracted = iter(contract_tables(trains) if trains else [])
    return [
        ReadFactors(request.indices_N, *next(contracted), request.num_embeddings)
        if some is None
        else some
        for request, some in zip(tables, in_part, strict=True)
    ]


def _in_part(request: Request) -> ReadFactors | None:
    """Read the slices a batch needs; None where both factors had better be contracted whole."""
    indices_N, cores, gates, threshold, num_embeddings, num_hot, checked = request
    split = len(cores) // 2
    read_left = _FACTOR.choose(indices_N, cores[:split])
    read_right = _FACTOR.choose(indices_N, cores[split:])
    if read_left is read_right is _whole:
        return None
    if not checked:
        check_range(indices_N, num_embeddings)
    gated = [rank_gate(core, gate, threshold) for core, gate in zip(cores, gates, strict=False)]
    gated += cores[len(gated) :]
    left, right = gated[:split], gated[split:]
    right_W = _rows(right)
    cold_N = (indices_N.long() - num_hot).clamp(min=0)
    left_N, right_N = cold_N // right_W, cold_N % right_W
    left_V1PR, left_N = read_left(left, left_N)
    right_WRQ1, right_N = read_right(right, right_N)
    left_VPR, right_WRQ = left_V1PR.flatten(1, 2), _turned(right_WRQ1.flatten(2))
    (V, *_), (W, *_) = left_VPR.shape, right_WRQ.shape
    at_N = num_hot + left_N * W + right_N
    if num_hot:
        at_N = torch.where(indices_N < num_hot, indices_N, at_N)
    return ReadFactors(at_N, left_VPR, right_WRQ, num_hot + V * W)


_FACTOR = Ways(
    "factor_of_a_table", lambda new: (new(1024), [new(1, 1000, 8, 32), new(32, 1000, 8, 32)])
)


def _not_in_part(indices_N: Tensor, factor: Sequence[Tensor]) -> str | None:
    """Refuse what costs less as a whole, and narrow slices, which would be rounded twice."""
    reason = with_values(indices_N)
    if reason is not None:
        return reason
    if len(factor) == 1:
        return "it is one core"
    if factor[0].dtype.itemsize < 4:
        return "the dtype is narrower than float32"
    saved = _rows(factor) - _DEARER * indices_N.shape[0]
    if saved * _slice_size(factor) < _WORTH_IT:
        return "many of its slices are read"
    by_kernel = kernel_refuses("ttm_lookup", factor[0]) is None
    return "a kernel reads whole factors" if by_kernel else None


@_FACTOR.way("the slices that are read", _not_in_part)
def _in_slices(factor: Sequence[Tensor], numbers_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(U, left bond, columns, right bond)``, and which of these every entry reads."""
    read_U, at_N = numbers_N.unique(return_inverse=True)
    return _slices(factor, read_U), at_N


@_FACTOR.way("whole")
def _whole(factor: Sequence[Tensor], numbers_N: Tensor) -> tuple[Tensor, Tensor]:
    return _contracted(factor).transpose(0, 1), numbers_N


def _rows(factor: Sequence[Tensor]) -> int:
    return math.prod(core.shape[1] for core in factor)


def _slice_size(factor: Sequence[Tensor]) -> int:
    columns = math.prod(core.shape[2] for core in factor)
    return factor[0].shape[0] * columns * factor[-1].shape[3]


def _slices(factor: Sequence[Tensor], read_U: Tensor) -> Tensor:
    """Read a factor's slices of the given numbers, ``(U, left bond, columns, right bond)``."""
    first, last = _rows_first(_contracted(factor[:-1])), _rows_first(factor[-1])
    (V, L, P, _), (W, _, Q, R) = first.shape, last.shape
    slices, _, _ = lookup(
        read_U, first.flatten(1, 2), last.flatten(2), None, None, None, None, V * W, L * P * Q * R,
        True,
    )  # fmt: skip
    return slices.view(-1, L, P * Q, R)


def _rows_first(core: Tensor) -> Tensor:
    return core.transpose(0, 1).contiguous()


def _contracted(cores: Sequence[Tensor]) -> Tensor:
    """Contract cores to one."""
    if len(cores) == 1:
        return cores[0]
    (L, *_), (*_, R) = cores[0].shape, cores[-1].shape
    modes = [size for core in cores for size in core.shape[1:3]]
    order = [*range(1, len(modes), 2), *range(2, len(modes) + 1, 2)]
    apart = contract_chain(cores).view(L, *modes, R).permute(0, *order, len(modes) + 1)
    return apart.reshape(L, _rows(cores), -1, R)


def _turned(right_WRQ: Tensor) -> Tensor:
    """Return the right factor laid out in memory as ``(W, Q, R)``, as lookups read it."""
    return right_WRQ.mT.contiguous().mT
