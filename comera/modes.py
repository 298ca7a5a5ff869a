"""Factors of widths and row counts for the cores of a tensor train. Pure Python, without torch."""

import itertools
import math
from collections.abc import Iterator

_GOOD_BALANCE = 1.25
"""An exact factorisation is kept when its modes sum to at most this times the ideal sum."""
_LEFT_SLICES = 8
"""Left slices of a table for each right one. Rows of one right slice are made in groups: of few
right slices the groups of a batch fill, and what is gathered row by row, left slices, is narrow."""
_MOST_RIGHT_SLICES = 2000
"""Right slices of a table at most, however large it is: of the left factor, which then has more,
only the slices that a batch reads are contracted."""
_LEFT_COLS = 1 / 3
"""Exponent of a table's width that the left factor gets."""


def balanced_modes(width: int, order: int) -> tuple[int, ...]:
    """Split ``width`` into ``order`` factors as equal as possible, smallest first.

    A width without a good factorisation is rounded up to the next one that has it: the result
    then multiplies to a little more than ``width``.

    >>> balanced_modes(768, 3)
    (8, 8, 12)
    >>> balanced_modes(30522, 4)
    (12, 13, 14, 14)

    Raises:
        ValueError: If ``width`` or ``order`` is below one.
    """
    if width < 1 or order < 1:
        raise ValueError(f"cannot split a width of {width} into {order} modes")
    ideal_sum = order * width ** (1 / order)
    exact = min(_factorisations(width, order), key=sum)
    if sum(exact) <= _GOOD_BALANCE * ideal_sum:
        return exact

    def cost(modes: tuple[int, ...]) -> float:
        return sum(modes) / ideal_sum * (math.prod(modes) / width) ** 2

    return min((exact, *_roundings(width, order)), key=cost)


def order_for(width: int, order: int) -> int:
    """Return fewer modes for a narrow side: splitting 10 into 1 x 2 x 5 saves nothing."""
    if order < 1:
        raise ValueError(f"order={order} must be at least 1")
    return min(order, max(1, int(math.log2(max(2, width)) / 2)))


def table_modes(rows: int, width: int, order: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose row and column modes of a table for fast lookups, the large ones at the ends."""
    left, right = order // 2, order - order // 2
    right_slices = min(max(1, round(math.sqrt(rows / _LEFT_SLICES))), _MOST_RIGHT_SLICES)
    right_rows = balanced_modes(right_slices, right)
    left_rows = balanced_modes(-(-rows // math.prod(right_rows)), left)
    # The left columns stand in the first core alone, where the bond beside them is narrow.
    wanted = width**_LEFT_COLS
    exact = (n for n in range(1, width + 1) if width % n == 0)
    left_cols = min(exact, key=lambda n: abs(math.log(n / wanted)))
    if not 0.5 <= left_cols / wanted <= 2:  # no good factor
        left_cols = round(wanted)
    right_cols = balanced_modes(-(-width // left_cols), right)
    return (
        _tightened((*left_rows[::-1], *right_rows), rows),
        _tightened((left_cols, *(1,) * (left - 1), *right_cols), width),
    )


def _factorisations(width: int, order: int, smallest: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``width`` as ``order`` non-decreasing factors."""
    if order == 1:
        yield (width,)
        return
    most = round(width ** (1 / order)) + 1
    for factor in range(smallest, most + 1):
        if width % factor == 0 and factor**order <= width:
            for rest in _factorisations(width // factor, order - 1, factor):
                yield (factor, *rest)


def _roundings(width: int, order: int) -> Iterator[tuple[int, ...]]:
    """Yield modes near the ``order``-th root whose product is at least ``width``."""
    root = width ** (1 / order)
    near = range(max(1, math.floor(root) - 3), math.ceil(root) + 4)
    for head in itertools.combinations_with_replacement(near, order - 1):
        yield tuple(sorted((*head, -(-width // math.prod(head)))))


def _tightened(modes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Make modes smaller where a smaller one still holds the width."""
    for k, mode in enumerate(modes):
        needed = max(1, -(-width // (math.prod(modes) // mode)))
        if needed < mode:
            return _tightened((*modes[:k], needed, *modes[k + 1 :]), width)
    return modes
