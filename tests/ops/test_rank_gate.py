import pytest
import torch

from comera.ops.cores import open_gate, rank_gate, rank_gate_reference

CORES = [(1, 8, 12), (12, 12, 30), (30, 7, 1), (3, 1, 5), (2, 3, 4, 5), (2, 3, 0)]


def make(shape, device, dtype=torch.float32):
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
def test_forward_matches_reference(shape, dtype, rtol, device):
    core, gate = make(shape, device, dtype)
    want = rank_gate_reference(core.double(), gate.double(), 0.01)
    got = rank_gate(core, gate, 0.01)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", [(1, 8, 12), (3, 7, 1), (2, 3, 4, 5)], ids=str)
def test_gradients(shape, device):
    core, gate = make(shape, device, torch.float64)
    inputs = (core.requires_grad_(), gate.requires_grad_(), 0.01)
    assert torch.autograd.gradcheck(rank_gate, inputs)
    assert torch.autograd.gradgradcheck(rank_gate, inputs)


def test_gradients_equal_those_of_the_reference(device):
    core, gate = make((4, 3, 5), device)
    got = torch.autograd.grad(
        rank_gate(core.requires_grad_(), gate.requires_grad_(), 0.01).square().sum(), (core, gate)
    )
    want = torch.autograd.grad(rank_gate_reference(core, gate, 0.01).square().sum(), (core, gate))
    torch.testing.assert_close(got, want)
    assert got[1][0] == 0
    assert got[0][..., 0].eq(0).all()


def test_a_narrow_core_gives_its_gate_a_wide_gradient(device):
    core, gate = make((4, 3, 5), device, torch.bfloat16)
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


@pytest.mark.parametrize("shape", [CORES[1], CORES[4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registered_soundly(shape, dtype, device):
    core, gate = make(shape, device, dtype)
    torch.library.opcheck(rank_gate.custom_op, (core.requires_grad_(), gate.requires_grad_(), 0.01))
