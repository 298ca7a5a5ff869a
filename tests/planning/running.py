"""Run steps in numpy, and count what they multiply, without the planner's own arithmetic."""

import itertools
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


def nested_loops(equation: str, one: np.ndarray, two: np.ndarray) -> tuple[np.ndarray, int]:
    """The einsum by one Python loop a point, counting the multiplications one by one."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    sizes = dict(zip(left + right, one.shape + two.shape, strict=True))
    result = np.zeros([sizes[i] for i in output])
    multiplied = 0
    for point in itertools.product(*map(range, sizes.values())):
        at = dict(zip(sizes, point, strict=True))
        product = one[tuple(at[i] for i in left)] * two[tuple(at[i] for i in right)]
        result[tuple(at[i] for i in output)] += product
        multiplied += 1
    return result, multiplied


def run(steps, tensors, *, literally=False):
    """Execute products in order into ``tensors``; returns the multiply-adds actually made."""
    total = 0
    for step in steps:
        operands = [tensors[name] for name in step.reads]
        if literally:
            result, made = nested_loops(step.what, *operands)
        else:
            result, made = np.einsum(step.what, *operands), count(step.what, *operands)
        assert step.operations == made, step
        assert step.size == result.size, step
        assert step.moved == result.size + sum(array.size for array in operands), step
        tensors[step.result] = result
        total += made
    return total


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


def random_tensors(network, seed=0):
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal([network.sizes[i] for i in indices])
        for name, indices in network.tensors.items()
    }
