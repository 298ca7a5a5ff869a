import contextlib

import pytest
import torch
from torch.nn import functional as F

from comera.ops import attention as module
from comera.ops.attention import (
    _attend,
    _dropout_add,
    attend,
    draw_seed,
    dropout_add,
    head_factors,
    keep_mask,
    score_bias,
)
from comera.ops.context import static_shapes
from comera.ops.dispatch import Sample


def random(*size, dtype=torch.float64):
    return torch.randn(size, dtype=dtype, requires_grad=True)


def make(heads=2, queries=6, keys=5, shared=False, width_v=7, dtype=torch.float64):
    of_keys = 1 if shared else heads
    q = random(3, heads, queries, 4, dtype=dtype)
    k, v = (random(3, of_keys, keys, width, dtype=dtype) for width in (4, width_v))
    keep = torch.rand(3, keys) > 0.3
    keep[:, 0] = True
    return q, k, v, keep


def plain(q, k, v, keep, scale, weights_scale=None):
    scores = q @ k.mT * scale
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    return (weights if weights_scale is None else weights * weights_scale) @ v


def assert_equal(got, want, inputs, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, grad, retain_graph=True),
        torch.autograd.grad(want, inputs, grad),
        rtol=tolerance, atol=tolerance,
    )  # fmt: skip


WAYS = ("_in_pieces", "_as_one_head", "_by_torch")


padding = pytest.mark.parametrize("padded", [True, False], ids=["padding", "no padding"])
sharing = pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])


@padding
@pytest.mark.parametrize(
    ("way", "shared"),
    [(way, shared) for way in WAYS for shared in (False, True) if shared or way != "_as_one_head"],
)
def test_output_and_gradients_match_plain_ones(way, shared, padded):
    for width_v in (4, 7):
        q, k, v, keep = make(shared=shared, width_v=width_v)
        keep = keep if padded else None
        bias = None if keep is None else score_bias(keep, q.dtype)
        got = getattr(module, way)(q, k, v, bias, 0.4, 0.0)
        assert_equal(got, plain(q, k, v, keep, 0.4), (q, k, v))


@pytest.mark.gpu
@padding
@sharing
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_card_agrees_with_float64(dtype, tolerance, shared, padded):
    """Bfloat16 rounds to 4e-3 itself, and sums of its gradients over heads a few times."""
    q = torch.randn(3, 64, 8, 32).transpose(1, 2)
    k, v = torch.randn(2, 3, 1 if shared else 8, 64, 32)
    there = [x.to("cuda", dtype).requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in there]
    keep = (torch.arange(64) < torch.tensor([[64], [40], [7]])).cuda() if padded else None
    got, want = attend(*there, keep, 0.2, 0.0), plain(*exact, keep, 0.2)
    grad = torch.randn_like(got)
    results = [got, *torch.autograd.grad(got, there, grad)]
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    for one, other in zip(results, wanted, strict=True):
        assert (one - other).norm() < tolerance * other.norm()


@sharing
@padding
@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["pieces", "whole"])
def test_dropout_drops_weights_forward_and_backward(at_once, padded, shared, monkeypatch):
    monkeypatch.setattr(module, "_SCORES", at_once)
    fixed = {}

    def keep_mask(shape, p, _seed):
        if not fixed:
            fixed["mask"] = (torch.rand(shape) > p).to(torch.int8)
        return fixed["mask"], 1 / (1 - p)

    monkeypatch.setattr(module, "keep_mask", keep_mask)
    q, k, v, keep = make(shared=shared)
    keep = keep if padded else None
    got = attend(q, k, v, keep, 0.4, 0.3)
    weights = fixed["mask"].double() / 0.7
    # Drawn for the queries of one head of keys, one after the other.
    weights = weights.view(3, 6, 2, 5).transpose(1, 2) if shared else weights.view(3, 2, 6, 5)
    assert_equal(got, plain(q, k, v, keep, 0.4, weights), (q, k, v))


