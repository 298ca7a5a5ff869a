import math

import pytest
import tensorly
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from comera.ops.context import static_shapes
from comera.ops.contract_cores import contract_groups, contract_layer
from comera.ops.cores import Chains, rank_gate
from comera.ops.linear.tt_linear import factorized_linears, low_rank_linear, tt_to_dense
from comera.shapes import TTShape

SHAPES = {
    "1+1": TTShape((4,), (3,), (2,)),
    "1+2": TTShape((6,), (3, 2), (4, 2)),
    "2+1": TTShape((3, 2), (5,), (2, 4)),
    "3+3": TTShape((2, 3, 4), (4, 3, 2), (2, 5, 6, 5, 2)),
    "2+4": TTShape((4, 3), (2, 2, 2, 3), (3, 5, 4, 4, 3)),
    "4+4": TTShape((2, 2, 2, 3), (3, 2, 2, 2), (2, 3, 4, 5, 4, 3, 2)),
    "rank one": TTShape((2, 3), (3, 2), (1, 1, 1)),
}
WIDTHS = {"1+2": (6, 5), "3+3": (23, 22), "4+4": (24, 23)}
"""True widths of the shapes whose modes multiply to more."""

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True, params=["plain", "by factors", "operators"])
def way(request, monkeypatch):
    """A layer by itself; as factors of which autograd knows the products; all as operators."""
    if request.param == "plain":
        monkeypatch.setitem(globals(), "tt_linear", by_itself)
    if request.param == "operators":
        monkeypatch.setattr("comera.ops.product._suits_onednn", lambda *_: True)
        monkeypatch.setattr("comera.ops.product._is_onednns", lambda *_: False)
        with static_shapes():
            yield
    else:
        yield


def tt_linear(
    x, cores, split, bias, *, gates=(), threshold=0.0, in_features=None, out_features=None
):
    biases = [] if bias is None else [bias]
    chains = Chains(list(cores), list(gates), biases, 1, split, threshold)
    left, right = contract_groups([chains])
    left, right = left[0, :in_features], right[0, :, :out_features]
    return factorized_linears(x, [left], [right], bias is not None)[0]


def by_itself(
    x, cores, split, bias, *, gates=(), threshold=0.0, in_features=None, out_features=None
):
    if not gates:
        gates = [torch.ones(core.shape[2], dtype=x.dtype) for core in cores[:-1]]
    modes = [core.shape[1] for core in cores]
    in_features = in_features or math.prod(modes[:split])
    out_features = out_features or math.prod(modes[split:])
    factors = contract_layer(cores, gates, split, threshold, in_features, out_features)
    return low_rank_linear(x, *factors, bias)


class Problem:
    """Random inputs of one layer, and the results of every way to compute it."""

    def __init__(self, name, bias=True, gated=False, batch=(5,), dtype=torch.float64):
        self.shape = SHAPES[name]
        whole = (self.shape.in_width, self.shape.out_width)
        self.in_features, self.out_features = WIDTHS.get(name, whole)
        wide = torch.promote_types(dtype, torch.float32)
        self.x = torch.randn(*batch, self.in_features, dtype=dtype, requires_grad=True)
        self.cores = [torch.randn(s, dtype=dtype) for s in self.shape.core_shapes]
        self.gates = [0.5 + torch.rand(r, dtype=wide) for r in self.shape.ranks] if gated else []
        for gate in self.gates:
            gate[1:2] = 0.001  # pruned, wherever there is a second rank
        self.bias = torch.randn(self.out_features, dtype=dtype) if bias else None
        self.params = [t for t in (*self.cores, *self.gates, self.bias) if t is not None]
        for param in self.params:
            param.requires_grad_()

    @property
    def widths(self):
        return {"in_features": self.in_features, "out_features": self.out_features}

    def ours(self, x=None):
        x = self.x if x is None else x
        gating = {"gates": self.gates, "threshold": 0.01}
        return tt_linear(x, self.cores, self.shape.split, self.bias, **gating, **self.widths)

    def gated_cores(self):
        pairs = zip(self.cores, self.gates, strict=False)
        gated = [rank_gate(core, gate, 0.01) for core, gate in pairs]
        return gated + self.cores[len(gated) :]

    def reference(self):
        cores = self.gated_cores()
        weight = tt_to_dense(cores, self.shape.split)
        weight = weight[: self.widths.get("out_features"), : self.widths.get("in_features")]
        return torch.nn.functional.linear(self.x, weight, self.bias)

    def tensorly(self):
        with tensorly.backend_context("pytorch"):
            dense = tensorly.tt_to_tensor(self.gated_cores())
        dense = dense.reshape(self.shape.in_width, self.shape.out_width).T
        weight = dense[: self.out_features, : self.in_features]
        return torch.nn.functional.linear(self.x, weight, self.bias)

    def grads(self, y):
        inputs = [self.x, *self.params]
        return torch.autograd.grad((y * torch.linspace(-1, 1, y.shape[-1])).sum(), inputs)


