"""Join of a table's halves only the slices that are read, where those are few.

A half has about as many slices as the root of the table's rows, and a batch reads no more of them
than it has entries. The slices are rows of a smaller table, whose halves are the two parts of the
chain, and are read like the rows of any table.

Shape suffixes: N = entries, U = slices that are read, V = left and W = right part of a row's
number, P and Q = left and right part of the width, R = the bond between the halves.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comera.ops.cores import merge_chain, rank_gate
from comera.ops.dispatch import Ways, with_values
from comera.ops.kernels.choose import LOOKUP, kernel_refuses
from comera.ops.table.indices import check_range
from comera.ops.table.lookup import look_up
from comera.ops.table.table_factors import merge_tables

_DEARER = 2
"""A slice joined by itself takes up to so many times as long as one that is joined with all."""

_WORTH_IT = 1 << 20
"""Entries that need not be joined: finding and gathering slices takes as long as half of them."""


class Asked(NamedTuple):
    """What is asked of one table.

    Attributes:
        indices_N: Rows to read; the first ``num_hot`` are none of the train's.
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        num_embeddings: Rows of the table; the row modes may multiply to more.
        num_hot: Rows before those of the train.
    """

    indices_N: Tensor
    cores: Sequence[Tensor]
    gates: Sequence[Tensor]
    threshold: float
    num_embeddings: int
    num_hot: int


class ReadHalves(NamedTuple):
    """What a look-up takes.

    Attributes:
        indices_N: Rows by their numbers in what follows.
        left_VPR: Left half, or the slices of it that are read.
        right_WRQ: Right half, or the slices of it that are read.
        num_embeddings: Rows that there are in all, hot ones included.
    """

    indices_N: Tensor
    left_VPR: Tensor
    right_WRQ: Tensor
    num_embeddings: int


def read_halves(asked: Asked) -> ReadHalves:
    """The halves of a table, or what a batch reads of them.

    Raises:
        IndexError: If an index is out of range (checked on the CPU, where slices are sought out).
    """
    return read_halves_of([asked])[0]


def read_halves_of(tables: Sequence[Asked]) -> list[ReadHalves]:
    """:func:`read_halves` of each table; those that kernels join are joined together."""
    in_part = [_in_part(asked) for asked in tables]
    whole = [a for a, some in zip(tables, in_part, strict=True) if some is None]
    trains = [(asked.cores, asked.gates, asked.threshold) for asked in whole]
    joined = iter(merge_tables(trains) if trains else [])
    return [
        ReadHalves(asked.indices_N, *next(joined), asked.num_embeddings) if some is None else some
        for asked, some in zip(tables, in_part, strict=True)
    ]


def _in_part(asked: Asked) -> ReadHalves | None:
    """None where both halves had better be joined as a whole."""
    indices_N, cores, gates, threshold, num_embeddings, num_hot = asked
    split = len(cores) // 2
    read_left = _HALF.choose(indices_N, cores[:split])
    read_right = _HALF.choose(indices_N, cores[split:])
    if read_left is read_right is _whole:
        return None
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
    return ReadHalves(at_N, left_VPR, right_WRQ, num_hot + V * W)


_HALF = Ways(
    "half_of_a_table", lambda new: (new(1024), [new(1, 1000, 8, 32), new(32, 1000, 8, 32)])
)


def _not_in_part(indices_N: Tensor, half: Sequence[Tensor]) -> str | None:
    """Refuse what costs less as a whole, and narrow slices, which would be rounded twice."""
    reason = with_values(indices_N)
    if reason is not None:
        return reason
    if len(half) == 1:
        return "it is one core"
    if half[0].dtype.itemsize < 4:
        return "the dtype is narrower than float32"
    saved = _rows(half) - _DEARER * indices_N.shape[0]
    if saved * _slice_size(half) < _WORTH_IT:
        return "many of its slices are read"
    return "a kernel reads whole halves" if kernel_refuses(LOOKUP, half[0]) is None else None


@_HALF.way("the slices that are read", _not_in_part)
def _in_slices(half: Sequence[Tensor], numbers_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(U, left bond, columns, right bond)``, and which of these every entry reads."""
    read_U, at_N = numbers_N.unique(return_inverse=True)
    return _slices(half, read_U), at_N


@_HALF.way("whole")
def _whole(half: Sequence[Tensor], numbers_N: Tensor) -> tuple[Tensor, Tensor]:
    return _joined(half).transpose(0, 1), numbers_N


def _rows(half: Sequence[Tensor]) -> int:
    return math.prod(core.shape[1] for core in half)


def _slice_size(half: Sequence[Tensor]) -> int:
    columns = math.prod(core.shape[2] for core in half)
    return half[0].shape[0] * columns * half[-1].shape[3]


def _slices(half: Sequence[Tensor], read_U: Tensor) -> Tensor:
    """Those with the given numbers, ``(U, left bond, columns, right bond)``."""
    first, last = _rows_first(_joined(half[:-1])), _rows_first(half[-1])
    (V, L, P, _), (W, _, Q, R) = first.shape, last.shape
    slices, _, _ = look_up(
        read_U, first.flatten(1, 2), last.flatten(2), None, None, None, None, V * W, L * P * Q * R
    )
    return slices.view(-1, L, P * Q, R)


def _rows_first(core: Tensor) -> Tensor:
    return core.transpose(0, 1).contiguous()


def _joined(cores: Sequence[Tensor]) -> Tensor:
    """As one core."""
    if len(cores) == 1:
        return cores[0]
    (L, *_), (*_, R) = cores[0].shape, cores[-1].shape
    modes = [size for core in cores for size in core.shape[1:3]]
    order = [*range(1, len(modes), 2), *range(2, len(modes) + 1, 2)]
    apart = merge_chain(cores).view(L, *modes, R).permute(0, *order, len(modes) + 1)
    return apart.reshape(L, _rows(cores), -1, R)


def _turned(right_WRQ: Tensor) -> Tensor:
    """In memory ``(W, Q, R)``, as look-ups read it."""
    return right_WRQ.mT.contiguous().mT
