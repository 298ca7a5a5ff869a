import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from comera.ops.table.tt_embedding import ttm_to_dense
from comera.planning.machine import default_machine
from comera.planning.ways import Lookup, from_factors, torch_embedding, vanished
from comera.shapes import TTMShape
from tests.planning.running import count

CPU = default_machine("cpu")
SHAPES = [
    TTMShape((4, 3), (2, 3), (5,)),
    TTMShape((3, 2, 4), (2, 1, 3), (4, 3)),
    TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3)),
    TTMShape((2, 2, 2, 2), (1, 1, 2, 1), (1, 1, 1)),
]
INDICES = np.array([0, 3, 5, 3, 11, 0, 7])


def lookup(shape):
    distinct = len(set(INDICES.tolist()))
    return Lookup(shape, len(INDICES), distinct, shape.num_rows, shape.num_cols)


class Runner:
    """Runs the steps of a candidate on real arrays, gathers and scatters included."""

    def __init__(self, shape):
        draw = np.random.default_rng(0)
        self.shape = shape
        self.cores = [draw.standard_normal(size) for size in shape.core_shapes]
        self.gy = draw.standard_normal((len(INDICES), shape.num_cols))
        self.rows, self.inverse = np.unique(INDICES, return_inverse=True)
        flat = [core.reshape(core.shape[0], -1, core.shape[-1]) for core in self.cores]
        squeezed = [flat[0][0], *flat[1:-1], flat[-1][..., 0]]
        self.made = {f"core{k}": core for k, core in enumerate(squeezed)}
        self.multiplied = 0

    def side(self, name):
        """The row and column modes of a half: a leading A or core0, or the other one."""
        at = self.shape.split
        first = name in ("A", "core0")
        where = slice(0, at) if first else slice(at, None)
        return first, self.shape.row_modes[where], self.shape.col_modes[where]

    def number(self, name, rows):
        first, row_modes, _ = self.side(name)
        digits = np.unravel_index(rows, self.shape.row_modes)
        at = self.shape.split
        return np.ravel_multi_index(digits[:at] if first else digits[at:], row_modes)

    def apart(self, array, name):
        """``(p1 q1 p2 q2, R)`` or ``(R, p1 q1 p2 q2)`` to ``(V, P, R)`` or ``(W, R, Q)``."""
        first, rows, cols = self.side(name)
        rank = self.shape.ranks[self.shape.split - 1]
        pairs = [n for pair in zip(rows, cols, strict=True) for n in pair]
        odd, even = list(range(0, len(pairs), 2)), list(range(1, len(pairs), 2))
        high, wide = int(np.prod(rows)), int(np.prod(cols))
        if first:
            return array.reshape(*pairs, rank).transpose(*odd, *even, -1).reshape(high, wide, rank)
        array = array.reshape(rank, *pairs)
        order = [*(k + 1 for k in odd), 0, *(k + 1 for k in even)]
        return array.transpose(order).reshape(high, rank, wide)

    def together(self, array, name):
        """Undo :meth:`apart`, by following where each number goes."""
        places = self.apart(np.arange(array.size), name)
        flat = np.empty(array.size)
        flat[places.reshape(-1)] = array.reshape(-1)
        return flat

    def run(self, steps):
        for step in steps:
            if step.product is not None:
                sides = step.what.split("->")[0].split(",")
                operands = [self.operand(*pair) for pair in zip(step.reads, sides, strict=True)]
                self.multiplied += count(step.what, *operands)
                self.made[step.result] = np.einsum(step.what, *operands)
            elif step.what.startswith("gather"):
                self.gather(step)
            elif step.what.startswith("add up"):
                self.scatter(step)
            elif step.what == "rows and columns apart":
                name = step.result.removeprefix("grad(").removesuffix(")")
                move = self.together if step.result != name else self.apart
                self.made[step.result] = move(self.made[step.result], name)

    def operand(self, name, indices):
        array = self.made[name]
        if array.ndim == len(indices):
            return array
        at = self.shape.split
        sizes = self.shape.slice_sizes
        rank = self.shape.ranks[at - 1]
        if name == "grad(A)":
            return array.reshape(*sizes[:at], rank)
        assert name == "grad(B)"
        return array.reshape(rank, *sizes[at:])

    def gather(self, step):
        source = step.reads[0]
        rows = self.inverse if step.result == "y" else self.number(source, self.rows)
        self.made[step.result] = self.made[source][rows]

    def scatter(self, step):
        source = self.made[step.reads[0]]
        if step.result == "grad(rows)":
            total = np.zeros((len(self.rows), *source.shape[1:]))
            np.add.at(total, self.inverse, source)
        else:
            name = step.result.removeprefix("grad(").removesuffix(")")
            total = np.zeros_like(self.made[name])
            np.add.at(total, self.number(name, self.rows), source)
        assert step.size == total.size
        self.made[step.result] = total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_steps_give_rows_and_gradients(shape):
    asked, runner = lookup(shape), Runner(shape)
    made = from_factors(asked, CPU, "float64")
    wide = int(np.prod(shape.col_modes[: shape.split]))
    runner.made["gy"] = runner.gy.reshape(len(INDICES), wide, -1)
    runner.run(made.forward)
    y = runner.made["y"].reshape(len(INDICES), -1)
    runner.run(made.backward)

    cores = [torch.tensor(core, requires_grad=True) for core in runner.cores]
    want = ttm_to_dense(cores)[torch.tensor(INDICES)]
    want.backward(torch.tensor(runner.gy))
    np.testing.assert_allclose(y, want.detach().numpy(), atol=1e-9)
    for k, core in enumerate(cores):
        got = runner.made[f"grad(core{k})"].reshape(core.shape)
        np.testing.assert_allclose(got, core.grad.numpy(), atol=1e-9)
    assert made.operations == runner.multiplied


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_indices_and_factors_are_saved(shape):
    made = from_factors(lookup(shape), CPU, "float32")
    sizes, at = shape.slice_sizes, shape.split
    factors = shape.ranks[at - 1] * (math.prod(sizes[:at]) + math.prod(sizes[at:]))
    # An index takes two numbers; they are kept as given, and sorted with their order.
    assert made.saved_bytes == 4 * (6 * len(INDICES) + factors)


def test_repeated_rows_are_made_once():
    asked = replace(lookup(SHAPES[2]), tokens=10_000, distinct=20)
    once, each = (
        from_factors(replace(asked, distinct=distinct), CPU, "float32") for distinct in (20, 10_000)
    )
    assert once.operations < each.operations / 100
    assert once.seconds < each.seconds


def test_a_dense_table_holds_its_gradient():
    asked = Lookup(TTMShape((40, 25), (4, 2), (2,)), 10, 10)
    made = torch_embedding(asked, CPU, "float32")
    assert made.peak_bytes >= 4 * 2 * 1000 * 8
    assert (made.operations, made.saved_bytes) == (0, 8 * 10)


def test_a_vanished_table_is_zeros():
    made = vanished(Lookup(TTMShape((4, 3), (2, 3), (0,)), 10, 10, 12, 6), CPU, "float32")
    assert (made.operations, made.saved_bytes) == (0, 0)