def assert_all_agree(problem):
    got = problem.ours()
    for other in (problem.reference, problem.tensorly):
        want = other()
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(
            problem.grads(problem.ours()), problem.grads(want), check_dtype=True, **CLOSE
        )


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_gradients(name, bias, gated):
    assert_all_agree(Problem(name, bias, gated))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_leading_dimensions(batch, bias):
    problem = Problem("3+3", bias, gated=True, batch=batch)
    assert problem.ours().shape == (*batch, problem.out_features)
    assert_all_agree(problem)


def test_an_input_that_is_not_contiguous():
    problem = Problem("2+4", batch=(3, 5))
    problem.x = torch.randn(5, problem.in_features, 3, dtype=torch.float64).movedim(-1, 0)
    problem.x.requires_grad_()
    assert not problem.x.is_contiguous()
    assert_all_agree(problem)


def test_a_gradient_that_is_not_contiguous():
    problem = Problem("2+4", batch=(3, 5))
    weights = torch.randn(problem.out_features, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    got = torch.autograd.grad(problem.ours(), problem.params, weights)
    want = torch.autograd.grad(problem.reference(), problem.params, weights)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("frozen", ["x", "cores", "gates", "bias", "all but x"])
def test_what_needs_no_gradient_gets_none(frozen):
    problem = Problem("3+3", gated=True)
    still = {
        "x": [problem.x], "cores": problem.cores, "gates": problem.gates,
        "bias": [problem.bias], "all but x": problem.params,
    }[frozen]  # fmt: skip
    want = dict(zip([problem.x, *problem.params], problem.grads(problem.reference()), strict=True))
    for tensor in still:
        tensor.requires_grad_(False)
    (problem.ours() * torch.linspace(-1, 1, problem.out_features)).sum().backward()
    for tensor, grad in want.items():
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, grad, **CLOSE)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("name", ["1+1", "1+2", "3+3"])
def test_gradients_can_be_differentiated_again(name):
    problem = Problem(name, gated=True, batch=(2,))

    def run(x, *params):
        cores, rest = params[: len(problem.cores)], params[len(problem.cores) :]
        return tt_linear(
            x, cores, problem.shape.split, rest[-1],
            gates=rest[:-1], threshold=0.01, **problem.widths,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (problem.x, *problem.params), fast_mode=name == "3+3")
    assert torch.autograd.gradgradcheck(run, (problem.x, *problem.params), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    problem = Problem("3+3", gated=True, batch=(2, 3), dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        y = problem.ours()
    assert y.dtype == dtype
    exact = problem.reference()
    pairs = zip([y, *problem.grads(y)], [exact, *problem.grads(exact)], strict=True)
    for number, (got, want) in enumerate(pairs):
        assert number == 0 or got.dtype == torch.float32
        # x, both halves, x @ left and the result are each rounded once: a few eps of the largest.
        error = (got - want).abs().max() / want.abs().max()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_narrow_cores_keep_wide_gates(dtype, bias):
    problem = Problem("2+4", bias, gated=True, dtype=dtype)
    y = problem.ours()
    y.sum().backward()
    assert y.dtype == dtype
    assert all(param.grad.dtype == param.dtype for param in problem.params)
    assert all(gate.grad.dtype == torch.float32 for gate in problem.gates)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_vanished_layer_is_its_bias(bias):
    shape = TTShape((2, 3), (3, 2), (0, 0, 0))
    cores = [torch.randn(size, requires_grad=True) for size in shape.core_shapes]
    gates = [torch.ones(0, requires_grad=True) for _ in shape.ranks]
    bias_O = torch.randn(6, requires_grad=True) if bias else None
    x = torch.randn(4, 6, requires_grad=True)
    y = tt_linear(x, cores, 2, bias_O, gates=gates, threshold=0.01)
    assert torch.equal(y, torch.zeros(4, 6) if bias_O is None else bias_O.expand(4, 6))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(param.grad.shape == param.shape for param in (*cores, *gates))
    assert bias_O is None or torch.equal(bias_O.grad, torch.full((6,), 4.0))


@pytest.mark.usefixtures("tensorly_on_numpy")
def test_the_dense_matrix_equals_that_of_tensorly():
    problem = Problem("4+4")
    arrays = [core.detach().numpy() for core in problem.cores]
    want = tensorly.tt_to_tensor(arrays).reshape(problem.shape.in_width, problem.shape.out_width).T
    got = tt_to_dense(problem.cores, problem.shape.split)
    torch.testing.assert_close(got.detach(), torch.from_numpy(want.copy()), **CLOSE)


def test_a_wrong_width_is_named():
    problem = Problem("3+3")
    with pytest.raises(RuntimeError, match=r"width 24 \(shape \(2, 24\)\), but this .* takes 23"):
        problem.ours(torch.zeros(2, 24, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="one number, but this layer takes a width of 23"):
        problem.ours(torch.zeros((), dtype=torch.float64))


LAYER = (1, 2, 3), (3, 2, 2), (2, 3, 2), (2, 2, 1)
NEAR = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
THRESHOLD = 0.07
CLOSED = float(torch.tensor(THRESHOLD))  # which is above it, but in the dtype of the gates
BESIDE = float(torch.nextafter(torch.tensor(THRESHOLD), torch.tensor(1.0)))


def layer_of(gate=1.0, seed=0):
    """Batch, cores and gates, of which one has this number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, generator=generator)
    cores = [torch.randn(size, generator=generator) for size in LAYER]
    gates = [torch.ones(size[2]) for size in LAYER[:-1]]
    gates[1][0] = gate
    return [tensor.requires_grad_() for tensor in (x, *cores, *gates)]


def plainly(x, *params):
    return low_rank_linear(x, *contract_layer(params[:4], params[4:], 2, THRESHOLD, 4, 6), None)


def densely(x, *params):
    pairs = zip(params[:3], params[4:], strict=True)
    gated = [rank_gate(core, gate, THRESHOLD) for core, gate in pairs]
    return x @ tt_to_dense([*gated, params[3]], 2).T


@pytest.mark.parametrize("gate", [1.0, 0.1, BESIDE, CLOSED, 0.0, -1.0, math.nan])
def test_every_gate_is_what_it_is_for_the_reference(gate):
    found, wanted = layer_of(gate), layer_of(gate)
    out, reference = plainly(*found), densely(*wanted)
    torch.testing.assert_close(out, reference, **NEAR)
    out.square().sum().backward()
    reference.square().sum().backward()
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **NEAR)


@pytest.mark.parametrize(("gate", "asked"), [(1.0, 0), (0.1, 3)])
def test_autograd_is_asked_only_where_a_gate_may_be_closed(gate, asked):
    with torch.profiler.profile(acc_events=True) as profile:
        plainly(*layer_of(gate))
    assert sum(event.name == "aten::threshold" for event in profile.events()) == asked


def test_what_is_recorded_closes_gates_that_were_open_then():
    recorded = make_fx(plainly)(*layer_of())
    torch.testing.assert_close(recorded(*layer_of(0.0)), densely(*layer_of(0.0)))


def test_gradients_of_a_transformed_layer():
    x, *params = layer_of(0.0)
    found = torch.func.grad(lambda core: plainly(x, core, *params[1:]).sum())(params[0])
    (wanted,) = torch.autograd.grad(densely(x, *params).sum(), params[0])
    torch.testing.assert_close(found, wanted)
