"""Make of a table's factors only the slices that are read, where those are few.

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

from comera.ops.cores import contract_chain, rank_gate
from comera.ops.dispatch import Ways, with_values
from comera.ops.kernels.choose import kernel_refuses
from comera.ops.table.indices import check_range
from comera.ops.table.lookup import lookup
from comera.ops.table.table_factors import contract_tables

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
