"""GaLore as any optimizer is used: around others, resumed, scheduled, compiled and captured."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import comera

from ..states import assert_equal
from .updating import Counting


def make_layer():
    torch.manual_seed(0)
    return nn.Linear(32, 64)


def groups_of(layer, **settings):
    return [{"params": [layer.weight], **settings}, {"params": [layer.bias]}]


def train(layer, optimizer, first, last):
    for k in range(first, last):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(k))
        layer(x.to(layer.weight)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_another_default_device_changes_no_step():
    weights = []
    for default in ("cpu", "meta"):
        layer = make_layer()
        # SGD counts nothing: AdamW of torch 2.11 would put its count on the default device.
        optimizer = comera.GaLore(groups_of(layer, rank=4), torch.optim.SGD, lr=1e-2)
        layer(torch.ones(8, 32)).square().mean().backward()
        with torch.device(default):
            optimizer.step()
        weights.append(layer.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_state_goes_on_in_a_model_of_another_dtype(dtypes):
    layers, state = [], None
    for dtype in dtypes:
        layers.append(make_layer())
        optimizer = comera.GaLoreAdamW(groups_of(layers[-1].to(dtypes[0]), rank=4), lr=1e-2)
        train(layers[-1], optimizer, 0, 3)
        state = state or copy.deepcopy(optimizer.state_dict())
        layers[-1].to(dtype)
        optimizer = comera.GaLoreAdamW(groups_of(layers[-1], rank=4), lr=1e-2)
        optimizer.load_state_dict(copy.deepcopy(state))
        train(layers[-1], optimizer, 3, 6)
    weights = [layer.weight.double() for layer in layers]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("projected", [True, False])
def test_the_state_of_an_optimizer_that_projects_other_groups_is_refused(projected):
    layer = make_layer()
    plain = torch.optim.AdamW(groups_of(layer), lr=1e-3)
    galore = comera.GaLoreAdamW(groups_of(layer, rank=4), lr=1e-3)
    other = comera.GaLoreAdamW(groups_of(layer), lr=1e-3)
    for optimizer in (plain, galore, other):
        train(layer, optimizer, 0, 2)
    source, target = (galore, other) if projected else (plain, galore)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=r"group 0 is (not )?projected in the state and is"):
        target.load_state_dict(source.state_dict())
    assert_equal(target.state_dict(), before)
    weight = layer.weight.detach().clone()
    train(layer, target, 2, 3)
    assert not torch.equal(layer.weight, weight)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "inner",
    [
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam",
        "RMSprop", "SGD",
    ],
)  # fmt: skip
def test_weight_decay_is_that_of_every_optimizer_of_torch(inner, maximize):
    kind = getattr(torch.optim, inner)
    settings = {"lr": 1e-2, "weight_decay": 0.5}
    if maximize and inner != "Muon":
        settings["maximize"] = True
    if inner == "ASGD":
        settings["lambd"] = 30.0  # else its rate hardly differs from that which decays the weight
    layer, twin = make_layer(), make_layer()
    plain = kind([twin.weight], **settings)
    optimizer = comera.GaLore([{"params": [layer.weight], "rank": 32}], kind, **settings)
    train(layer, optimizer, 0, 4)
    train(twin, plain, 0, 4)
    assert optimizer.stand_ins.get(layer.weight) is None  # all of its directions are in the rank
    torch.testing.assert_close(layer.weight, twin.weight)


def test_schedules_that_change_the_momentum_too():
    layer = make_layer()
    optimizer = comera.GaLoreAdamW(groups_of(layer, rank=4))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    train(layer, optimizer, 0, 1)
    schedule.step()
    theirs = optimizer.inner.param_groups
    train(layer, optimizer, 1, 2)
    for mine, inner in zip(optimizer.param_groups, theirs, strict=True):
        assert (inner["lr"], inner["betas"]) == (mine["lr"], mine["betas"])
        assert mine["betas"][0] != 0.9


def test_parameters_without_a_group_are_one():
    layer = make_layer()
    optimizer = comera.GaLoreAdamW(layer.parameters(), lr=1e-3)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    before = layer.bias.detach().clone()
    train(layer, optimizer, 0, 1)
    assert not torch.equal(layer.bias, before)


def test_parameters_may_have_names():
    layer, twin = make_layer(), make_layer()
    named = [
        {"params": [("weight", layer.weight)], "rank": 4},
        {"params": [("bias", layer.bias)]},
    ]
    optimizer = comera.GaLoreAdamW(named, lr=1e-3)
    train(layer, optimizer, 0, 3)
    train(twin, comera.GaLoreAdamW(groups_of(twin, rank=4), lr=1e-3), 0, 3)
    assert torch.equal(layer.weight, twin.weight)
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]


def test_a_group_that_is_refused_leaves_no_trace():
    layer, twin = make_layer(), make_layer()
    optimizer, other = (
        comera.GaLoreAdamW([{"params": [one.weight], "rank": 4}], lr=1e-2) for one in (layer, twin)
    )
    new = nn.Parameter(torch.randn(20, 20))
    bent = nn.Parameter(torch.randn(20, 20)) * 2  # no leaf: the base class refuses it
    for group, message in (
        ({"params": [new, layer.weight], "rank": 4, "lr": 1.0}, "in more than one parameter group"),
        ({"params": [layer.weight]}, "in more than one parameter group"),
        ({"params": [new, new], "rank": 4}, "is twice in a parameter group"),
        ({"params": [new, nn.Parameter(torch.zeros(3))], "rank": 4}, "only matrices"),
        ({"params": [new, bent], "rank": 4}, "non-leaf"),
        ({"params": [("new", new)], "rank": 4}, "with/without names"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1
        assert optimizer.stand_ins.get(new) is None
    train(layer, optimizer, 0, 3)
    train(twin, other, 0, 3)
    assert torch.equal(layer.weight, twin.weight)
    assert_equal(optimizer.state_dict(), other.state_dict())
    optimizer.add_param_group({"params": [new], "rank": 4})
    assert optimizer.stand_ins.get(new) is not None


@pytest.mark.parametrize("rank", [{}, {"rank": 4}], ids=str)
def test_a_parameter_that_is_given_twice_is_refused(rank):
    weight = make_layer().weight
    for groups, message in (
        ([{"params": [weight, weight], **rank}], r"\(64, 32\) is twice in a parameter group"),
        ([{"params": [weight], **rank}, {"params": [weight]}], "in more than one parameter group"),
        ([{"params": [weight], **rank}, {"params": [weight], **rank}], "in more than one"),
    ):
        with pytest.raises(ValueError, match=message):
            comera.GaLoreAdamW(groups)


def test_optimizers_that_keep_count_in_their_groups_are_refused():
    layer = make_layer()
    optimizer = comera.GaLore(groups_of(layer, rank=4), Counting, lr=1e-2)
    before = layer.weight.detach().clone()
    with pytest.raises(TypeError, match=r"Counting changes 'k' .* use Counting without GaLore"):
        train(layer, optimizer, 0, 1)
    assert torch.equal(layer.weight, before)
    comera.OptimizerInBackward(optimizer)
    with pytest.raises(TypeError, match="changes 'k'"):
        layer(torch.randn(8, 32)).square().mean().backward()


def test_a_scheduler_of_the_inner_optimizer_is_no_count():
    layer = make_layer()
    optimizer = comera.GaLoreAdamW(groups_of(layer, rank=4))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.inner, max_lr=0.1, total_steps=10)
    optimizer.inner.register_step_post_hook(lambda *_: schedule.step())
    train(layer, optimizer, 0, 3)
    assert schedule.last_epoch == 3


def test_hooks_see_the_whole_state_and_change_what_is_loaded():
    layer = make_layer()
    source = comera.GaLoreAdamW(groups_of(layer, rank=4), lr=0.5)
    train(layer, source, 0, 3)
    state = source.state_dict()
    wanted = copy.deepcopy(state)
    for entries in wanted["state"].values():
        entries["exp_avg"].zero_()
    twin = make_layer()
    optimizer = comera.GaLoreAdamW(groups_of(twin, rank=4))
    seen = []

    def zeroed(_, given):
        assert given["param_groups"][0]["rank"] == 4
        parts = given["state"].items()
        return given | {"state": {k: e | {"exp_avg": e["exp_avg"] * 0} for k, e in parts}}

    optimizer.register_load_state_dict_pre_hook(zeroed)
    optimizer.register_load_state_dict_post_hook(
        lambda one: seen.append(copy.deepcopy(one.state_dict()))
    )
    optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict(), wanted)
    assert len(seen) == 1
    assert_equal(seen[0], wanted)
    assert state["state"][0]["exp_avg"].any()


def test_a_hook_that_raises_leaves_all_as_it_was():
    layer = make_layer()
    optimizer = comera.GaLoreAdamW(groups_of(layer, rank=4), lr=0.5)
    train(layer, optimizer, 0, 1)
    state = copy.deepcopy(optimizer.state_dict())
    train(layer, optimizer, 1, 3)
    before = copy.deepcopy(optimizer.state_dict())

    def refuse(*_):
        raise RuntimeError("not this one")

    handle = optimizer.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict(), before)
    handle.remove()
    optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict(), state)


def run(layer, optimizer, first=0, last=3):
    train(layer, optimizer, first, last)
    return [p.detach().clone() for p in layer.parameters()]


def test_the_state_that_is_replaced_is_the_one_that_is_used():
    """A state as ZeroRedundancyOptimizer loads it."""
    layer, twin = make_layer(), make_layer()
    optimizer, other = (comera.GaLoreAdamW(groups_of(x, rank=4), lr=0.1) for x in (layer, twin))
    run(layer, optimizer)
    twin.load_state_dict(layer.state_dict())
    for param, its in zip(twin.parameters(), layer.parameters(), strict=True):
        other.state[param] = copy.deepcopy(optimizer.state[its])
    assert not other.inner.state
    for mine, its in zip(run(twin, other, 3, 6), run(layer, optimizer, 3, 6), strict=True):
        assert torch.equal(mine, its)
    optimizer.state.clear()
    train(layer, optimizer, 6, 7)
    assert [optimizer.state[p]["step"] for p in layer.parameters()] == [1, 1]


def test_hooks_see_one_state_and_one_step():
    layer, seen = make_layer(), []
    optimizer = comera.GaLoreAdamW(groups_of(layer, rank=4))
    handle = register_optimizer_step_post_hook(lambda one, *_: seen.append(one))
    optimizer.inner.register_step_post_hook(lambda one, *_: seen.append(one))
    train(layer, optimizer, 0, 1)
    handle.remove()
    assert seen == [optimizer.inner, optimizer]
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(set(state["state"][0])))
    optimizer.state["ema"] = 0.5
    state = optimizer.state_dict()
    assert seen[-1] == {"step", "exp_avg", "exp_avg_sq", "galore_step", "galore_right"}
    again = comera.GaLoreAdamW(groups_of(layer, rank=4))
    again.register_load_state_dict_post_hook(lambda one: one.state[layer.weight]["exp_avg"].zero_())
    again.load_state_dict(state)
    assert again.state["ema"] == 0.5
    train(layer, again, 1, 1)
    assert not again.state_dict()["state"][0]["exp_avg"].any()


@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.AdamW, comera.CAME])
def test_a_key_that_a_state_lacks_has_its_default(inner):
    layer, twin = make_layer(), make_layer()
    optimizer, other = (comera.GaLore(groups_of(x, rank=4), inner, lr=0.1) for x in (layer, twin))
    run(layer, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        for key in ("decoupled_weight_decay", "maximize", "capturable", "update_proj_gap"):
            group.pop(key, None)
        group["of_a_newer_torch"] = None
    twin.load_state_dict(layer.state_dict())
    other.load_state_dict(state)
    for mine, its in zip(run(twin, other, 3, 6), run(layer, optimizer, 3, 6), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, comera.GaLoreAdamW, comera.MuonAdamW])
def test_parameters_that_torch_refuses(kind):
    weight = make_layer().weight
    for params, error, message in (
        ([], ValueError, "optimizer got an empty parameter list"),
        (weight, TypeError, "should be an iterable of Tensors or dicts"),
        ([{"params": {weight}}], TypeError, "need to be organized in ordered collections"),
    ):
        with pytest.raises(error, match=message):
            kind(params)


GAP = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))


def make_optimizer(model: nn.Module, **settings) -> comera.GaLore:
    groups = comera.galore_param_groups(model, 1e-2, 6, update_proj_gap=GAP)
    return comera.GaLore(groups, torch.optim.AdamW, **settings)


def backward(model, k):
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(k))
    device = next(model.parameters()).device
    (model(x.to(device)) - x.to(device)).square().mean().backward()


@pytest.mark.slow
def test_compiled_steps_are_the_same_and_compiled_once():
    torch.compiler.reset()
    models = [make_model(), make_model()]
    optimizers = [make_optimizer(model, lr=torch.tensor(1e-2)) for model in models]
    compiled = torch.compile(optimizers[1].step)
    torch._dynamo.utils.counters.clear()
    for k in range(2 * GAP + 1):
        for model, step in zip(models, (optimizers[0].step, compiled), strict=True):
            model.zero_grad()
            backward(model, k)
            step()
        for ours, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("proj_type", ["std", "full"])
def test_a_step_under_autocast_is_the_same(proj_type):
    moved = []
    for enabled in (False, True):
        layer = make_layer()
        optimizer = comera.GaLoreAdamW(groups_of(layer, rank=4, proj_type=proj_type))
        layer(torch.ones(2, 32)).square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
        moved.append(layer.weight)
        assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(*moved)
