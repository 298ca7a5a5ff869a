import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import comera
from comera.nn import linear
from comera.nn.fused import feed_forward, gated_feed_forward, linears, self_attention
from comera.ops import attention
from comera.ops.kernels import choose
from comera.ops.linear import blocks
from comera.ops.linear.tt_linear import last_of_each


def layers(count, width_in=24, width_out=24, rank=5, kind="tt", bias=True, dtype=torch.float64):
    kinds = {"dense": nn.Linear, "tt": comera.TTLinear, "blocks": comera.BTTLinear}
    more = {"tt": {"rank": rank}, "blocks": {"rank": 2}}.get(kind, {})
    make = functools.partial(kinds[kind], **more)
    made = [make(width_in, width_out, bias=bias, dtype=dtype) for _ in range(count)]
    for layer in made:
        for gate in getattr(layer, "gates", []):
            nn.init.uniform_(gate, 0.5, 1.5)
    return made


def assert_equal(got, want, inputs):
    got, want = (list(y) if isinstance(y, (list, tuple)) else [y] for y in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    grads = [torch.randn_like(y) for y in got]
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, grads), torch.autograd.grad(want, inputs, grads),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip


def inputs_of(x, modules):
    return [x, *(p for m in modules for p in m.parameters())]


KINDS = ["tt", "dense", "mixed", "tt no bias", "blocks", "blocks no bias"]


def some(kind, count, **sizes):
    if kind == "mixed":
        return [*layers(1, kind="dense", **sizes), *layers(count - 1, **sizes)]
    return layers(count, kind=kind.split()[0], bias="no bias" not in kind, **sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_linears_equal_each_by_itself(kind):
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    modules = some(kind, 3)
    assert_equal(linears(x, modules), [m(x) for m in modules], inputs_of(x, modules))


@pytest.mark.parametrize("kind", ["tt", "blocks"])
def test_linears_of_different_widths_and_ranks(kind):
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    modules = [*layers(1, rank=3, kind=kind), *layers(2, width_out=11, rank=9, kind=kind)]
    if kind == "blocks":
        modules[2] = comera.BTTLinear(24, 11, rank=1, dtype=torch.float64)
    assert_equal(linears(x, modules), [m(x) for m in modules], inputs_of(x, modules))


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
@pytest.mark.parametrize("kind", KINDS)
def test_feed_forward_equals_its_layers(kind, activation):
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    first, second = some(kind, 1, width_out=60)[0], some(kind, 1, width_in=60)[0]
    want = second(getattr(F, activation)(first(x)))
    assert_equal(feed_forward(x, first, second, activation), want, inputs_of(x, [first, second]))


@pytest.mark.parametrize("kind", KINDS)
def test_gated_feed_forward_equals_its_layers(kind):
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    (gate, up), (down,) = some(kind, 2, width_out=60), some(kind, 1, width_in=60)
    want = down(F.silu(gate(x)) * up(x))
    assert_equal(gated_feed_forward(x, gate, up, down), want, inputs_of(x, [gate, up, down]))


RUNS = {
    "linears": lambda x, *made: linears(x, made)[1],
    "feed forward": lambda x, *made: feed_forward(x, *made[:2], "gelu"),
    "gated": gated_feed_forward,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["tt", "blocks"])
def test_gradients_in_batches_and_under_autocast(kind, run, monkeypatch):
    monkeypatch.setattr(blocks, "_HIDDEN_NUMBERS", 1)  # in pieces
    x, made = torch.randn(512, 24, requires_grad=True), layers(3, kind=kind, dtype=torch.float32)
    y, many = RUNS[run](x, *made), torch.randn(2, 512, 24)
    grads = functools.partial(torch.autograd.grad, y, [x, made[1].cores[0]], retain_graph=True)
    want = [grads(one) for one in many]
    each = tuple(map(torch.stack, zip(*want, strict=True)))
    for got in (grads(many, is_grads_batched=True), torch.vmap(grads)(many)):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = grads(many[0])
    for got, exact in zip(narrow, want[0], strict=True):
        assert (got - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["tt", "blocks"])
def test_an_input_of_another_width(kind, run):
    x, made = torch.randn(3, 23, dtype=torch.float64), layers(3, kind=kind)
    with pytest.raises(RuntimeError, match="23"):
        RUNS[run](x, *made)


TRANSFORMS = {
    "grad": lambda run, x, u: torch.func.grad(lambda x: (run(x) * u).sum())(x),
    "vjp": lambda run, x, u: torch.func.vjp(run, x)[1](u)[0],
    "jacrev": lambda run, x, u: torch.func.jacrev(run)(x),
    "second": lambda run, x, u: torch.func.vjp(
        torch.func.grad(lambda x: (run(x) ** 3).sum()), x)[1](u)[0],
    "vmap": lambda run, x, u: torch.vmap(torch.func.grad(lambda x: run(x).square().sum()))(x[None]),
    "jvp": lambda run, x, u: torch.func.jvp(run, (x,), (u,))[1],
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["tt", "blocks"])
@pytest.mark.parametrize("operation", ["plain", "gated", "attention"])
def test_function_transforms_equal_those_of_the_layers(operation, kind, transform):
    made = [m.requires_grad_(False) for m in some(kind, 4, width_in=24)]
    up, (down, *_) = made[:2], made[2:]
    mask = torch.ones(2, 3, dtype=torch.bool)
    run, plain = {
        "plain": (
            lambda x: feed_forward(x, up[0], down, "gelu"), lambda x: down(F.gelu(up[0](x)))
        ),
        "gated": (
            lambda x: gated_feed_forward(x, *up, down), lambda x: down(F.silu(up[0](x)) * up[1](x))
        ),
        "attention": (
            lambda x: self_attention(x, *made, 2, mask, 0.0),
            lambda x: plain_attention(x, made, 2, mask),
        ),
    }[operation]  # fmt: skip
    x, u = torch.randn(2, 2, 3, 24, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):  # the fused one knows no second derivative
        got, want = (TRANSFORMS[transform](of, x, u) for of in (run, plain))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", ["vjp", "jvp", "vmap"])
def test_dropout_under_function_transforms(transform):
    made = layers(4, rank=3)
    x, u = torch.randn(2, 2, 3, 24, dtype=torch.float64)

    def run(x):
        mixed = self_attention(x, *made, 2, None, 0.5)
        return attention.dropout_add(mixed, x, 1.0, True)

    if transform == "vmap":
        assert torch.equal(torch.vmap(run, randomness="different")(x[None])[0], x)
    else:
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.equal(TRANSFORMS[transform](run, x, u), u)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match="activation='swish' must be one of gelu, relu, silu"):
        feed_forward(torch.zeros(1, 24), *layers(2), "swish")


