"""Attention and feed-forward parts whose layers are multiplied by kernels."""

import copy

import pytest
import torch

import comera
from comera.nn.fused import feed_forward, self_attention
from comera.ops.dispatch import fixed_sizes
from comera.ops.kernels import choose, low_rank_kernel
from tests.kernels.numbers import assert_near
from tests.train.test_launches import batch as batch_of_tokens
from tests.train.test_launches import make_step

DTYPES = [torch.float32, torch.bfloat16]


class Part(torch.nn.Module):
    """Of a transformer block."""

    def __init__(self, kind, rank=6, bias=True):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(64, 64)] * 4 if kind == "attention" else [(64, 96), (96, 64)]
        self.layers = torch.nn.ModuleList(
            comera.TTLinear(*shape, bias, rank=rank + number) for number, shape in enumerate(shapes)
        )
        self.kind = kind

    def forward(self, x):
        if self.kind == "feed-forward":
            return feed_forward(x, *self.layers, "gelu")
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        keep[1, 5:] = False
        return self_attention(x, *self.layers, 2, keep, 0.0)

    def run(self, x, autocast=None):
        with fixed_sizes(), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            y = self(x)
        params = [x, *self.parameters()]
        if self.kind == "attention":  # what is added to all scores of a query changes nothing
            params = [p for p in params if p is not self.layers[1].bias]
        ramp = torch.linspace(-1, 1, y.shape[-1], device=y.device)
        return [y, *torch.autograd.grad((y.float() * ramp).square().mean(), params)]


def batch(device="cpu"):
    return torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", ["attention", "feed-forward"])
def test_by_kernels_as_by_torch(kind, bias, emulated, monkeypatch):
    part, x = Part(kind, bias=bias), batch().requires_grad_()
    started, launch = [], low_rank_kernel.launch
    monkeypatch.setattr(low_rank_kernel, "launch", lambda *a: started.append(a[1]) or launch(*a))
    got = part.run(x)
    kernels = ["forward"] * 2 + ["back_rows", "back_columns"] * 2
    assert started == [f"low_rank_{kernel}_f32" for kernel in kernels]
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    want = copy.deepcopy(part).double().run(batch().double().requires_grad_())
    assert_near(got, want, torch.float32, factor=4)


@pytest.mark.parametrize("kind", ["attention", "feed-forward"])
def test_under_autocast(kind, emulated, monkeypatch):
    part, x = Part(kind), batch().requires_grad_()
    started, launch = [], low_rank_kernel.launch
    monkeypatch.setattr(low_rank_kernel, "launch", lambda *a: started.append(a[1]) or launch(*a))
    got = part.run(x, torch.bfloat16)
    assert len(started) == 6
    assert all(name.endswith("_bf16") for name in started)
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    assert_near(got, part.run(x, torch.bfloat16), torch.bfloat16, factor=4)


@pytest.mark.parametrize("kind", ["attention", "feed-forward"])
def test_too_wide_a_bond_takes_torch_operations(kind, emulated, monkeypatch):
    monkeypatch.setattr(low_rank_kernel, "_MOST_RANK", 7)
    monkeypatch.setattr(low_rank_kernel, "launch", lambda *a: pytest.fail("a kernel ran"))
    part, x = Part(kind), batch().requires_grad_()
    assert_near(part.run(x), Part(kind).double().run(x.double().detach().requires_grad_()),
                torch.float32, factor=4)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["attention", "feed-forward"])
def test_on_a_card_as_in_float64(kind, autocast):
    part, x = Part(kind).cuda(), batch("cuda").requires_grad_()
    got = [t.cpu() for t in part.run(x, autocast)]
    want = copy.deepcopy(part).cpu().double().run(batch().double().requires_grad_())
    # torch's fused attention makes float32's products of three in tf32.
    assert_near(got, want, autocast or torch.float32, factor=50 if autocast is None else 16)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_a_whole_model_are_those_without_kernels(precision, emulated, monkeypatch):
    step = make_step(2, late=True, precision=precision)
    step.model.eval()  # no dropout: masks are drawn in another order
    twin = make_step(2, late=True, precision=precision)
    twin.model.load_state_dict(step.model.state_dict())
    twin.model.eval()
    for _ in range(3):
        data = batch_of_tokens()
        monkeypatch.setattr(choose, "mode", lambda: "emulate")
        with fixed_sizes():
            loss = step(data)
        monkeypatch.setattr(choose, "mode", lambda: "ref")
        with fixed_sizes():
            want = twin(data)
        torch.testing.assert_close(loss, want, rtol=1e-5 if precision == "fp32" else 1e-2, atol=0)
