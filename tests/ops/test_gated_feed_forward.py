import contextlib

import pytest
import torch

from comera.ops.context import static_shapes
from comera.ops.factors import Factors
from comera.ops.linear import feed_forward
from comera.ops.linear.gated_feed_forward import (
    _gated_hidden,
    gated_feed_forward,
    gated_feed_forward_reference,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(dtype=torch.float64, batch=(3, 5), bias=True):
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


def grads(y, x, factors):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    leaves = [x, *(half for pair in factors for half in pair[:2])]
    found = torch.autograd.grad((y * weights).sum(), leaves)
    # What pads a left half has no meaning, and neither has its gradient.
    keep = {1: 5, 3: 9, 5: 11}
    return [g[:, : keep[n]] if n in keep else g for n, g in enumerate(found)]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("batch", [(), (3, 5), (0,), (300,)], ids=str)
@pytest.mark.parametrize("at_once", [1, 1 << 20, None], ids=["pieces", "whole", "as on a card"])
def test_output_and_gradients_match_plain_products(bias, batch, at_once, monkeypatch):
    monkeypatch.setattr(feed_forward, "_HIDDEN_NUMBERS", at_once)
    x, factors = make(batch=batch, bias=bias)
    want = gated_feed_forward_reference(x, *factors)
    with static_shapes() if at_once is None else contextlib.nullcontext():
        got = gated_feed_forward(x, *factors)
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(grads(got, x, factors), grads(want, x, factors), **CLOSE)


def test_nothing_of_the_hidden_width_is_kept():
    (x, factors), kept = make(batch=(100,)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        gated_feed_forward(x, *factors)
    assert kept
    assert (100, 20) not in kept


def test_autocast():
    x, factors = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = gated_feed_forward(x, *factors)
    assert y.dtype == torch.bfloat16
    want = gated_feed_forward_reference(x, *factors)
    pairs = zip([y, *grads(y, x, factors)], [want, *grads(want, x, factors)], strict=True)
    for got, exact in pairs:
        error = (got - exact).abs().max() / exact.abs().max()
        assert error < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
def test_registered_soundly():
    inputs = [torch.randn(size) for size in ((9, 8), (9, 16), (8, 20), (16, 20), (20, 8))]
    torch.library.opcheck(_gated_hidden.custom_op, [t.requires_grad_() for t in inputs])