def plain_attention(x, modules, num_heads, keep):
    query, key, value, out = modules

    def heads(y):
        return y.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(
        heads(query(x)), heads(key(x)), heads(value(x)),
        attn_mask=None if keep is None else keep[:, None, None, :],
    )  # fmt: skip
    return out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("rank", [5, 20], ids=["rank space", "rank above a head's width"])
@pytest.mark.parametrize("padded", [True, False], ids=["padding", "no padding"])
@pytest.mark.parametrize("kind", KINDS)
def test_self_attention_equals_its_layers(kind, padded, rank):
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(3, 5) > 0.3
    keep[:, 0] = True
    keep = keep if padded else None
    modules = some(kind, 4, rank=rank)
    got = self_attention(x, *modules, num_heads=2, keep_BT=keep, dropout=0.0)
    assert_equal(got, plain_attention(x, modules, 2, keep), inputs_of(x, modules))


@pytest.mark.parametrize("widths", [[3], [2, 2], [1, 4, 2]], ids=str)
def test_a_row_of_ones_is_made_once(widths):
    like = torch.zeros(1, dtype=torch.float64)
    row = last_of_each(widths, like)
    assert row.split(widths)[-1].tolist() == [0.0] * (widths[-1] - 1) + [1.0]
    assert row.sum() == len(widths)
    assert row.dtype == torch.float64
    assert last_of_each(widths, like) is row
    assert last_of_each(widths, like.float()) is not row
    with torch.inference_mode():
        kept = last_of_each([*widths, 9], like)
    assert not kept.is_inference()  # it serves training afterwards
    assert last_of_each(widths, like.to("meta")).is_meta


def test_a_row_of_ones_made_under_a_transform_is_not_kept():
    x = torch.ones(2)
    torch.func.hessian(lambda x: (x**3 * last_of_each([1, 3, 7], x)[:2]).sum())(x)
    row = last_of_each([1, 3, 7], x)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(row)


def kept_by(run, inputs):
    """Numbers that the backward pass keeps beside the inputs, each piece of memory once."""
    there = {t.untyped_storage().data_ptr() for t in inputs}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = tensor, storage.nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(numbers for _, numbers in kept.values())


