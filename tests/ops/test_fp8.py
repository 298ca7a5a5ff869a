"""Products in eight bits against wide ones of the same rounded numbers."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import comera
from comera.nn.fused import feed_forward, linears
from comera.ops.context import fp8_products
from comera.ops.linear import fp8 as fp8_module
from comera.ops.linear.fp8 import (
    GRADIENTS,
    VALUES,
    Fp8Matrix,
    fp8_linears,
    fp8_product,
    to_fp8,
    why_not_fp8,
)
from comera.ops.linear.tt_linear import factorized_linears

pytestmark = pytest.mark.skipif(
    why_not_fp8(torch.device("cpu")) is not None, reason="torch multiplies no eight bits here"
)


def exact_product(a: Fp8Matrix, b: Fp8Matrix) -> torch.Tensor:
    return (a.values.double() * a.scale) @ (b.values.double() * b.scale).T


def wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of a matrix in eight bits, in float64."""
    narrow = to_fp8(x, dtype)
    return (narrow.values.double() * narrow.scale)[: x.shape[0], : x.shape[1]]


def distance(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


@pytest.mark.parametrize(("dtype", "bits"), [(VALUES, 4), (GRADIENTS, 3)])
@pytest.mark.parametrize("size", [(16, 32), (5, 7), (1, 1), (33, 16)])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_a_matrix_keeps_its_leading_bits(dtype, bits, size, magnitude):
    x = (torch.randn(size) * magnitude).bfloat16()
    narrow = to_fp8(x, dtype)
    assert narrow.values.dtype == dtype
    assert all(n % 16 == 0 for n in narrow.values.shape)
    error = (wide(x, dtype) - x.double()).abs()
    # Below the normal numbers of the format the step stays what it is there.
    smallest = torch.finfo(dtype).smallest_normal * float(narrow.scale)
    assert bool((error <= 2.0**-bits * x.double().abs().clamp_min(smallest) * 1.001).all())
    rest = narrow.values.float()
    rest[: size[0], : size[1]] = 0
    assert not rest.any()


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    assert not wide(torch.zeros(3, 4), VALUES).any()
    for value in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[3, 3] = value
        y = fp8_product(to_fp8(x, VALUES), to_fp8(torch.ones(16, 16), VALUES), torch.float32)
        assert not y.isfinite().all()


@pytest.mark.parametrize("kinds", [(VALUES, VALUES), (GRADIENTS, VALUES), (VALUES, GRADIENTS)])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_numbers(kinds, out):
    a, b = to_fp8(torch.randn(20, 50), kinds[0]), to_fp8(torch.randn(36, 50), kinds[1])
    want = exact_product(a, b)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[out]
    torch.testing.assert_close(
        fp8_product(a, b, out).double(), want, rtol=tolerance, atol=tolerance
    )


def reference(x, lefts, rights, bias, gys):
    """Values and gradients by wide products of what eight bits keep, product by product."""

    def rounded(y):
        return y.to(torch.bfloat16)

    whole = wide(torch.cat([F.pad(m, (0, -m.shape[1] % 16)) for m in lefts], 1).T, VALUES).T
    t = wide(rounded(wide(x, VALUES) @ whole), VALUES)
    ys, us, grad_rights, end = [], [], [], 0
    for right, gy in zip(rights, gys, strict=True):
        begin, end = end, end + right.shape[0] + -right.shape[0] % 16
        kept = right.clone()
        if bias:
            kept[-1] = 0
        kept = F.pad(wide(kept, VALUES), (0, 0, 0, -right.shape[0] % 16))
        y = rounded(t[:, begin:end] @ kept)
        ys.append(y + right[-1] if bias else y)
        narrow = wide(gy, GRADIENTS)
        us.append(rounded(narrow @ kept.T))
        grad = (t[:, begin:end].T @ narrow)[: right.shape[0]]
        if bias:
            grad[-1] = gy.double().sum(0)
        grad_rights.append(grad)
    u = wide(torch.cat(us, 1), GRADIENTS)
    grad_left = wide(x, VALUES).T @ u
    starts = [sum(r.shape[0] + -r.shape[0] % 16 for r in rights[:k]) for k in range(len(rights))]
    grad_lefts = [
        grad_left[:, start : start + m.shape[1]] for start, m in zip(starts, lefts, strict=True)
    ]
    return ys, [u @ whole.T, *grad_lefts, *grad_rights]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "bonds", "outs"),
    [(32, 48, [16], [64]), (5, 30, [8], [7]), (40, 24, [8, 16, 24], [36, 5, 48]), (1, 1, [8], [1])],
)
def test_linears_equal_wide_products_of_rounded_numbers(rows, width, bonds, outs, bias):
    def leaf(*size):
        return torch.randn(size).bfloat16().requires_grad_()

    x, lefts = leaf(rows, width), [leaf(width, bond) for bond in bonds]
    rights = [leaf(bond, out) for bond, out in zip(bonds, outs, strict=True)]
    with torch.no_grad():
        for left in lefts:  # as halves are made: a bias meets a column of zeros
            left[:, -1] *= not bias
    gys = [torch.randn(rows, out).bfloat16() for out in outs]
    ys = fp8_linears(x, lefts, rights, bias)
    grads = torch.autograd.grad(ys, [x, *lefts, *rights], gys)
    with torch.no_grad():
        want, want_grads = reference(x, lefts, rights, bias, gys)
    # One rounding to bfloat16 may fall on the other side, and then one to eight bits, too.
    for got, right in zip([*ys, *grads], [*want, *want_grads], strict=True):
        assert got.dtype == torch.bfloat16
        assert distance(got, right) < 2e-2
    ours = factorized_linears(x, lefts, rights, bias)
    exact = torch.autograd.grad(ours, [x, *lefts, *rights], gys)
    for k, (got, right) in enumerate(zip([*ys, *grads], [*ours, *exact], strict=True)):
        if bias and len(ys) < k <= len(ys) + len(lefts):
            got, right = got[:, :-1], right[:, :-1]  # of the zeros, which are no parameters
        assert distance(got, right) < 0.15 or rows == 1  # of one number all may cancel


