import functools
import time
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comera.ops import product as module
from comera.ops.product import (
    _affine,
    add_product,
    affine,
    has_onednn,
    onednn,
    product,
    store_product_,
)
from comera.planning.machine import default_machine


@pytest.fixture(params=["torch", "onednn"])
def library(request, monkeypatch):
    """Both libraries, whichever this machine prefers, for products of any size."""
    if request.param == "onednn" and not has_onednn():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(module, "ONEDNN_FROM", 1)
    monkeypatch.setattr(module, "NODE_FROM", 1)
    monkeypatch.setattr(module, "prefers_onednn", lambda: request.param == "onednn")
    monkeypatch.setattr(module, "onednn_shapes", set())


def layouts(rows, columns):
    plain = torch.randn(rows, columns)
    beside = torch.randn(rows, columns + 3)[:, 1:-2]
    return [plain, torch.randn(columns, rows).T, beside, torch.randn(rows, 1).expand(rows, columns)]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "sizes", [(7, 40, 3), (40, 3, 7), (3, 7, 40), (1, 5, 1), (4, 0, 2), (0, 4, 2)]
)
def test_every_layout_equals_float64(sizes):
    rows, depth, columns = sizes
    for a in layouts(rows, depth):
        for b in layouts(depth, columns):
            want = a.double() @ b.double()
            close = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(product(a, b).double(), want, **close)
            total = torch.ones(rows, columns, dtype=torch.float64)
            assert add_product(total, a, b, total.dtype) is total
            torch.testing.assert_close(total, want + 1, **close)
            first = add_product(None, a, b, torch.float64)
            torch.testing.assert_close(first, want, **close)
            stored = torch.ones(2 * rows, columns)
            store_product_(stored[:rows], a, b)
            torch.testing.assert_close(stored[:rows].double(), want, **close)
            assert (stored[rows:] == 1).all()


@pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("kind", range(4), ids=["plain", "transposed", "slice", "expanded"])
def test_no_layout_is_slow(kind):
    """oneDNN falls back on loops in which some layouts take a thousand times as long."""
    a, plain = torch.randn(256, 256), torch.randn(256, 256)
    b = layouts(256, 256)[kind]
    for left, right in ((a, b), (b, a)):
        assert seconds(left, right) < 30 * seconds(a, plain)


def seconds(a, b):
    """The shortest of many, spread over time slices that others may be given."""
    times = []
    for k in range(40):
        if k % 10 == 9:
            time.sleep(0.005)
        with onednn:
            began = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs_own(dtype):
    a, b = torch.randn(5, 4, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    assert torch.equal(product(a, b), a @ b)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("out", [3, 5], ids=["narrower", "wider"])
def test_affine_and_its_gradients(bias, out):
    x, weight, row = (torch.randn(*s, requires_grad=True) for s in ((9, 4), (4, out), (out,)))
    wide = [t.detach().double().requires_grad_() for t in (x, weight, row)]
    grad = torch.randn(9, out)
    got, want = affine(x, weight, row if bias else None), wide[0] @ wide[1]
    want = want + wide[2] if bias else want
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    count = 3 if bias else 2
    torch.testing.assert_close(
        [g.double() for g in torch.autograd.grad(got, (x, weight, row)[:count], grad)],
        list(torch.autograd.grad(want, wide[:count], grad.double())),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


@pytest.mark.usefixtures("library")
def test_a_second_derivative_is_no_constant():
    x, weight, row = (torch.randn(*s, requires_grad=True) for s in ((3, 4), (4, 5), (5,)))
    for of in (x, weight, row):
        (first,) = torch.autograd.grad(affine(x, weight, row).pow(3).sum(), of, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (x, weight, row))
        plain = (x @ weight + row).pow(3).sum()
        (first,) = torch.autograd.grad(plain, of, create_graph=True)
        want = torch.autograd.grad(first.square().sum(), (x, weight, row))
        torch.testing.assert_close(second, want, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_compiled_it_is_one_node():
    torch._dynamo.reset()
    compiled = torch.compile(affine, fullgraph=True)
    weight, row = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    for rows in (9, 7, 5):  # from the second on at any size
        x = torch.randn(rows, 4, requires_grad=True)
        grads = [
            torch.autograd.grad(run(x, weight, row).square().sum(), (x, weight, row))
            for run in (compiled, affine)
        ]
        torch.testing.assert_close(*grads)


def test_gradients_of_affine():
    inputs = [
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4, 2), (2,))
    ]
    assert torch.autograd.gradcheck(affine, inputs)
    assert torch.autograd.gradgradcheck(affine, inputs)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [9, 3])
def test_gradients_in_batches(rows, monkeypatch):
    monkeypatch.setattr(module, "_PANEL", 4)
    monkeypatch.setattr(module, "_MOST_SHAPES", 0)  # all go in panels
    inputs = [torch.randn(*s, requires_grad=True) for s in ((rows, 6), (6, 5), (5,))]
    grads = functools.partial(torch.autograd.grad, affine(*inputs), inputs, retain_graph=True)
    many = torch.randn(2, rows, 5)
    each = tuple(map(torch.stack, zip(*map(grads, many), strict=True)))
    for got in (grads(many, is_grads_batched=True), torch.vmap(grads)(many)):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("library")