@pytest.mark.parametrize("where", ["card", "cpu"])
@pytest.mark.parametrize("rank", [15, 40, None], ids=["rank space", "head space", "dense"])
def test_what_an_attention_keeps(rank, where, monkeypatch):
    """Heads are views of what products have made; keys of all heads are kept once."""
    if where == "card":
        for way in ("_in_pieces", "_as_one_head"):
            monkeypatch.setattr(attention, way, attention._by_torch)
    width, heads, rows = 192, 12, 4 * 256
    kind = "dense" if rank is None else "tt"
    modules = layers(4, width, width, rank, kind, dtype=torch.float32)
    x = torch.randn(4, 256, width, requires_grad=True)
    keep = torch.ones(4, 256, dtype=torch.bool)
    kept = kept_by(lambda: self_attention(x, *modules, heads, keep, 0.0), inputs_of(x, modules))
    padded = 0 if rank is None else modules[0].factor_width
    a_row = {
        15: 2 * heads * padded + 4 * padded,  # queries and result; x times the four left factors
        40: 4 * width + 4 * padded,  # queries, keys, values and result
        None: 4 * width,
    }[rank]
    # Beside them the sums of the softmax, the mask, and factors, those of q, k and v twice; of
    # contracting cores these stacked, multiplied by gates, and what a few of them have made.
    cores = 0 if rank is None else sum(core.numel() for m in modules for core in m.cores)
    others = rows * heads + rows + 11 * padded * width + 3 * cores
    assert rows * a_row <= kept <= rows * a_row + others


@pytest.mark.parametrize("kind", ["tt", "dense"])
@pytest.mark.parametrize("size", [(0, 5, 24), (2, 0, 24)], ids=str)
def test_batches_without_rows(size, kind):
    x, modules = torch.randn(size, dtype=torch.float64), layers(4, kind=kind)
    keep = torch.ones(size[:2], dtype=torch.bool)
    assert self_attention(x, *modules, 2, keep, 0.1).shape == size
    assert feed_forward(x, *modules[:2], "gelu").shape == size
    assert [y.shape for y in linears(x, modules)] == [size] * 4
    assert linears(x, []) == []


def test_attention_names_what_does_not_fit():
    x, modules = torch.randn(2, 5, 24, dtype=torch.float64), layers(4)
    keep = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="num_heads=5 does not divide the width 24"):
        self_attention(x, *modules, 5, keep, 0.0)
    with pytest.raises(ValueError, match=r"keep_BT has shape \(3, 5\), the sequences \(2, 5\)"):
        self_attention(x, *modules, 2, torch.ones(3, 5, dtype=torch.bool), 0.0)
    with pytest.raises(ValueError, match=r"dropout probability 1\.5 must be between 0 and 1"):
        self_attention(x, *modules, 2, keep, 1.5)


def test_hooks_on_a_layer_are_called():
    x, seen = torch.randn(2, 4, 24, dtype=torch.float64, requires_grad=True), []
    modules = layers(4)
    for module in modules[:2]:
        module.register_full_backward_pre_hook(lambda *_: seen.append(1))
    sum(y.sum() for y in linears(x, modules[:2])).backward()
    assert len(seen) == 2
    seen.clear()
    modules = layers(4)
    for module in modules:
        module.register_forward_hook(lambda *_: seen.append(1))
    linears(x, modules[:3])
    feed_forward(x, *modules[:2], "gelu")
    self_attention(x, *modules, num_heads=2, keep_BT=torch.ones(2, 4, dtype=bool), dropout=0.0)
    assert len(seen) == 3 + 2 + 4


@pytest.mark.parametrize("kind", ["tt", "blocks"])
def test_a_class_that_was_patched_is_called(kind, monkeypatch):
    x, modules = torch.randn(2, 4, 24, dtype=torch.float64), layers(3, kind=kind)
    forward = type(modules[0]).forward
    monkeypatch.setattr(type(modules[0]), "forward", lambda self, x: 2 * forward(self, x))
    torch.testing.assert_close(linears(x, modules), [2 * forward(m, x) for m in modules])


@pytest.mark.parametrize("kind", ["tt", "blocks"])
def test_a_frozen_layer_gets_no_gradient(kind):
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    modules = layers(3, kind=kind)
    modules[1].requires_grad_(False)
    sum(y.sum() for y in linears(x, modules)).backward()
    assert all(p.grad is None for p in modules[1].parameters())
    assert all(p.grad is not None for m in modules[::2] for p in m.parameters())


def test_each_layer_joins_its_cores_once(monkeypatch):
    x, modules, joined = torch.randn(2, 5, 24, dtype=torch.float64), layers(4), []
    original = linear.contract_groups
    monkeypatch.setattr(linear, "contract_groups", lambda *a: joined.append(1) or original(*a))
    self_attention(x, *modules, 2, torch.ones(2, 5, dtype=torch.bool), 0.0)
    assert len(joined) == 4


def test_no_kernel_is_missed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(choose, "_said", set())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    comera.tensorize_(model, comera.TTConfig(rank=8, init="orthogonal"))
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        model(torch.randn(64, 64)).sum().backward()