@pytest.mark.parametrize(
    ("place", "shared", "dropout", "dtype", "way"),
    [
        ("cuda", True, 0.0, torch.bfloat16, "_by_torch"),
        ("cpu", True, 0.0, torch.bfloat16, "_as_one_head"),
        ("cpu", False, 0.0, torch.bfloat16, "_by_torch"),
        ("cpu", False, 0.0, torch.float32, "_by_torch"),
        ("cpu", False, 0.1, torch.float32, "_in_pieces"),
        ("cpu", True, 0.1, torch.float64, "_in_pieces"),
        ("cpu", True, 0.1, torch.bfloat16, "_as_one_head"),
        ("cuda", True, 0.1, torch.float32, "_by_torch"),
    ],
)
@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_a_card_gets_heads_and_a_processor_all_queries_at_once(
    place, shared, dropout, dtype, way, static, monkeypatch
):
    """On an H100 12 heads over views of one memory took 90 us where one head took 115."""
    for name in WAYS:
        monkeypatch.setattr(module, name, lambda *_, name=name: name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q, k = (Sample((8, heads, 128, 32), dtype, torch.device(place)) for heads in (12, 1))
    k = k if shared else q
    if static and way == "_in_pieces":
        way = "_as_one_head" if shared else "_by_torch"
    with static_shapes() if static else contextlib.nullcontext():
        assert attend(q, k, k, None, 0.1, dropout) == way


@padding
@sharing
def test_heads_are_neither_copied_nor_is_a_mask_made(shared, padded, monkeypatch):
    """As a card takes them: keys of all heads by stride 0, positions beside heads in memory."""
    seen = {}
    fused = F.scaled_dot_product_attention

    def spy(q, k, v, **settings):
        seen.update(settings, q=q, k=k, v=v)
        return fused(q, k, v, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q_BMHE = torch.randn(3, 6, 2, 4)
    k, v = torch.randn(2, 3, 1 if shared else 2, 5, 4)
    bias = score_bias(torch.ones(3, 5) > 0, torch.float32) if padded else None
    out = module._by_torch(q_BMHE.transpose(1, 2), k, v, bias, 0.4, 0.0)
    for name, given in (("q", q_BMHE), ("k", k), ("v", v)):
        assert seen[name].data_ptr() == given.data_ptr()
        assert seen[name].shape[:2] == (3, 2)
    assert seen["k"].stride(1) == (0 if shared else 5 * 4)
    assert (seen["attn_mask"] is None) == (not padded)
    out.transpose(1, 2).view(3, 6, 8)  # heads lie beside each other: nothing is copied


def test_without_dropout_no_random_number_is_drawn():
    q, k, v = torch.randn(3, 3, 1, 5, 8)
    before = torch.get_rng_state()
    attend(q, k, v, torch.ones(3, 5, dtype=torch.bool), 0.5, 0.0)
    assert torch.equal(torch.get_rng_state(), before)


@sharing
@pytest.mark.parametrize("width_v", [4, 7], ids=["fused", "not fused"])
def test_a_sequence_of_padding_alone_is_attended_to_as_a_whole(width_v, shared):
    q, k, v, keep = make(shared=shared, width_v=width_v)
    keep[1] = False
    got = attend(q, k, v, keep, 0.4, 0.0)
    keep[1] = True
    assert_equal(got, plain(q, k, v, keep, 0.4), (q, k, v))


@pytest.mark.slow
@padding
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_registered_soundly(dropout, padded):
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in make()[:3])
    bias = torch.zeros(6, 1, 5, dtype=torch.float64) if padded else None
    # A random result cannot be compared between two runs.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_attend.custom_op, (q, k, v, bias, 0.5, dropout), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_added_to_scores_can_be_made_once_for_all_layers(dtype):
    q, k, v, keep = make()
    keep[1] = False
    want = attend(q, k, v, keep, 0.4, 0.0)
    torch.testing.assert_close(attend(q, k, v, score_bias(keep, dtype), 0.4, 0.0), want)


def test_a_mask_of_floats_of_another_dtype_is_refused():
    q, k, v, keep = make()
    with pytest.raises(TypeError, match="give booleans"):
        attend(q, k, v, keep.float(), 0.4, 0.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_mask_may_be_of_whole_numbers(dtype):
    """Ones for what is kept, as Hugging Face has it."""
    q, k, v, keep = make()
    assert not keep.all()
    want = attend(q, k, v, keep, 0.4, 0.0)
    torch.testing.assert_close(attend(q, k, v, keep.to(dtype), 0.4, 0.0), want)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("ranks", [(2, 3, 4, 5), (1, 1, 1, 1)], ids=str)
def test_head_factors(ranks, heads):
    width = 6 * heads
    q, k, v = (random(rank, width) for rank in ranks[:3])
    o = random(width, ranks[3])
    parts = [slice(start, start + 6) for start in range(0, width, 6)]
    scores = torch.cat([q[:, p] @ k[:, p].T for p in parts], 1)
    values = torch.cat([v[:, p] @ o[p] for p in parts])
    got, leaves = head_factors(q, k, v, o, heads), [q, k, v, o]
    assert_equal(
        torch.cat([x.flatten() for x in got]),
        torch.cat([scores.flatten(), values.flatten()]),
        leaves,
    )
    assert torch.autograd.gradgradcheck(lambda *given: head_factors(*given, heads), leaves)
    batch = torch.eye(values.numel(), dtype=values.dtype).view(-1, *values.shape)
    values = torch.cat([v[:, p] @ o[p] for p in parts])
    rows = (
        torch.autograd.grad(each, [v, o], batch, is_grads_batched=True)
        for each in (head_factors(q, k, v, o, heads)[1], values)
    )
    torch.testing.assert_close(*rows)


@pytest.mark.slow
def test_head_factors_are_registered_soundly():
    halves = random(2, 6), random(3, 6), random(4, 6), random(6, 5)
    torch.library.opcheck(head_factors.custom_op, (*halves, 2))


def test_a_share_p_is_dropped_and_the_mean_kept():
    """Each mask is drawn at 25 or 26 in 256; both occur, and on average it is 0.1."""
    shares = []
    for _ in range(300):
        y = dropout_add(torch.ones(100, 100), None, 0.1, True)
        assert y.unique().numel() == 2
        assert abs(float(y.double().mean()) - 1) < 0.02
        shares.append(float((y == 0).double().mean()))
    assert abs(sum(shares) / len(shares) - 0.1) < 0.001
    drawn = {keep_mask((8,), 0.1, draw_seed(0.1))[1] for _ in range(100)}
    assert drawn == {float(torch.tensor(256 / kept)) for kept in (230, 231)}


def test_neighbours_are_independent():
    """One random number serves four elements: their masks must not go together."""
    keep, _ = keep_mask((400_000,), 0.5, draw_seed(0.5))
    quads = keep.double().view(-1, 8) - 0.5
    correlation = quads.T @ quads / quads.shape[0] / 0.25
    assert float((correlation - torch.eye(8)).abs().max()) < 0.02


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_go_where_the_values_went(residual):
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    other = torch.randn(7, 9, dtype=torch.float64, requires_grad=True) if residual else None
    y = dropout_add(x, other, 0.4, True)
    part = y if other is None else y - other
    scale = torch.where(part.detach().abs() > 1e-12, part.detach() / x.detach(), 0)
    torch.testing.assert_close(scale.unique()[-1].item(), 1 / 0.6, rtol=5e-3, atol=0)
    y.backward(torch.full_like(y, 2.0))
    torch.testing.assert_close(x.grad, 2 * scale)
    assert other is None or torch.equal(other.grad, torch.full_like(other, 2.0))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_sizes_that_are_not_multiples_of_eight(count):
    assert dropout_add(torch.ones(count), None, 0.5, True).shape == (count,)


def test_the_ends():
    x, residual = torch.randn(5), torch.randn(5)
    assert dropout_add(x, None, 0.0, True) is x
    assert dropout_add(x, None, 0.5, False) is x
    assert torch.equal(dropout_add(x, residual, 0.5, False), x + residual)
    assert torch.equal(dropout_add(x, residual, 1.0, True), residual)


def test_the_same_seed_gives_the_same_mask():
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append(keep_mask((100,), 0.3, draw_seed(0.3))[0])
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], keep_mask((100,), 0.3, draw_seed(0.3))[0])


@pytest.mark.parametrize("residual", [False, True])
def test_dropout_is_registered_soundly(residual):
    x = torch.randn(5, 6, requires_grad=True)
    other = torch.randn(5, 6, requires_grad=True) if residual else None
    # A random result cannot be compared between two runs.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_dropout_add.custom_op, (x, other, 0.3), test_utils=checks)


def test_no_mask_is_saved_for_backward():
    x, (q, k, v) = torch.randn(40, 50, requires_grad=True), make(dtype=torch.float32)[:3]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout_add(x, x, 0.3, True)
        attend(q, k, v, None, 0.4, 0.3)
    assert not [t for t in saved if t.dtype == torch.int8]
    assert sum(t.numel() for t in saved if t.dtype == torch.int64) == 2  # their seeds
