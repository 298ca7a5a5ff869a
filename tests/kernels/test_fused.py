"""Attention and feed-forward parts, and whole models, with kernels."""

import copy

import pytest
import torch

import comera
from comera.nn.fused import feed_forward, self_attention
from comera.ops.context import static_shapes
from comera.ops.kernels import choose
from tests.kernels.numbers import assert_near
from tests.train.test_launches import batch as batch_of_tokens
from tests.train.test_launches import make_step


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
        with static_shapes(), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            y = self(x)
        params = [x, *self.parameters()]
        if self.kind == "attention":  # what is added to all scores of a query changes nothing
            params = [p for p in params if p is not self.layers[1].bias]
        ramp = torch.linspace(-1, 1, y.shape[-1], device=y.device)
        return [y, *torch.autograd.grad((y.float() * ramp).square().mean(), params)]


def batch(device="cpu"):
    return torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1)).to(device)


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
        with static_shapes():
            loss = step(data)
        monkeypatch.setattr(choose, "mode", lambda: "ref")
        with static_shapes():
            want = twin(data)
        torch.testing.assert_close(loss, want, rtol=1e-5 if precision == "fp32" else 1e-2, atol=0)
