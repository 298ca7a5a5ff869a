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


def cheapest(network) -> int:
    """The fewest multiply-adds of any contraction tree of an open network, by dynamic programming
    over all subsets of its tensors and all their splits."""
    names = list(network.tensors)
    everything = (1 << len(names)) - 1

    def held(subset):
        return {i for k, n in enumerate(names) if subset >> k & 1 for i in network.tensors[n]}

    kept = {
        s: held(s) & (held(everything ^ s) | set(network.output)) for s in range(1, everything + 1)
    }
    best = {1 << k: 0 for k in range(len(names))}
    for subset in sorted(range(1, everything + 1), key=int.bit_count):
        if subset in best:
            continue
        lowest, part, least = subset & -subset, (subset - 1) & subset, math.inf
        while part:
            if part & lowest:
                joint = kept[part] | kept[subset ^ part]
                cost = math.prod(network.sizes[i] for i in joint)
                least = min(least, best[part] + best[subset ^ part] + cost)
            part = (part - 1) & subset
        best[subset] = least
    return best[everything]
