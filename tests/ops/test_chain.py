from itertools import pairwise

import pytest
import tensorly
import torch

from comera.ops.chain import merge_chain, merge_chain_reference

CHAINS = {  # bonds, then the modes of each core
    "one core": ((1, 4), [(3,)]),
    "one core between bonds": ((2, 4), [(3,)]),
    "from the left": ((1, 2, 5), [(3,), (4,)]),
    "from the right": ((5, 2, 1), [(4,), (3,)]),
    "rank one": ((1, 1, 1, 1), [(3,), (4,), (2,)]),
    "four cores": ((1, 3, 4, 2, 3), [(2,), (3,), (2,), (2,)]),
    "whole train": ((1, 3, 4, 1), [(3,), (2,), (4,)]),
    "paired modes": ((1, 3, 4, 5), [(2, 3), (2, 2), (3, 1)]),
    "vanished": ((1, 0, 0), [(2,), (3,)]),
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


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("chain", CHAINS)
def test_value_and_gradients_match_the_reference(chain, gated):
    cores, gates = make(chain, gated)
    got, want = merge_chain(cores, gates, 0.01), merge_chain_reference(cores, gates, 0.01)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        grads(got, cores, gates), grads(want, cores, gates), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("chain", ["rank one", "whole train"])
def test_value_and_gradients_match_tensorly(chain):
    cores, _ = make(chain)
    got = merge_chain(cores, [], 0.0)
    with tensorly.backend_context("pytorch"):
        want = tensorly.tt_to_tensor(cores).reshape(got.shape)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        grads(got, cores, []), grads(want, cores, []), rtol=1e-10, atol=1e-10
    )
    assert tensorly.get_backend() == "numpy"


@pytest.mark.parametrize("chain", ["from the left", "from the right"])
def test_gradients_can_be_differentiated_again(chain):
    cores, gates = make(chain, "inner")

    def merge(*tensors):
        return merge_chain(list(tensors[: len(cores)]), list(tensors[len(cores) :]), 0.01)

    assert torch.autograd.gradcheck(merge, (*cores, *gates))
    assert torch.autograd.gradgradcheck(merge, (*cores, *gates))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_cores_are_rounded_once(dtype):
    cores, gates = make("four cores", "all", dtype)
    wide = [core.detach().float() for core in cores]
    got = merge_chain(cores, gates, 0.01)
    assert torch.equal(got, merge_chain_reference(wide, gates, 0.01).to(dtype))
    got.sum().backward()
    assert all(core.grad.dtype == dtype for core in cores)
    assert all(gate.grad.dtype == torch.float32 for gate in gates)


def test_the_result_is_a_new_tensor_even_of_one_core():
    (core,), _ = make("one core")
    assert merge_chain([core], [], 0.0).data_ptr() != core.data_ptr()


@pytest.mark.parametrize("gated", ["none", "all"])
@pytest.mark.parametrize("chain", ["one core", "four cores", "paired modes"])
def test_registered_soundly(chain, gated):
    cores, gates = make(chain, gated, torch.float32)
    torch.library.opcheck(merge_chain.custom_op, (cores, gates, 0.01))
