import copy

import pytest
import torch

import comera
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_

from .conftest import loss_fn, make_model, prune_some, train


@pytest.mark.parametrize("absorb", [True, False])
def test_the_function_stays_and_the_parameters_shrink(model, batch, absorb):
    prune_some(model)
    before = loss_fn(model, batch)
    held = [id(param) for param in model.parameters()]
    ranks = {name: layer.live_ranks for name, layer in tensor_trains(model).items()}
    comera.truncate_(model, absorb=absorb)
    torch.testing.assert_close(loss_fn(model, batch), before, rtol=1e-12, atol=0)
    assert [id(param) for param in model.parameters()] == held
    assert {name: layer.ranks for name, layer in tensor_trains(model).items()} == ranks
    gates = [g for layer in tensor_trains(model).values() for g in layer.gates]
    assert all((gate == 1).all() for gate in gates) == absorb


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-2),
        lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    ],
    ids=["adamw", "fused-amsgrad", "sgd"],
)
def test_training_goes_on_as_if_nothing_had_happened(batch, make):
    masked = make_model()
    prune_some(masked)
    optimizer = make(masked.parameters())
    train(masked, optimizer, batch, 3)
    cut = copy.deepcopy(masked)
    cut_optimizer = make(cut.parameters())
    cut_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    comera.truncate_(cut, cut_optimizer, absorb=False)
    train(masked, optimizer, batch, 5)
    train(cut, cut_optimizer, batch, 5)
    torch.testing.assert_close(loss_fn(cut, batch), loss_fn(masked, batch), rtol=1e-9, atol=0)


def test_absorbed_gates_keep_the_direction_of_the_next_step(batch):
    """Cores that took in their gate move, to first order, as the gated ones did."""
    model = make_model()
    prune_some(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    train(model, optimizer, batch, 2)
    core = next(iter(tensor_trains(model).values())).cores[0]
    gate = next(iter(tensor_trains(model).values())).gates[0].detach().clone()
    velocity = optimizer.state[core]["momentum_buffer"].clone()
    comera.truncate_(model, optimizer)
    kept = [k for k in range(len(gate)) if gate[k] > 0.01]
    want = velocity[..., kept] / gate[kept]
    torch.testing.assert_close(optimizer.state[core]["momentum_buffer"], want)
    train(model, optimizer, batch, 1)


@pytest.mark.parametrize(
    ("make", "powers"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-9, momentum=0.9), {"momentum_buffer": 1}),
        (lambda p: torch.optim.AdamW(p, lr=1e-9), {"exp_avg": 1, "exp_avg_sq": 2}),
    ],
    ids=["sgd", "adamw"],
)
def test_state_of_gates_that_become_ones_is_of_their_new_scale(model, batch, make, powers):
    """A gate of ``g`` that is counted as one from now on has a gradient ``g`` times as large."""
    prune_some(model)
    optimizer = make(model.parameters())
    train(model, optimizer, batch, 2)
    gate = model[1].gates[0]
    old, before = gate.detach().clone(), copy.deepcopy(optimizer.state[gate])
    comera.truncate_(model, optimizer)
    kept = old > model[1].prune_below
    assert old[kept].std() > 0.05
    for name, power in powers.items():
        torch.testing.assert_close(
            optimizer.state[gate][name], before[name][kept] * old[kept] ** power
        )
    assert optimizer.state[gate].keys() == before.keys()


def test_a_vanished_layer_leaves_its_bias(model, batch):
    layer = model[1]
    with torch.no_grad():
        layer.gates[1].zero_()
    before = loss_fn(model, batch)
    kept = copy.deepcopy(model)
    comera.truncate_(model, min_rank=0)
    assert layer.ranks == (0, 0, 0)
    assert sum(core.numel() for core in layer.cores) == 0
    torch.testing.assert_close(loss_fn(model, batch), before)
    loss_fn(model, batch).backward()
    comera.truncate_(kept, min_rank=1)
    assert kept[1].ranks[1] == 1
    torch.testing.assert_close(loss_fn(kept, batch), before)
    comera.truncate_(model, min_rank=0)  # once more changes nothing


@pytest.mark.parametrize("share", [0.9, 0.5, 0.12])
def test_a_budget_is_met(model, batch, share):
    budget = share * sum(layer.shape.num_params for layer in tensor_trains(model).values())
    closed = prune_to_(tensor_trains(model), budget)
    before = loss_fn(model, batch)
    comera.truncate_(model)
    cores = sum(c.numel() for layer in tensor_trains(model).values() for c in layer.cores)
    assert cores <= budget
    assert all(value == 1 for value in closed)
    assert closed
    torch.testing.assert_close(loss_fn(model, batch), before)
    assert all(min(layer.ranks) >= 1 for layer in tensor_trains(model).values())


def test_the_least_important_rank_goes_first(model):
    layer = model[1]
    with torch.no_grad():
        layer.cores[0][..., 2] *= 1e-4
    size = sum(m.shape.num_params for m in tensor_trains(model).values())
    prune_to_(tensor_trains(model), size - 1)
    assert layer.gates[0][2] == 0
    assert sum(int((g == 0).sum()) for m in tensor_trains(model).values() for g in m.gates) == 1


