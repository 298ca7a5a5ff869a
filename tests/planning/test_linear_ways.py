import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from comera.planning.candidate import Step, candidate
from comera.planning.machine import default_machine
from comera.planning.ways import Layer, factorized, reconstructed, torch_linear, vanished
from comera.shapes import TTShape
from tests.planning.running import count

CPU = default_machine("cpu")
SHAPES = [
    TTShape((4,), (3,), (2,)),
    TTShape((1,), (1,), (1,)),
    TTShape((6,), (3, 2), (4, 2)),
    TTShape((2, 3, 4), (4, 3, 2), (2, 5, 6, 5, 2)),
    TTShape((2, 3, 4, 2), (5, 2), (2, 3, 1, 3, 2)),
    TTShape((2, 2, 2, 2), (2, 2, 2, 2), (2, 4, 8, 9, 8, 4, 2)),
]
STRATEGIES = {"factorized": factorized, "reconstructed": reconstructed}


def layers(shape):
    yield Layer(shape, 5, shape.in_width, shape.out_width, bias=False)
    yield Layer(shape, 5, shape.in_width, shape.out_width)
    if shape.in_width > 2 and shape.out_width > 2:
        yield Layer(shape, 5, shape.in_width - 1, shape.out_width - 2)


class Runner:
    """Runs the steps of a candidate on real arrays, passes included, and keeps what it makes."""

    def __init__(self, layer, draw):
        self.layer, self.shape = layer, layer.shape
        tokens = layer.tokens
        self.x = draw.standard_normal((tokens, layer.in_features))
        self.gy = draw.standard_normal((tokens, layer.out_features))
        self.bias = draw.standard_normal(layer.out_features) if layer.bias else None
        self.cores = [draw.standard_normal(size) for size in self.shape.core_shapes]
        squeezed = [self.cores[0][0], *self.cores[1:-1], self.cores[-1][..., 0]]
        self.made = {f"core{k}": core for k, core in enumerate(squeezed)}
        self.made |= {"x": self.x, "gy": self.gy}
        self.multiplied = 0

    def run(self, steps):
        for step in steps:
            if step.product is not None:
                operands = [self._operand(name, step) for name in step.reads]
                self.multiplied += count(step.what, *operands)
                self.made[step.result] = np.einsum(step.what, *operands)
            else:
                self._pass(step)

    def _operand(self, name, step):
        """The gradient of a half as its chain takes it: on modes, the bond not padded."""
        array, indices = self.made[name], step.what.split("->")[0].split(",")
        wanted = indices[step.reads.index(name)]
        if name in ("grad(A)", "grad(B)") and array.ndim < len(wanted):
            rank = self.shape.ranks[self.shape.split - 1]
            left = name == "grad(A)"
            modes = self.shape.in_modes if left else self.shape.out_modes
            full = np.zeros((math.prod(modes), rank))
            half = array if left else array.T
            full[: len(half)] = half[:, :rank]
            array = (full if left else full.T).reshape(
                *((*modes, rank) if left else (rank, *modes))
            )
        return array

    def _pass(self, step):
        made, layer = self.made, self.layer
        rank = self.shape.ranks[self.shape.split - 1]
        if step.what.startswith("bond"):
            half = made[step.reads[0]]
            if step.result == "A":
                padded = np.zeros((layer.in_features, layer.bond))
                padded[:, :rank] = half.reshape(-1, rank)[: layer.in_features]
            else:
                padded = np.zeros((layer.bond, layer.out_features))
                padded[:rank] = half.reshape(rank, -1)[:, : layer.out_features]
                if self.bias is not None:
                    padded[-1] = self.bias
            made[step.result] = padded
            assert step.size == padded.size
        elif step.what == "ones for the bias":
            made["t"][:, -1] = 1
        elif step.result == "grad(bias)":
            made["grad(bias)"] = self.gy.sum(0)

    def result(self, name, width):
        return self.made[name].reshape(self.layer.tokens, -1)[:, :width]

    def by_autograd(self):
        leaf = [torch.tensor(c, requires_grad=True) for c in self.cores]
        x = torch.tensor(self.x, requires_grad=True)
        full = leaf[0]
        for core in leaf[1:]:
            full = torch.tensordot(full, core, 1)
        weight = full.reshape(self.shape.in_width, self.shape.out_width)
        weight = weight[: self.layer.in_features, : self.layer.out_features]
        bias = None
        y = x @ weight
        if self.bias is not None:
            bias = torch.tensor(self.bias, requires_grad=True)
            y = y + bias
        y.backward(torch.tensor(self.gy))
        return y.detach().numpy(), x.grad.numpy(), [c.grad.numpy() for c in leaf], bias


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_strategy_gives_forward_and_gradients(shape, name):
    for layer in layers(shape):
        made = STRATEGIES[name](layer, CPU, "float64")
        runner = Runner(layer, np.random.default_rng(0))
        runner.run(made.forward)
        y = runner.result("y", layer.out_features)
        if layer.bias and name == "reconstructed":
            y = y + runner.bias  # part of the product's own call
        runner.run(made.backward)
        want_y, want_x, want_cores, bias = runner.by_autograd()
        np.testing.assert_allclose(y, want_y, atol=1e-9)
        np.testing.assert_allclose(runner.result("grad(x)", layer.in_features), want_x, atol=1e-9)
        for k, want in enumerate(want_cores):
            got = runner.made[f"grad(core{k})"]
            if len(layer_side(shape, k)) == 1:
                got = cut(got, shape, k)
            np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-9)
        if bias is not None:
            whole = runner.made.get("grad(bias)")
            if whole is None:  # the last row of the right half's gradient
                right = f"core{shape.split}" if len(shape.out_modes) == 1 else "B"
                whole = runner.made[f"grad({right})"][-1]
            np.testing.assert_allclose(whole, bias.grad.numpy(), atol=1e-9)
        assert made.operations == runner.multiplied


