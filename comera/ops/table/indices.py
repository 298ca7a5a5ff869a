"""Find places for the distinct rows of a lookup, so that each is made once and made in groups.

A row of a tensor-train table is a slice of the left factor times a slice of the right one. Entries
are sorted by right slice, then left slice: equal rows come to stand together, and rows that share
their right slice form groups, which are one product each. What is wanted of entries is a gather
from these slots, and a gradient of slots a sum over segments of the sorted entries.

Shape suffixes: N = entries, S = slots, T = groups, V and W = slices of the left and right factor.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.dispatch import is_eager, may_read_values

_MOST = 8
"""Rows of a group at most: more make no faster products, and more slots that stay empty."""

_MOST_KEY = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Slots:
    """Places for distinct rows: first the hot ones, then groups of ``group`` cold ones.

    Attributes:
        hot: ``(num_hot,)``, numbers of the hot rows that occur.
        left_S: Left slices of the cold slots; a group is filled up with slice 0.
        right_T: Right slices of the groups, rising.
        group: Cold slots of a group.
        of_sorted_N: Slot of each sorted entry.
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
        """Return the slot of each entry, in the order in which they were given."""
        return torch.empty_like(order_N).scatter_(0, order_N, self.of_sorted_N)


def sorted_rows(rows_N: Tensor, hot_rows: int, left_V: int, right_W: int) -> tuple[Tensor, Tensor]:
    """Sort the keys of rows; return them, rising, and which entry each is of.

    A hot row is its own key; behind them, row ``v * W + w`` of the train has key ``w * V + v``.
    """
    cold = rows_N.long() - hot_rows
    keys = hot_rows + cold % right_W * left_V + cold // right_W
    if hot_rows:
        keys = torch.where(cold < 0, rows_N.long(), keys)
    return _sorted(keys)


def make_slots(keys_N: Tensor, hot_rows: int, left_V: int, right_W: int) -> Slots:
    """Make slots for the distinct ones of the sorted keys."""
    first = torch.ones_like(keys_N, dtype=torch.bool)
    torch.ne(keys_N[1:], keys_N[:-1], out=first[1:])
    distinct = keys_N[first]
    num_hot = int(torch.searchsorted(distinct, hot_rows)) if hot_rows else 0
    cold = distinct[num_hot:] - hot_rows
    left, right = cold % left_V, cold // left_V
    group = _group_size(cold.shape[0], right_W)
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
    """Make ``out[k]`` the weighted sum of ``values[rows[i]]`` over all i with ``of_rows[i] == k``.

    Args:
        values: ``(*, width)``.
        rows: Integers.
        of_rows: Row of the result that each of ``rows`` belongs to, rising.
        count: Rows of the result.
        weights: One for each of ``rows``, or None for ones.
    """
    if not rows.shape[0] or not values.shape[1]:
        return values.new_zeros(count, values.shape[1])
    counts = torch.bincount(of_rows, minlength=count)
    starts = counts.cumsum(0) - counts
    return F.embedding_bag(rows, values, starts, mode="sum", per_sample_weights=weights)


def sum_by(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Make ``out[k]`` the sum of all ``values[i]`` with ``places[i] == k``, always in one order."""
    found, order = _sorted(places)
    return sum_by_sorted(values, order, found, count)


def _sorted(keys_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sort keys; return them, rising, and where each was. Equal ones keep their order."""
    count = keys_N.shape[0]
    # numpy sorts whole numbers several times as fast, so each takes its place along, if both fit.
    if keys_N.device.type != "cpu" or not count or keys_N.numpy().max() >= _MOST_KEY // count:
        found = keys_N.sort(stable=True)
        return found.values, found.indices
    packed = torch.from_numpy(np.sort((keys_N * count + torch.arange(count)).numpy()))
    values = packed // count
    return values, packed - values * count


def _group_size(rows: int, right_W: int) -> int:
    """Find the largest group that leaves at most a fifth of the slots empty."""
    group = 1
    while group < _MOST and 2 * (2 * group - 1) * right_W <= rows:
        group *= 2
    return group


def check_integers(indices: Tensor) -> None:
    """Raise ``TypeError`` where indices are no whole numbers; booleans, which mask, are none."""
    if indices.dtype == torch.bool:
        raise TypeError(
            "indices are torch.bool, and no mask selects rows of a table: give the rows' numbers, "
            "such as mask.nonzero() has them"
        )
    if indices.is_floating_point() or indices.is_complex():
        raise TypeError(f"indices are {indices.dtype}; they must be whole numbers, such as int64")


def check_range(indices: Tensor, num_embeddings: int) -> bool:
    """Check that indices are rows, where they can be read: on a CPU.

    Returns:
        Whether that is done with; in a graph that is compiled it is left to an operator.

    Raises:
        IndexError: That names the first index that is no row.
        TypeError: If they are no whole numbers; wherever they are.
    """
    check_integers(indices)
    if not may_read_values(indices) or not indices.numel():
        return is_eager()
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low >= 0 and high < num_embeddings:
        return True
    place = ((indices < 0) | (indices >= num_embeddings)).nonzero()[0].tolist()
    where = f" at {place[0] if len(place) == 1 else tuple(place)}" if place else ""
    raise IndexError(
        f"index {int(indices[tuple(place)])}{where} is out of range for an embedding of "
        f"{num_embeddings} rows (0 to {num_embeddings - 1})"
    )