def test_an_impossible_budget_is_named(model):
    with pytest.raises(ValueError, match="cannot fit 3 entries"):
        prune_to_(tensor_trains(model), 3)
    prune_to_(tensor_trains(make_model()), 0, min_rank=0)


def test_min_rank_is_checked(model):
    with pytest.raises(ValueError, match="min_rank=2"):
        comera.truncate_(model, min_rank=2)


def test_small_ranks_that_fit_again_beside_a_large_one_stay():
    small = comera.TTLinear(16, 16, rank=16, order=1)
    large = comera.TTLinear(256, 256, rank=8, order=1)
    with torch.no_grad():
        small.cores[0][..., 4:] *= 1e-3  # twelve that hardly matter, 32 entries each
    model = torch.nn.Sequential(small, large)
    size = sum(core.numel() for layer in model for core in layer.cores)
    closed = prune_to_(tensor_trains(model), size - 500)
    assert len(closed) == 1
    assert small.live_ranks == (16,)
    assert large.live_ranks == (7,)  # 512 entries
    closed = prune_to_(tensor_trains(model), size - 600)
    assert len(closed) == 3
    assert small.live_ranks == (13,)
    assert (small.gates[0][4:] == 0).sum() == 3


def test_what_every_layer_keeps():
    """Though none of its ranks is of any importance."""
    torch.manual_seed(0)
    layers = [comera.TTLinear(32, 32, rank=16, order=1) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    importance = {id(m.gates[0]): torch.full((16,), float(k)) for k, m in enumerate(layers)}
    budget = 24 * 64  # half of what there is

    def left(**settings):
        cut = copy.deepcopy(model)
        trains = tensor_trains(cut).values()
        of_cut = {
            id(a.gates[0]): importance[id(b.gates[0])] for a, b in zip(trains, layers, strict=True)
        }
        prune_to_(tensor_trains(cut), budget, importance=of_cut, **settings)
        return [layer.live_ranks[0] for layer in trains]

    assert left() == left(min_keep=0.0) == [1, 7, 16]
    assert left(min_keep=0.5) == [4, 4, 16]
    assert left(min_keep=1.0) == [8, 8, 8]


def test_what_cannot_be_kept_is_not():
    """Five ranks are not the same for three layers: one goes below its share."""
    model = torch.nn.Sequential(*(comera.TTLinear(32, 32, rank=4, order=1) for _ in range(3)))
    prune_to_(tensor_trains(model), 5 * 64, min_keep=1.0)
    assert sorted(layer.live_ranks[0] for layer in tensor_trains(model).values()) == [1, 2, 2]


def test_a_layer_that_has_vanished_stays_so(model, batch):
    with torch.no_grad():
        model[1].gates[0].zero_()
    comera.truncate_(model, min_rank=0)
    assert 0 in model[1].ranks
    before = loss_fn(model, batch)
    assert comera.truncate_(model)["1"] == (model[1].ranks, model[1].ranks)
    ranks = comera.ImportancePruning(model, 0.7, 2)
    groups = comera.param_groups(model, 0.0, gate_lr=0.0)
    step = comera.TrainStep(model, loss_fn, torch.optim.AdamW(groups), ranks)
    for _ in range(2):
        step(batch)
    torch.testing.assert_close(loss_fn(model, batch), before)
    assert ranks.finish_()["size"] <= ranks.target_size
    model[1].reset_parameters()
    assert 0 in model[1].ranks


@pytest.mark.parametrize("what", ["cores", "gates"])
def test_what_is_not_finite_is_not_cut(model, what):
    """A gate that is NaN would count as closed, and a model that has diverged as a sound one."""
    ranks = model[3].ranks
    with torch.no_grad():
        getattr(model[3], what)[0].fill_(float("nan"))
    for cut in (
        lambda: comera.truncate_(model),
        lambda: prune_to_(tensor_trains(model), 1000),
        lambda: comera.ImportancePruning(model, 0.5, 1).finish_(),
    ):
        with pytest.raises(ValueError, match=f"the {what} of 3 hold numbers that are not finite"):
            cut()
        assert model[3].ranks == ranks


def test_an_optimizer_with_one_history_of_all_is_refused(model, batch):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    prune_some(model)
    before = copy.deepcopy(model.state_dict())
    for change in (comera.truncate_, comera.canonicalize_):
        with pytest.raises(ValueError, match="LBFGS has one history of all parameters"):
            change(model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    comera.truncate_(model)  # with a new one, made afterwards
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    optimizer.step(closure)


def test_an_optimizer_of_some_parameters_is_said(batch, caplog):
    """Another one that holds the rest would fail in its next step, in torch's words."""
    model = make_model()
    prune_some(model)
    trains = tensor_trains(model).values()
    cores = torch.optim.Adam([core for layer in trains for core in layer.cores])
    comera.truncate_(model, torch.optim.Adam(model.parameters()))
    assert "the optimizer holds" not in caplog.text
    comera.truncate_(model, cores)
    count = sum(len(layer.cores) + len(layer.gates) for layer in trains)
    held = len(cores.param_groups[0]["params"])
    assert f"the optimizer holds {held} of {count} cores and gates" in caplog.text
