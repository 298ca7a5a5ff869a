from itertools import pairwise

import pytest
import tensorly
import torch

from comera.ops.cores import contract_chain, open_gate, rank_gate

CHAINS = {  # bonds, then the modes of each core
    "one core": ((1, 4), [(3,)]),
    "one core between bonds": ((2, 4), [(3,)]),
    "from the left": ((1, 2, 5), [(3,), (4,)]),
    "from the right": ((5, 2, 1), [(4,), (3,)]),
    "rank one": ((1, 1, 1, 1), [(3,), (4,), (2,)]),
    "four cores": ((1, 3, 4, 2, 3), [(2,), (3,), (2,), (2,)]),
    "whole train": ((1, 3, 4, 1), [(3,), (2,), (4,)]),
    "paired modes": ((1, 3, 4, 5), [(2, 3), (2, 2), (3, 1)]),
}
GATES = ["none", "inner", "all"]


def make(chain, gated="none", dtype=torch.float64):
    bonds, modes = CHAINS[chain]
    cores = [
        torch.randn(left, *mode, right, dtype=dtype)
        for (left, right), mode in zip(pairwise(bonds), modes, strict=True)
    ]
    wide = torch.promote_types(dtype, torch.float32)
    count = {"none": 0, "inner": len(cores) - 1, "all": len(cores)}[gated]
    gates = [0.5 + torch.rand(core.shape[-1], dtype=wide) for core in cores[:count]]
    for gate in gates:
        gate[1:2] = 0.001  # pruned, wherever there is a second rank
    return [t.requires_grad_() for t in cores], [t.requires_grad_() for t in gates]


def grads(merged, cores, gates):
    weights = torch.linspace(-1, 1, merged.numel(), dtype=merged.dtype).reshape(merged.shape)
    return torch.autograd.grad((merged * weights).sum(), [*cores, *gates])


def opened(cores, gates, threshold=0.01):
    pairs = zip(cores, gates, strict=False)
    return [*(rank_gate(core, gate, threshold) for core, gate in pairs), *cores[len(gates) :]]


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("chain", CHAINS)
def test_value_and_gradients_match_tensorly(chain, gated):
    cores, gates = make(chain, gated)
    got = contract_chain(opened(cores, gates))
    trains = [core.flatten(1, -2) for core in cores]
    for k, gate in enumerate(gates):
        trains[k] = trains[k] @ torch.diag(gate * (gate > 0.01))
    first, last = got.shape[0], got.shape[-1]
    ends = torch.eye(first, dtype=got.dtype)[None], torch.eye(last, dtype=got.dtype)[..., None]
    with tensorly.backend_context("pytorch"):
        want = tensorly.tt_to_tensor([ends[0], *trains, ends[1]]).reshape(got.shape)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        grads(got, cores, gates), grads(want, cores, gates), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_cores_are_rounded_once(dtype):
    cores, _ = make("four cores", "all", dtype)
    got = contract_chain(cores)
    assert torch.equal(got, contract_chain([core.detach().float() for core in cores]).to(dtype))
    got.sum().backward()
    assert all(core.grad.dtype == dtype for core in cores)


def test_a_train_through_an_empty_bond_is_zero():
    merged = contract_chain([torch.ones(1, 2, 0), torch.ones(0, 3, 4)])
    assert torch.equal(merged, torch.zeros(1, 6, 4))


CORES = [(1, 8, 12), (12, 12, 30), (30, 7, 1), (3, 1, 5), (2, 3, 4, 5), (2, 3, 0)]


def rank_gate_reference(core, gate, threshold):
    return core * torch.where(gate > threshold, gate, 0)


def make_gate(shape, device, dtype=torch.float32):
    core = torch.randn(shape, device=device, dtype=dtype)
    gate = 0.1 + torch.rand(
        shape[-1], device=device, dtype=torch.promote_types(dtype, torch.float32)
    )
    gate[:1] = 0.001  # a pruned rank
    return core, gate


@pytest.mark.parametrize("shape", CORES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
def test_a_gate_matches_the_reference(shape, dtype, rtol, device):
    core, gate = make_gate(shape, device, dtype)
    want = rank_gate_reference(core.double(), gate.double(), 0.01)
    got = rank_gate(core, gate, 0.01)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", [(1, 8, 12), (3, 7, 1), (2, 3, 4, 5)], ids=str)
def test_gradients_of_a_gate(shape, device):
    core, gate = make_gate(shape, device, torch.float64)
    inputs = (core.requires_grad_(), gate.requires_grad_(), 0.01)
    assert torch.autograd.gradcheck(rank_gate, inputs)
    assert torch.autograd.gradgradcheck(rank_gate, inputs)


def test_gradients_of_a_gate_equal_those_of_the_reference(device):
    core, gate = make_gate((4, 3, 5), device)
    got = torch.autograd.grad(
        rank_gate(core.requires_grad_(), gate.requires_grad_(), 0.01).square().sum(), (core, gate)
    )
    want = torch.autograd.grad(rank_gate_reference(core, gate, 0.01).square().sum(), (core, gate))
    torch.testing.assert_close(got, want)
    assert got[1][0] == 0
    assert got[0][..., 0].eq(0).all()


def test_a_narrow_core_gives_its_gate_a_wide_gradient(device):
    core, gate = make_gate((4, 3, 5), device, torch.bfloat16)
    rank_gate(core.requires_grad_(), gate.requires_grad_(), 0.01).sum().backward()
    assert (core.grad.dtype, gate.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(gate.grad[1:], core.detach().float().sum((0, 1))[1:])


@pytest.mark.parametrize(
    ("value", "passes"), [(0.01, False), (0.010001, True), (-3.0, False), (0.0, False)]
)
def test_the_threshold_itself_is_pruned(value, passes, device):
    gate = torch.tensor([value], device=device)
    assert bool(open_gate(gate, 0.01).ne(0)) is passes
    got = rank_gate(torch.ones(2, 3, 1, device=device), gate, 0.01)
    assert bool(got.ne(0).all()) is passes
