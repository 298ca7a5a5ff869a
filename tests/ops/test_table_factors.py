import pytest
import torch

from comera.ops.cores import rank_gate_reference
from comera.ops.table.tt_embedding import contract_table
from comera.shapes import TTMShape

SHAPES = {
    "2 cores": TTMShape((4, 3), (2, 3), (5,)),
    "3 cores": TTMShape((3, 2, 4), (2, 1, 3), (4, 3)),
    "4 cores": TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3)),
    "5 cores": TTMShape((2, 3, 2, 2, 3), (1, 2, 2, 2, 1), (2, 4, 5, 3)),
    "rank one": TTMShape((4, 3), (2, 3), (1,)),
    "no columns": TTMShape((4, 3), (1, 1), (2,)),
    "vanished": TTMShape((2, 3, 2), (2, 2, 2), (0, 0)),
}


def make(name, gated, dtype=torch.float64):
    shape = SHAPES[name]
    cores = [torch.randn(size, dtype=dtype) for size in shape.core_shapes]
    wide = torch.promote_types(dtype, torch.float32)
    gates = [0.5 + torch.rand(rank, dtype=wide) for rank in shape.ranks] if gated else []
    for gate in gates:
        gate[1:2] = 0.001  # pruned, wherever there is a second rank
    return [t.requires_grad_() for t in cores], [t.requires_grad_() for t in gates]


def reference(cores, gates, threshold):
    """One core after the other, rows and columns of each half kept apart all the way."""
    gated = [rank_gate_reference(c, g, threshold) for c, g in zip(cores, gates, strict=False)]
    gated += cores[len(gates) :]
    split = len(cores) // 2
    left = torch.ones(1, 1, 1, dtype=cores[0].dtype)
    for core in gated[:split]:
        left = torch.einsum("vpr,rnms->vnpms", left, core).flatten(2, 3).flatten(0, 1)
    right = torch.ones(1, 1, 1, dtype=cores[0].dtype)
    for core in reversed(gated[split:]):
        right = torch.einsum("rnms,wsq->nwrmq", core, right).flatten(3).flatten(0, 1)
    return left, right


def grads(halves, cores, gates):
    weights = [torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view(h.shape) for h in halves]
    total = sum((half * w).sum() for half, w in zip(halves, weights, strict=True))
    return torch.autograd.grad(total, [*cores, *gates])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", SHAPES)
def test_halves_and_gradients_match_the_reference(name, gated):
    cores, gates = make(name, gated)
    got, want = contract_table(cores, gates, 0.01), reference(cores, gates, 0.01)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        grads(got, cores, gates), grads(want, cores, gates), rtol=1e-10, atol=1e-10
    )


def test_gradients_can_be_differentiated_again():
    cores, gates = make("3 cores", True)

    def merge(*tensors):
        return contract_table(tensors[: len(cores)], tensors[len(cores) :], 0.01)

    assert torch.autograd.gradcheck(merge, (*cores, *gates))
    assert torch.autograd.gradgradcheck(merge, (*cores, *gates))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_cores_are_rounded_once(dtype):
    cores, gates = make("4 cores", True, dtype)
    wide = [core.detach().float() for core in cores]
    got = contract_table(cores, gates, 0.01)
    for half, want in zip(got, reference(wide, gates, 0.01), strict=True):
        torch.testing.assert_close(half, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    sum(half.sum() for half in got).backward()
    assert all(core.grad.dtype == dtype for core in cores)
    assert all(gate.grad.dtype == torch.float32 for gate in gates)


@pytest.mark.parametrize("name", SHAPES)
def test_halves_are_new_and_have_their_bonds_innermost(name):
    cores, _ = make(name, False)
    left, right = contract_table(cores)
    assert left.is_contiguous()
    assert right.mT.is_contiguous()
    for half in (left, right):
        assert not half.numel() or all(half.data_ptr() != core.data_ptr() for core in cores)
