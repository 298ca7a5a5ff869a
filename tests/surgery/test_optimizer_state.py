import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import comera
from comera.surgery.truncate import slice_state_
from tests.peers import peer


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. (arXiv 2405.15682), whose state ``z`` is a copy of the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                z = state.setdefault("z", param.clone())
                state["step"] = state.get("step", 0) + 1
                weight = 1 / state["step"]
                param.lerp_(z, weight)
                param.add_(param.grad, alpha=group["lr"] * (0.9 * (1 - weight) - 1))
                z.sub_(param.grad, alpha=group["lr"])


OPTIMIZERS = {
    "sgd": lambda p: SGD(p, 0.1),
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: Adam(p, 0.1),
    "adamw": lambda p: AdamW(p, 0.1, weight_decay=0.1),
    "foreach": lambda p: AdamW(p, 0.1, foreach=True),
    "fused": lambda p: AdamW(p, 0.1, fused=True),
    "amsgrad": lambda p: AdamW(p, 0.1, amsgrad=True),
    "nadam": lambda p: NAdam(p, 0.1),
    "adamax": lambda p: Adamax(p, 0.1),
    "rmsprop": lambda p: RMSprop(p, 0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, 0.1),
    "adadelta": lambda p: Adadelta(p, 0.1),
    "adafactor": lambda p: Adafactor(p, 0.1),
    "radam": lambda p: RAdam(p, 0.1),
    "rprop": lambda p: Rprop(p, 0.1),
    "asgd": lambda p: ASGD(p, 0.1, t0=1),
    "schedule-free": lambda p: ScheduleFree(p, 0.1),
}
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", "col_var"}
POWER = dict.fromkeys(["exp_avg", "momentum_buffer", "grad_avg", "exp_inf"], 1)
POWER |= dict.fromkeys(SQUARES, 2)
"""Powers of the gradient's unit in which each optimizer state is measured."""


@pytest.fixture(params=OPTIMIZERS)
def build(request):
    return OPTIMIZERS[request.param]