def test_an_output_that_is_not_used_has_no_gradient():
    x = torch.randn(16, 16).bfloat16().requires_grad_()
    halves = [torch.randn(16, 16).bfloat16().requires_grad_() for _ in range(4)]
    y, _ = fp8_linears(x, halves[:2], halves[2:], False)
    grads = torch.autograd.grad(y.sum(), [x, *halves])
    assert not grads[2].any()
    assert not grads[4].any()
    assert all(grads[k].any() for k in (0, 1, 3))


def test_inside_the_context_layers_of_bfloat16_multiply_in_eight_bits():
    layers = [comera.TTLinear(32, 48, rank=8) for _ in range(3)]
    second = comera.TTLinear(48, 32, rank=8)
    x = torch.randn(4, 6, 32)

    def outputs():
        return [layers[0](x), *linears(x, layers), feed_forward(x, layers[0], second, "gelu")]

    with torch.autocast("cpu", torch.bfloat16):
        bf16 = outputs()
        with fp8_products():
            fp8 = outputs()
    with fp8_products():
        fp32 = outputs()  # without autocast as ever
        empty = layers[0](x[:0])
    for narrow, half, whole in zip(fp8, bf16, fp32, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert not torch.equal(narrow, half)
        assert whole.dtype == torch.float32
        assert distance(half, whole) < 2e-2
        assert 2e-2 < distance(narrow, whole) < 0.2
    assert empty.shape == (0, 6, 48)


def test_a_layer_may_have_lost_all_its_ranks():
    layers = [comera.TTLinear(32, 48, rank=8, bias=False) for _ in range(2)]
    with torch.no_grad():
        layers[1].gates[2].zero_()
    comera.truncate_(layers[1], min_rank=0)
    x = torch.randn(10, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), fp8_products():
        alone, (full, none) = layers[1](x), linears(x, layers)
    assert alone.shape == (10, 48)
    assert not alone.any()
    assert not none.any()
    assert distance(full, x @ layers[0].weight.T) < 0.2
    (alone + full + none).float().sum().backward()
    assert distance(x.grad, layers[0].weight.sum(0).expand(10, 32)) < 0.2


def test_gradients_reach_all_parameters():
    layer = comera.TTLinear(32, 48, rank=8)
    x = torch.randn(10, 32)
    grads = []
    for narrow in (True, False):
        layer.zero_grad()
        products = fp8_products() if narrow else contextlib.nullcontext()
        with torch.autocast("cpu", torch.bfloat16), products:
            y = layer(x)
        y.float().square().mean().backward()
        grads.append([param.grad.clone() for param in layer.parameters()])
    for narrow, half in zip(*grads, strict=True):
        assert distance(narrow, half) < 0.2


def test_it_is_one_node_of_a_compiled_graph():
    def run(x, left, right):
        return fp8_linears(x, [left], [right], True)[0].float().sum()

    tensors = [torch.randn(size).bfloat16() for size in ((10, 20), (20, 8), (8, 12))]
    tensors = [x.requires_grad_() for x in tensors]
    want = torch.autograd.grad(run(*tensors), tensors)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*tensors), tensors), want)


def test_opcheck():
    tensors = [torch.randn(size).bfloat16() for size in ((10, 20), (20, 8), (8, 12))]
    x, left, right = (x.requires_grad_() for x in tensors)
    operator = torch.ops.comera.fp8_linears.default
    checks = ("test_faketensor",)  # others compare numbers of eight bits, which torch cannot
    torch.library.opcheck(operator, (x, [left], [right], True), test_utils=checks)


@pytest.mark.gpu
def test_a_card_multiplies_as_the_reference():
    device = torch.device("cuda")
    if why_not_fp8(device) is not None:
        pytest.skip(why_not_fp8(device))
    for kinds in ((VALUES, VALUES), (GRADIENTS, VALUES), (VALUES, GRADIENTS)):
        a, b = torch.randn(33, 50, device=device), torch.randn(36, 50, device=device)
        pair = to_fp8(a, kinds[0]), to_fp8(b, kinds[1])
        want = exact_product(*pair)
        got = fp8_product(*pair, torch.bfloat16)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.fixture
def fresh():
    why_not_fp8.cache_clear()
    yield
    why_not_fp8.cache_clear()


def test_why_not(fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    why = why_not_fp8(torch.device("cuda", 0))
    assert why == "A100 has compute capability 8.0, and 8.9 or newer multiplies in eight bits"

    def fails(*_):
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(fp8_module, "fp8_product", fails)
    assert "_scaled_mm fails on cpu: no kernel for this" in why_not_fp8(torch.device("cpu"))


def test_transposed_is_the_same_matrix():
    narrow = to_fp8(torch.randn(16, 32), VALUES)
    turned = narrow.T
    assert isinstance(turned, Fp8Matrix)
    assert turned.values.is_contiguous()
    assert torch.equal(turned.values.float(), narrow.values.float().T)
