import contextlib

import pytest
import torch

from comera.ops.context import static_shapes
from comera.ops.linear import feed_forward as module
from comera.ops.linear.feed_forward import (
    ACTIVATIONS,
    _feed_forward,
    _gated_hidden,
    _plainly,
    factorized_feed_forward,
    factorized_feed_forward_reference,
    gated_feed_forward,
)
from comera.ops.linear.tt_linear import Factors


def make(dtype=torch.float64, batch=(3, 5), bias=True):
    """x and the halves of two layers, 6 -> 20 -> 7, padded as ``contract_groups`` pads them."""
    x = torch.randn(*batch, 6, dtype=dtype)
    sizes = {"left1": (6, 8), "right1": (8, 20), "left2": (20, 16), "right2": (16, 7)}
    halves = {name: torch.randn(size, dtype=dtype) / 3 for name, size in sizes.items()}
    for name, rank in (("1", 5), ("2", 11)):
        halves[f"left{name}"][:, rank:] = 0
        halves[f"right{name}"][rank : -1 if bias else None] = 0
        if not bias:
            halves[f"right{name}"][rank:] = 0
    return [t.requires_grad_() for t in (x, *halves.values())]


def run(function, inputs, activation, bias=True):
    x, left1, right1, left2, right2 = inputs
    return function(x, Factors(left1, right1, bias), Factors(left2, right2, bias), activation)


def grads(y, inputs):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    found = torch.autograd.grad((y * weights).sum(), inputs)
    # What pads a left half has no meaning, and neither has its gradient.
    keep = [slice(None), slice(5), None, slice(11), None]
    return [
        g if k is None else g[:, k] if g.dim() == 2 else g for g, k in zip(found, keep, strict=True)
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("batch", [(), (3, 5), (0,), (300,)], ids=str)
@pytest.mark.parametrize("at_once", [1, 1 << 20, None], ids=["pieces", "whole", "as on a card"])
def test_output_and_gradients_match_plain_products(activation, batch, at_once, monkeypatch):
    monkeypatch.setattr(module, "_HIDDEN_NUMBERS", at_once)
    inputs = make(batch=batch)
    want = run(factorized_feed_forward_reference, inputs, activation)
    with static_shapes() if at_once is None else contextlib.nullcontext():
        got = run(factorized_feed_forward, inputs, activation)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads(got, inputs), grads(want, inputs), rtol=1e-10, atol=1e-10)