def layer_side(shape, k):
    return shape.in_modes if k < shape.split else shape.out_modes


def cut(got, shape, k):
    """The gradient of a half of one core: the bond not padded, zeros where the width is."""
    rank = shape.ranks[shape.split - 1]
    if k == 0:
        full = np.zeros((shape.in_width, rank))
        full[: len(got)] = got[:, :rank]
    else:
        full = np.zeros((rank, shape.out_width))
        full[:, : got.shape[1]] = got[:rank]
    return full


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_saved_is_input_product_with_the_left_factor_and_factors(shape):
    layer = Layer(shape, 50, shape.in_width, shape.out_width, bias=False)
    halves = layer.bond * (layer.in_features + layer.out_features)
    thin = 50 * (layer.in_features + layer.bond)
    assert factorized(layer, CPU, "float32").saved_bytes == 4 * (thin + halves)
    weight = layer.in_features * layer.out_features
    saved = reconstructed(layer, CPU, "float64").saved_bytes
    assert saved == 8 * (50 * layer.in_features + halves + weight)
    dense = torch_linear(layer, CPU, "float32")
    assert dense.saved_bytes == 4 * 50 * layer.in_features
    assert dense.operations == 3 * 50 * weight


def test_peak_memory_of_a_dense_layer():
    layer = Layer(TTShape((8,), (4,), (2,)), 100, 8, 4)
    x, y, weight, bias = 800, 400, 32, 4
    made = torch_linear(layer, CPU, "float32")
    held = x + y + x + weight  # x, gy and their products, before x can go
    assert made.peak_bytes == 4 * (weight + bias + held)


def test_layers_that_join_their_cores_together_share_the_calls():
    layer = Layer(SHAPES[3], 50, 24, 24)
    alone, shared = (factorized(replace(layer, together=n), CPU, "float32") for n in (1, 10))
    assert shared.operations == alone.operations
    assert shared.peak_bytes == alone.peak_bytes
    assert shared.seconds < 0.5 * alone.seconds


def test_a_vanished_layer_is_its_bias():
    layer = Layer(TTShape((8, 2), (4,), (0, 0)), 100, 16, 4)
    made = vanished(layer, CPU, "float32")
    assert made.operations == 0
    assert made.seconds < torch_linear(layer, CPU, "float32").seconds + 1e-5
    assert [step.result for step in made.backward] == ["grad(x)", "grad(bias)"]


def test_what_a_step_rearranges_is_held_beside_its_result():
    layer, machine = Layer(TTShape.fit(8, 8, rank=2), 4), default_machine("cpu")
    for copied in (0, 1000):
        step = Step("y", ("x",), "turned around", 32, copied=copied)
        made = candidate("one step", layer, machine, "float32", [step], [], {})
        assert made.peak_bytes == 4 * (4 * 8 + 32 + copied)
        back = candidate("back", layer, machine, "float32", [], [replace(step, reads=("gy",))], {})
        assert back.peak_bytes == 4 * (4 * 8 + 32 + copied)
