"""Count what products multiply, without the planner's own arithmetic."""

import math

import numpy as np


def count(equation: str, *operands: np.ndarray) -> int:
    """Multiply-adds of an einsum: the points of its joint index space, from the actual arrays."""
    sizes: dict[str, int] = {}
    for indices, array in zip(equation.split("->")[0].split(","), operands, strict=True):
        assert len(indices) == array.ndim
        for index, size in zip(indices, array.shape, strict=True):
            assert sizes.setdefault(index, size) == size
    return math.prod(sizes.values())
