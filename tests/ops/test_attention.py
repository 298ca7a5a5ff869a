import pytest
import torch
from torch.nn import functional as F

from comera.ops import attention as module
from comera.ops.attention import _attend, attend, score_bias


def make(heads=2, queries=6, keys=5):
    def random(*size):
        return torch.randn(size, dtype=torch.float64, requires_grad=True)

    q, k, v = (
        random(3 * heads, queries, 4), random(3 * heads, keys, 4), random(3 * heads, keys, 7),
    )  # fmt: skip
    keep = torch.rand(3, keys) > 0.3
    keep[:, 0] = True
    return q, k, v, keep


def torchs(q, k, v, keep, scale, weights_scale=None):
    mask = keep.repeat_interleave(q.shape[0] // keep.shape[0], 0)[:, None]
    weights = (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights if weights_scale is None else weights * weights_scale) @ v


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["pieces", "whole"])
def test_output_and_gradients_match_torch(at_once, monkeypatch):
    monkeypatch.setattr(module, "_SCORES", at_once)
    q, k, v, keep = make()
    got = attend(q, k, v, keep, 0.4, 0.0)
    mask = keep.repeat_interleave(2, 0)[:, None]
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)
    for want in (torchs(q, k, v, keep, 0.4), fused):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        grad = torch.randn_like(got)
        torch.testing.assert_close(
            torch.autograd.grad(got, (q, k, v), grad, retain_graph=True),
            torch.autograd.grad(want, (q, k, v), grad),
            rtol=1e-10, atol=1e-10,
        )  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["pieces", "whole"])
def test_dropout_drops_weights_forward_and_backward(at_once, monkeypatch):
    monkeypatch.setattr(module, "_SCORES", at_once)
    fixed = {}

    def keep_mask(shape, p):
        if not fixed:
            fixed["mask"] = (torch.rand(shape) > p).to(torch.int8)
        return fixed["mask"], torch.tensor(1 / (1 - p), dtype=torch.float64)

    monkeypatch.setattr(module, "keep_mask", keep_mask)
    q, k, v, keep = make()
    got = attend(q, k, v, keep, 0.4, 0.3)
    want = torchs(q, k, v, keep, 0.4, fixed["mask"].double() / 0.7)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad),
        rtol=1e-10, atol=1e-10,
    )  # fmt: skip


def test_without_dropout_no_random_number_is_drawn():
    q, k, v = torch.randn(3, 3, 5, 8)
    before = torch.get_rng_state()
    attend(q, k, v, torch.ones(3, 5, dtype=torch.bool), 0.5, 0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sequence_of_padding_alone_gives_numbers():
    q, k, v, keep = make()
    keep[1] = False
    out = attend(q, k, v, keep, 1.0, 0.0)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[2], v[2].mean(0).expand(6, 7))
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_registered_soundly(dropout):
    q, k, v, _ = make()
    bias = torch.zeros(6, 1, 5, dtype=torch.float64)
    # A random result cannot be compared between two runs.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_attend.custom_op, (q, k, v, bias, 0.5, dropout), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_added_to_scores_can_be_made_once_for_all_layers(dtype):
    q, k, v, keep = make()
    keep[1] = False
    want = attend(q, k, v, keep, 0.4, 0.0)
    torch.testing.assert_close(attend(q, k, v, score_bias(keep, dtype), 0.4, 0.0), want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_mask_may_be_of_whole_numbers(dtype):
    """Ones for what is kept, as Hugging Face has it."""
    q, k, v, keep = make()
    assert not keep.all()
    want = attend(q, k, v, keep, 0.4, 0.0)
    torch.testing.assert_close(attend(q, k, v, keep.to(dtype), 0.4, 0.0), want)