def train(param, optimizer, steps=3):
    """Some steps, and one more gradient that waits for its step."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps + 1):
        param.grad = torch.randn(param.shape, generator=generator)
        if step < steps:
            optimizer.step()


def trained(build, shape):
    param = nn.Parameter(torch.randn(shape))
    optimizer = build([param])
    train(param, optimizer)
    return param, optimizer


def snapshot(param, optimizer):
    state = {k: v.clone() for k, v in optimizer.state[param].items() if torch.is_tensor(v)}
    return param.detach().clone(), param.grad.clone(), state


def rows_of(tensor, like, keep):
    for dim, indices in keep.items():
        if tensor.shape[dim] == like.shape[dim]:
            tensor = tensor.index_select(dim, indices)
    return tensor


KEEPS = {
    "some of the last": ((3, 2, 5), {2: [0, 3]}),
    "both ends": ((3, 2, 5), {0: [2], 2: [4, 1, 0]}),
    "one of the last": ((3, 2, 5), {2: [3]}),
    "none of the last": ((3, 2, 5), {2: []}),
    "all of them": ((3, 2, 5), {2: [0, 1, 2, 3, 4]}),
    "narrow": ((1, 4, 5), {2: [1]}),
    "a gate": ((6,), {0: [0, 5]}),
    "a gate to nothing": ((1,), {0: []}),
    "a core of one entry to nothing": ((1, 1, 1), {0: [], 2: []}),
}


@pytest.mark.parametrize("case", KEEPS)
def test_parameter_gradient_and_state_are_cut_alike(build, case):
    shape, keep = KEEPS[case]
    keep = {dim: torch.tensor(rows, dtype=torch.int64) for dim, rows in keep.items()}
    param, optimizer = trained(build, shape)
    value, grad, state = snapshot(param, optimizer)
    group, held = optimizer.param_groups[0]["params"], optimizer.state[param]
    slice_state_(param, keep, None, optimizer)
    assert group[0] is param
    assert optimizer.state[param] is held
    assert torch.equal(param, rows_of(value, value, keep))
    assert torch.equal(param.grad, rows_of(grad, value, keep))
    for key, before in state.items():
        want = rows_of(before, value, keep) if before.dim() == value.dim() else before
        assert torch.equal(held[key], want), key
    if isinstance(optimizer, Adafactor) and not param.numel():
        return  # torch's Adafactor divides by the number of entries
    train(param, optimizer)  # the optimizer still fits
    assert torch.isfinite(param).all()


@pytest.mark.parametrize("keep", [[0, 3, 4], [2], [0, 1, 2, 3, 4]], ids=str)
def test_gradient_and_moments_are_scaled_with_the_parameter(build, keep):
    keep, scale = {2: torch.tensor(keep)}, torch.tensor([0.5, 2.0, 4.0, 0.0, 0.1])
    scale = scale[keep[2]]
    inverse = torch.where(scale == 0, 0, 1 / scale)
    param, optimizer = trained(build, (3, 2, 5))
    value, grad, state = snapshot(param, optimizer)
    slice_state_(param, keep, scale, optimizer)
    torch.testing.assert_close(param.detach(), rows_of(value, value, keep) * scale)
    torch.testing.assert_close(param.grad, rows_of(grad, value, keep) * inverse)
    for key, before in state.items():
        want = rows_of(before, value, keep) if before.dim() == value.dim() else before
        if key == "row_var":  # only its ratios count, and they have no rank dimension
            continue
        summed_steps = key == "momentum_buffer" and "square_avg" in state  # RMSprop's, without unit
        if key in POWER and not summed_steps:
            want = want * inverse ** POWER[key]
        if key in ("ax", "z"):  # in the units of the parameter
            want = want * scale
        torch.testing.assert_close(optimizer.state[param][key], want, msg=key)


@pytest.mark.parametrize("name", ["adam", "amsgrad", "rmsprop", "adagrad", "momentum", "fused"])
def test_moments_equal_those_of_training_in_the_new_units(name):
    """Gradients of ``L(s * w)`` by w are ``s`` times those by ``s * w``: cut and rescaled, the
    moments must be what the same gradients would have left in the new units from the start."""
    scale = torch.tensor([0.5, 2.0, 4.0])
    old, new = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    one, other = OPTIMIZERS[name]([old]), OPTIMIZERS[name]([new])
    for step in range(4):
        gradient = torch.randn(2, 3)
        old.grad, new.grad = gradient * scale, gradient
        if step < 3:
            one.step()
            other.step()
    slice_state_(old, {}, scale, one)
    torch.testing.assert_close(old.grad, new.grad)
    for key, want in other.state[new].items():
        if torch.is_tensor(want):
            # eps under the root is not in anyone's units, but nothing here stores it
            torch.testing.assert_close(one.state[old][key], want, msg=key)


def test_training_in_the_same_units_goes_on_as_if_nothing_had_happened(build):
    """What is cut away leaves no trace on what stays."""
    whole = nn.Parameter(torch.randn(4, 6))
    optimizer = build([whole])
    if isinstance(optimizer, Adafactor):
        pytest.skip("its factored moments and its step size average over all entries")
    small = nn.Parameter(whole.detach()[:, :3].clone())
    twin = build([small])
    for step in range(6):
        small.grad = torch.randn(4, 3)
        others = torch.randn(4, whole.shape[1] - 3)
        whole.grad = torch.cat([small.grad, others], 1)
        optimizer.step()
        twin.step()
        if step == 2:
            slice_state_(whole, {1: torch.arange(3)}, None, optimizer)
    torch.testing.assert_close(whole, small)


def test_state_keeps_its_type():
    param = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))
    optimizer = Adam([param])
    param.grad = torch.randn_like(param)
    optimizer.step()
    slice_state_(param, {1: torch.tensor([0, 2])}, torch.tensor([0.5, 0.3]), optimizer)
    held = [param, param.grad, *(optimizer.state[param][k] for k in ("exp_avg", "exp_avg_sq"))]
    assert {t.dtype for t in held} == {torch.bfloat16}
    assert all(t.shape == (3, 2) and t.is_contiguous() for t in held)


def test_eight_bits_of_moments_are_packed_as_they_were():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own making
        low_bit = peer("torchao.optim")
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = low_bit.AdamW8bit([param])
    param.grad = torch.randn_like(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    before = {key: optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")}
    slice_state_(param, {1: torch.arange(64)}, None, optimizer)
    for key, moment in before.items():
        cut = optimizer.state[param][key]
        assert (type(cut), cut.signed) == (type(moment), moment.signed)
        wanted = moment.dequantize()[:, :64]
        error = (cut.dequantize() - wanted).norm() / wanted.norm()
        assert error < 0.02


def test_a_loss_that_is_still_held_does_not_remember_the_old_shape():
    param = nn.Parameter(torch.randn(3, 5))
    held = param.square().sum()
    held.backward()
    slice_state_(param, {1: torch.tensor([0, 2])})
    param.square().sum().backward()
    assert held.requires_grad
    assert param.grad.shape == (3, 2)


def test_without_optimizer_gradient_or_state():
    param = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    untouched = Adam([param])
    for optimizer in (None, untouched):
        slice_state_(param, {1: torch.tensor([0, 1])}, None, optimizer)
    assert torch.equal(param.detach(), torch.tensor([[0.0, 1.0], [3.0, 4.0]]))
    assert param.grad is None
    assert not untouched.state


class Strange(Optimizer):
    """Keeps one vector for each parameter, however many dimensions that has."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            self.state[param]["sketch"] = torch.zeros(7)