def test_affine_under_transforms():
    x, weight, row = torch.randn(3, 9, 4), torch.randn(4, 5), torch.randn(5)
    torch.testing.assert_close(
        torch.vmap(affine, (0, None, None))(x, weight, row), x @ weight + row
    )
    tangent = torch.func.jvp(lambda x: affine(x, weight, row), (x[0],), (x[1],))[1]
    torch.testing.assert_close(tangent, x[1] @ weight)


def test_affine_follows_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert affine(torch.randn(3, 4), torch.randn(4, 2), torch.randn(2)).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, torch.zeros(2)], ids=["no bias", "bias"])
def test_registered_soundly(bias):
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    torch.library.opcheck(_affine.custom_op, (x, weight, bias))


def test_a_product_without_values_is_a_node_of_a_graph(monkeypatch):
    """The library depends on sizes, which are known when the graph runs."""
    monkeypatch.setattr(module, "prefers_onednn", lambda: True)
    nodes = []
    monkeypatch.setattr(module, "_product_in_a_graph", lambda a, b: nodes.append(a.shape) or a @ b)
    with FakeTensorMode(), torch.no_grad():
        product(torch.empty(4, 3), torch.empty(3, 2))
        product(torch.empty(4, 3, dtype=torch.float64), torch.empty(3, 2, dtype=torch.float64))
    assert nodes == [(4, 3)]


@pytest.fixture
def multiplied(monkeypatch):
    """The products by oneDNN, as rows, depth and columns; it multiplies 12 shapes whole."""
    if not has_onednn():
        pytest.skip("torch was built without oneDNN")
    for name, value in {"ONEDNN_FROM": 1, "NODE_FROM": 1, "_MOST_SHAPES": 12, "_PANEL": 16}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "prefers_onednn", lambda: True)
    monkeypatch.setattr(module, "onednn_shapes", set())
    calls = []

    def recorded(run, first):
        def record(*given, **named):
            a, b = given[first : first + 2]
            if torch.backends.mkldnn.matmul.fp32_precision == "bf16":
                calls.append((*a.shape, b.shape[1]))
            return run(*given, **named)

        return record

    monkeypatch.setattr(torch, "mm", recorded(torch.mm, 0))
    monkeypatch.setattr(torch.Tensor, "addmm_", recorded(torch.Tensor.addmm_, 1))
    return calls


def test_batches_of_many_lengths_fill_no_cache(multiplied):
    x, weight = torch.randn(99, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)

    def shapes(lengths):
        multiplied.clear()
        for rows in lengths:
            y = affine(x[:rows], weight, bias)
            given = torch.randn(rows, 5)
            grads = torch.autograd.grad(y, (x, weight, bias), given)
            close = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(y, x[:rows] @ weight + bias, **close)
            want = (given @ weight.T, x[:rows].T @ given, given.sum(0))
            torch.testing.assert_close((grads[0][:rows], *grads[1:]), want, **close)
        return set(multiplied)

    shapes([9, 10, 11, 12])
    whole = {(9, 4, 5), (9, 5, 4), (5, 9, 5), (12, 5, 4)}
    assert whole <= module.onednn_shapes
    assert len(module.onednn_shapes) == 12
    assert shapes(range(32, 99)) == {(16, 4, 5), (16, 5, 4), (5, 16, 5)}  # in panels
    assert shapes([16, 17, 31]) <= {(16, 4, 5), (16, 5, 4), (5, 16, 5)}
    assert not shapes([13, 15])  # too short for panels
    assert shapes([9, 12]) <= module.onednn_shapes


def test_onednn_computes_in_float32_and_leaves_torch_as_it_was():
    if not has_onednn():
        pytest.skip("torch was built without oneDNN, or that rounds to bfloat16 here")
    a, b = torch.randn(16, 200, 300), torch.randn(16, 300, 100)
    with onednn, onednn:
        product = torch.bmm(a, b).double()
    torch.testing.assert_close(product, a.double() @ b.double(), rtol=0, atol=1e-3)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


def test_panels_equal_float64_in_every_layout(multiplied, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SHAPES", 0)
    for rows, depth, columns in [(32, 3, 5), (47, 20, 4), (3, 33, 5), (20, 47, 60), (33, 33, 2)]:
        for a in layouts(rows, depth):
            for b in layouts(depth, columns):
                multiplied.clear()
                close = {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(product(a, b).double(), a.double() @ b.double(), **close)
                assert len(multiplied) >= 2
                assert len(set(multiplied)) == 1


@pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")
def test_the_profile_decides(monkeypatch):
    for gain, wanted in ((0.9, False), (2.0, True)):
        profile = replace(default_machine(), onednn=gain, measured=True)
        monkeypatch.setattr(module, "machine_of", lambda device, profile=profile: profile)
        assert module.prefers_onednn() == wanted


@pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")
def test_onednn_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(module, "_mkl_leaves_avx512_unused", lambda: True)
    monkeypatch.setattr(module, "machine_of", lambda device: default_machine())
    assert module.prefers_onednn()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not module.prefers_onednn()
    finally:
        torch._C._set_mkldnn_enabled(True)