def test_without_a_bias():
    inputs = make(bias=False)
    x, left1, right1, left2, right2 = inputs
    got = run(factorized_feed_forward, inputs, "gelu", bias=False)
    want = torch.nn.functional.gelu(x @ left1 @ right1) @ left2 @ right2
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads(got, inputs), grads(want, inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_gradients(bias):
    inputs = make(bias=bias)

    def penalty(function):
        first = torch.autograd.grad(
            run(function, inputs, "gelu", bias).square().sum(), inputs, create_graph=True
        )
        # Of the rows of right halves that padding meets, none counts.
        return torch.autograd.grad(first[0].square().sum() + first[4][:11].square().sum(), inputs)

    got, want = penalty(factorized_feed_forward), penalty(factorized_feed_forward_reference)
    keep = [slice(None), slice(5), slice(None), slice(11), slice(None)]
    for g, w, k in zip(got, want, keep, strict=True):
        torch.testing.assert_close(g[..., k], w[..., k], rtol=1e-10, atol=1e-10)


def test_nothing_of_the_hidden_width_is_kept():
    inputs, kept = make(batch=(100,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        run(factorized_feed_forward, inputs, "gelu")
    assert kept
    assert (100, 20) not in kept


def test_autocast():
    inputs = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(factorized_feed_forward, inputs, "gelu")
    assert y.dtype == torch.bfloat16
    want = run(factorized_feed_forward_reference, inputs, "gelu")
    for got, exact in zip([y, *grads(y, inputs)], [want, *grads(want, inputs)], strict=True):
        error = (got - exact).abs().max() / exact.abs().max()
        assert error < 8 * torch.finfo(torch.bfloat16).eps


def test_sums_over_many_rows_are_kept_wide(monkeypatch):
    """In bfloat16, adding up the pieces in bfloat16 would lose most of them."""
    monkeypatch.setattr(module, "_HIDDEN_NUMBERS", 1)  # pieces of 64 rows
    wide = make(torch.float32, batch=(64 * 200,))
    narrow = [t.detach().bfloat16().requires_grad_() for t in wide]
    exact = [t.detach().float().requires_grad_() for t in narrow]
    for inputs in (narrow, exact):
        run(factorized_feed_forward, inputs, "relu").sum().backward()
    error = (narrow[2].grad - exact[2].grad).norm() / exact[2].grad.norm()
    assert error < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "bias"), [*((name, True) for name in ACTIVATIONS), ("gelu", False)]
)
def test_registered_soundly(bias, activation):
    x, *factors = make(torch.float32, bias=bias)
    torch.library.opcheck(_feed_forward.custom_op, (x, factors, bias, activation))


def make_gated(dtype=torch.float64, batch=(3, 5), bias=True):
    """x and the factors of three layers, 6 -> 20, 6 -> 20 -> 7, padded as they are contracted."""
    x, factors = torch.randn(*batch, 6, dtype=dtype), []
    for wide, high, rank, padded in ((6, 20, 5, 8), (6, 20, 9, 16), (20, 7, 11, 16)):
        left = torch.randn(wide, padded, dtype=dtype) / 3
        right = torch.randn(padded, high, dtype=dtype) / 3
        left[:, rank:] = 0
        right[rank : -1 if bias else None] = 0
        factors.append(Factors(left, right, bias))
    for leaf in (x, *(half for pair in factors for half in pair[:2])):
        leaf.requires_grad_()
    return x, factors


def gated_plainly(x, gate, up, down):
    return _plainly(torch.nn.functional.silu(_plainly(x, gate)) * _plainly(x, up), down)


def grads_of_gated(y, x, factors):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    leaves = [x, *(half for pair in factors for half in pair[:2])]
    found = torch.autograd.grad((y * weights).sum(), leaves)
    # What pads a left half has no meaning, and neither has its gradient.
    keep = {1: 5, 3: 9, 5: 11}
    return [g[:, : keep[n]] if n in keep else g for n, g in enumerate(found)]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("batch", [(), (3, 5), (0,), (300,)], ids=str)
@pytest.mark.parametrize("at_once", [1, 1 << 20, None], ids=["pieces", "whole", "as on a card"])
def test_gated_output_and_gradients_match_plain_products(bias, batch, at_once, monkeypatch):
    monkeypatch.setattr(module, "_HIDDEN_NUMBERS", at_once)
    x, factors = make_gated(batch=batch, bias=bias)
    want = gated_plainly(x, *factors)
    with static_shapes() if at_once is None else contextlib.nullcontext():
        got = gated_feed_forward(x, *factors)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            grads_of_gated(got, x, factors),
            grads_of_gated(want, x, factors),
            rtol=1e-10,
            atol=1e-10,
        )


def test_nothing_of_the_hidden_width_is_kept_of_gated_ones():
    (x, factors), kept = make_gated(batch=(100,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        gated_feed_forward(x, *factors)
    assert kept
    assert (100, 20) not in kept


def test_autocast_of_gated_ones():
    x, factors = make_gated(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = gated_feed_forward(x, *factors)
    assert y.dtype == torch.bfloat16
    want = gated_plainly(x, *factors)
    pairs = zip(
        [y, *grads_of_gated(y, x, factors)], [want, *grads_of_gated(want, x, factors)], strict=True
    )
    for got, exact in pairs:
        error = (got - exact).abs().max() / exact.abs().max()
        assert error < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
def test_gated_ones_are_registered_soundly():
    inputs = [torch.randn(size) for size in ((9, 8), (9, 16), (8, 20), (16, 20), (20, 8))]
    torch.library.opcheck(_gated_hidden.custom_op, ([t.requires_grad_() for t in inputs],))
