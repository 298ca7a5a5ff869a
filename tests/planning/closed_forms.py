"""Work and memory of a layer in closed form, which the planner's lists of steps are held to.

Work is counted in multiply-adds, memory in numbers kept for the backward pass. The orders
of contraction are those of ``comera.ops``: half-chains joined first, then two thin products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from comera.shapes import TTMShape, TTShape, padded_rank


@dataclass(frozen=True)
class Cost:
    """Work and memory of one layer at a stated batch.

    Args:
        forward: Multiply-adds of the forward pass.
        backward: Multiply-adds of the backward pass, for the input and every parameter.
        saved: Numbers that must be kept between the two, parameters not counted.
    """

    forward: int
    backward: int
    saved: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def dense_linear_cost(in_features: int, out_features: int, tokens: int) -> Cost:
    product = tokens * in_features * out_features
    return Cost(product, 2 * product, tokens * in_features)


def tt_linear_cost(shape: TTShape, tokens: int, ranks: Sequence[int] | None = None) -> Cost:
    """Cost of ``comera.ops.linear.tt_linear`` on ``tokens`` rows, at other ranks if given.

    What pads the bond between the halves takes memory, but is not counted as work.
    """
    ranks = shape.ranks if ranks is None else tuple(ranks)
    middle = ranks[shape.split - 1]
    thin = tokens * middle * (shape.in_width + shape.out_width)
    merge = _merge_work(shape.slice_sizes, ranks, shape.split)
    bond = padded_rank(middle, bias=False)
    saved = tokens * (shape.in_width + bond) + bond * (shape.in_width + shape.out_width)
    return Cost(thin + merge, 2 * (thin + merge), saved)


def dense_embedding_cost(tokens: int) -> Cost:
    """A gather and its scatter: no products, and only the indices are kept."""
    return Cost(0, 0, tokens)


def tt_embedding_cost(shape: TTMShape, tokens: int, ranks: Sequence[int] | None = None) -> Cost:
    """Cost of ``comera.ops.table.tt_embedding`` on ``tokens`` indices that are all different."""
    ranks = shape.ranks if ranks is None else tuple(ranks)
    middle = ranks[shape.split - 1]
    pairs = tokens * middle * shape.num_cols
    merge = _merge_work(shape.slice_sizes, ranks, shape.split)
    sizes = shape.slice_sizes
    halves = middle * (math.prod(sizes[: shape.split]) + math.prod(sizes[shape.split :]))
    return Cost(pairs + merge, 2 * (pairs + merge), tokens + halves)


def _merge_work(sizes: Sequence[int], ranks: Sequence[int], split: int) -> int:
    """Multiply-adds of joining the cores of each half, outermost core first."""
    bonds = (1, *ranks, 1)
    work, rows = 0, sizes[0]
    for k in range(1, split):
        work += rows * bonds[k] * sizes[k] * bonds[k + 1]
        rows *= sizes[k]
    rows = sizes[-1]
    for k in range(len(sizes) - 2, split - 1, -1):
        work += rows * bonds[k + 1] * sizes[k] * bonds[k]
        rows *= sizes[k]
    return work
