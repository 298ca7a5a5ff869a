"""A layer by itself: which gates it takes for open without asking autograd."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from comera.ops.cores import rank_gate_reference
from comera.ops.linear.tt_linear import plain_linear, tt_to_dense

SIZES = (1, 2, 3), (3, 2, 2), (2, 3, 2), (2, 2, 1)
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
THRESHOLD = 0.07
CLOSED = float(torch.tensor(THRESHOLD))  # which is above it, but in the dtype of the gates
BESIDE = float(torch.nextafter(torch.tensor(THRESHOLD), torch.tensor(1.0)))


def layer_of(gate=1.0, seed=0):
    """Batch, cores and gates, of which one has this number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, generator=generator)
    cores = [torch.randn(size, generator=generator) for size in SIZES]
    gates = [torch.ones(size[2]) for size in SIZES[:-1]]
    gates[1][0] = gate
    return [tensor.requires_grad_() for tensor in (x, *cores, *gates)]


def plainly(x, *params):
    return plain_linear(x, params[:4], params[4:], None, 2, THRESHOLD, 4, 6)


def densely(x, *params):
    pairs = zip(params[:3], params[4:], strict=True)
    gated = [rank_gate_reference(core, gate, THRESHOLD) for core, gate in pairs]
    return x @ tt_to_dense([*gated, params[3]], 2).T


@pytest.mark.parametrize("gate", [1.0, 0.1, BESIDE, CLOSED, 0.0, -1.0, math.nan])
def test_every_gate_is_what_it_is_for_the_reference(gate):
    found, wanted = layer_of(gate), layer_of(gate)
    out, reference = plainly(*found), densely(*wanted)
    torch.testing.assert_close(out, reference, **CLOSE)
    out.square().sum().backward()
    reference.square().sum().backward()
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **CLOSE)


@pytest.mark.parametrize(("gate", "asked"), [(1.0, 0), (0.1, 3)])
def test_autograd_is_asked_only_where_a_gate_may_be_closed(gate, asked):
    with torch.profiler.profile(acc_events=True) as profile:
        plainly(*layer_of(gate))
    assert sum(event.name == "aten::threshold" for event in profile.events()) == asked


def test_what_is_recorded_closes_gates_that_were_open_then():
    recorded = make_fx(plainly)(*layer_of())
    torch.testing.assert_close(recorded(*layer_of(0.0)), densely(*layer_of(0.0)))


def test_gradients_of_a_transformed_layer():
    x, *params = layer_of(0.0)
    found = torch.func.grad(lambda core: plainly(x, core, *params[1:]).sum())(params[0])
    (wanted,) = torch.autograd.grad(densely(x, *params).sum(), params[0])
    torch.testing.assert_close(found, wanted)