def test_state_that_does_not_follow_the_parameter_is_refused():
    param = nn.Parameter(torch.randn(3, 5))
    param.grad = torch.ones_like(param)
    optimizer = Strange([param])
    optimizer.step()
    before = copy.deepcopy(param)
    with pytest.raises(ValueError, match=r"'sketch' of Strange has shape \(7,\).*\(3, 5\)"):
        slice_state_(param, {1: torch.tensor([0])}, None, optimizer)
    assert torch.equal(param, before)
    assert param.grad.shape == (3, 5)


FUSED = {
    "adamw": lambda p: AdamW(p, 0.1, fused=True),
    "muon": lambda p: comera.MuonAdamW(p, 0.1, fused=True),
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: Adagrad(p, 0.1, fused=True),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("build", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize(("before", "after"), [(2, 8), (8, 2)])
def test_a_fused_step_does_not_leave_state_of_other_ranks(build, before, after, in_backward):
    def step(model, optimizer):
        model(torch.ones(3, 36)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def of_rank(rank):
        model = comera.TTLinear(36, 36, rank=rank)
        optimizer = build(model.parameters())
        optimizer = comera.OptimizerInBackward(optimizer) if in_backward else optimizer
        step(model, optimizer)
        return model, optimizer

    model, optimizer = of_rank(before)
    other, its_optimizer = of_rank(after)
    model.load_state_dict(other.state_dict())
    weights = copy.deepcopy(model.state_dict())
    said = r"has shape \(.*\), and its parameter \(.*\), as where .* load the optimizer's state"
    with pytest.raises(ValueError, match=said):
        step(model, optimizer)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    optimizer.discard_() if in_backward else optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))
    step(model, optimizer)
    step(other, its_optimizer)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("build", FUSED.values(), ids=FUSED)
def test_nor_a_state_of_other_ranks_that_is_loaded_later(build):
    layers = [comera.TTLinear(36, 36, rank=rank) for rank in (2, 8)]
    optimizers = [build(layer.parameters()) for layer in layers]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer(torch.ones(3, 36)).square().sum().backward()
        optimizer.step()
    weights = copy.deepcopy(layers[0].state_dict())
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    with pytest.raises(ValueError, match=r"has shape \(.*\), and its parameter \(.*\)"):
        optimizers[0].step()
    torch.testing.assert_close(layers[0].state_dict(), weights, rtol=0, atol=0)
