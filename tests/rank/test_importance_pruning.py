"""Ranks chosen by the importance that their gates' gradients tell."""

import copy
import pickle
import warnings

import pytest
import torch

import comera
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_
from comera.train.step import NonFiniteLossError

from .conftest import loss_fn, make_model


def gates_of(model):
    return [gate for layer in tensor_trains(model).values() for gate in layer.gates]


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 120, (16, 3), generator=generator) for _ in range(count)]


def optimizer_for(model, gate_lr=0.1):
    return torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=gate_lr))


def learn(model, ranks, steps, optimizer=None, **settings):
    optimizer = optimizer or optimizer_for(model)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks, **settings)
    for batch in batches(steps):
        step(batch)
    return optimizer


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)  # they are small numbers


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"in_backward": True}, {"in_backward": True, "accumulate": 4}],
    ids=str,
)
def test_the_mean_square_of_gate_times_gradient(model, settings):
    """Of the whole batch, the gate as it was when the gradient was taken."""
    ranks = comera.ImportancePruning(model, 0.5, 10)
    optimizer, twin = optimizer_for(model), copy.deepcopy(model)
    if settings.pop("in_backward", False):
        optimizer = comera.OptimizerInBackward(optimizer)
    other, want = optimizer_for(twin), 0.0
    step = comera.TrainStep(model, loss_fn, optimizer, ranks, **settings)
    for batch in batches(4):
        step(batch)
        loss_fn(twin, batch).backward()
        lost = torch.cat([gate.grad * gate.detach() for gate in gates_of(twin)])
        want = 0.98 * want + 0.02 * lost.square()
        other.step()
        other.zero_grad()
    assert gates_of(model)[0].std() > 0.05  # which is not one everywhere
    torch.testing.assert_close(ranks.state_dict()["importance"], want, rtol=1e-4, atol=0)


def test_to_first_order_it_is_what_the_loss_would_lose(model, batch):
    gates = gates_of(model)
    seen = comera.ImportancePruning(model, 0.5, 9)
    loss = loss_fn(model, batch)
    loss.backward()
    seen.follow_(loss)
    found = (seen.state_dict()["importance"] / 0.02).sqrt()
    actual = []
    with torch.no_grad():
        for gate in gates:
            for k in range(len(gate)):
                gate[k] -= 1e-4
                actual.append(abs(float(loss_fn(model, batch) - loss)) / 1e-4)
                gate[k] += 1e-4
    torch.testing.assert_close(found, torch.tensor(actual, dtype=found.dtype), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_train_the_loss_alone_and_the_cut_comes_at_once(compile):
    model, twin = make_model(), make_model()
    ranks = comera.ImportancePruning(model, 0.4, 8, canonical=False)
    optimizer = learn(model, ranks, 8, compile=compile)
    learn(twin, None, 8)
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert ranks.stage == "done"
    outcome = ranks.finish_(optimizer)
    cores = sum(c.numel() for layer in tensor_trains(model).values() for c in layer.cores)
    assert outcome["size"] == cores <= outcome["target_size"]
    assert outcome["size"] > 0.9 * outcome["target_size"]  # what still fits has stayed
    assert not any(gate._backward_hooks for gate in gates_of(model))
    learn(model, ranks, 3, optimizer)


def test_what_is_least_important_goes_first(model):
    importance = {id(gate): torch.ones(len(gate)) for gate in gates_of(model)}
    layer = model[1]
    importance[id(layer.gates[0])][2] = 1e-6
    size = sum(m.shape.num_params for m in tensor_trains(model).values())
    prune_to_(tensor_trains(model), size - 1, importance=importance)
    assert layer.gates[0][2] == 0
    assert sum(int((gate == 0).sum()) for gate in gates_of(model)) == 1


def test_of_equal_importance_ranks_that_cost_more_go_first():
    cheap, costly = (comera.TTLinear(width, width, rank=8, order=1) for width in (16, 64))
    model = torch.nn.Sequential(cheap, costly)
    importance = {id(gate): torch.ones(8) for gate in gates_of(model)}
    prune_to_(tensor_trains(model), 8 * 32 + 5 * 128, importance=importance)
    assert (cheap.live_ranks, costly.live_ranks) == ((8,), (5,))


@pytest.mark.parametrize(("min_keep", "left"), [(0.0, (1, 7)), (0.5, (2, 6)), (1.0, (4, 4))])
def test_a_layer_without_importance_keeps_its_share_of_an_equal_cut(min_keep, left):
    layers = [comera.TTLinear(64, 64, rank=8, order=1) for _ in range(2)]
    importance = {id(layers[0].gates[0]): torch.full((8,), 1e-9)}
    importance[id(layers[1].gates[0])] = torch.ones(8)
    named = tensor_trains(torch.nn.Sequential(*layers))
    prune_to_(named, 8 * 128, importance=importance, min_keep=min_keep)
    assert tuple(layer.live_ranks[0] for layer in layers) == left


def test_a_rank_that_fits_to_the_entry_is_opened_again():
    cheap, costly = (comera.TTLinear(width, width, rank=8, order=1) for width in (16, 64))
    model = torch.nn.Sequential(cheap, costly)
    importance = {id(gate): torch.ones(8) for gate in gates_of(model)}
    importance[id(cheap.gates[0])][3], importance[id(costly.gates[0])][5] = 1e-9, 1e-6
    for budget, left in ((8 * 32 + 7 * 128, (8, 7)), (8 * 32 + 7 * 128 - 1, (7, 7))):
        with torch.no_grad():
            [gate.fill_(1) for gate in gates_of(model)]
        prune_to_(tensor_trains(model), budget, importance=importance)
        assert (cheap.live_ranks[0], costly.live_ranks[0]) == left


def test_what_ranks_were_worth_before_canonical_form_does_not_choose_among_those_of_it(model):
    ranks = comera.ImportancePruning(model, 0.5, 10)
    optimizer = learn(model, ranks, 4)
    assert ranks.state_dict()["importance"].any()
    step = comera.TrainStep(model, loss_fn, optimizer, ranks)
    step(batches(1)[0])  # half way: the ranks are new ones
    assert not ranks.state_dict()["importance"].any()


def test_a_run_goes_back_to_before_its_cut():
    model, twin = make_model(), make_model()
    ranks = comera.ImportancePruning(model, 0.5, 6)
    optimizer = learn(model, ranks, 4)
    state, weights = copy.deepcopy(ranks.state_dict()), copy.deepcopy(model.state_dict())
    learn(model, ranks, 2, optimizer)
    first = ranks.finish_(optimizer)
    model.load_state_dict(weights)
    ranks.load_state_dict(state)
    assert ranks.stage == "early"
    torch.testing.assert_close(ranks.state_dict()["importance"], state["importance"])
    others = comera.ImportancePruning(twin, 0.5, 6)
    twin.load_state_dict(weights)
    others.load_state_dict(state)
    outcomes = [r.finish_(learn(m, r, 2)) for m, r in ((model, ranks), (twin, others))]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["target_size"] == first["target_size"]
    again = [[layer.ranks for layer in tensor_trains(m).values()] for m in (model, twin)]
    assert again[0] == again[1]


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"clip_norm": 1.0}], ids=str)
def test_a_step_that_is_refused_leaves_nothing_behind(settings):
    """Neither the sound half of its batch, nor gradients whose norm is not finite."""
    model, twin = make_model(), make_model()

    def spoilt(model, batch):
        loss = loss_fn(model, batch)
        if "clip_norm" not in settings:
            return loss * float("nan") if (batch[-1] == spoil[-1]).all() else loss
        hurt = (batch == spoil).all() if batch.shape == spoil.shape else False
        return loss + (0 * model[4].bias.sum().abs().sqrt() if hurt else 0)

    first, spoil, last = batches(3)
    with torch.no_grad():
        for m in (model, twin):
            m[4].bias.zero_()  # where the root has no gradient
    seen = []
    for m, given in ((model, [first, spoil, last]), (twin, [first, last])):
        ranks = comera.ImportancePruning(m, 0.5, 50)
        optimizer = torch.optim.SGD(comera.param_groups(m, 0.0, gate_lr=0.0))
        step = comera.TrainStep(m, spoilt, optimizer, ranks, **settings)
        for batch in given:
            if batch is spoil:
                with pytest.raises(NonFiniteLossError):
                    step(batch)
            else:
                step(batch)
        seen.append(ranks.state_dict()["importance"])
    assert seen[0].any()
    torch.testing.assert_close(*seen)


def test_a_layer_that_is_frozen_meanwhile_is_named(model, batch):
    ranks = comera.ImportancePruning(model, 0.5, 5)
    ranks.objective(loss_fn(model, batch))
    model[3].requires_grad_(False)
    with pytest.raises(ValueError, match="rank gates of 3 have been frozen"):
        ranks.objective(loss_fn(model, batch))


def test_after_the_state_of_a_finished_run_no_gate_is_observed():
    model, twin = make_model(), make_model()
    ranks = comera.ImportancePruning(model, 0.5, 2)
    ranks.finish_(learn(model, ranks, 2))
    twin.load_state_dict(model.state_dict())
    others = comera.ImportancePruning(twin, 1.0, 2)
    others.load_state_dict(ranks.state_dict())
    assert not any(gate._backward_hooks for gate in gates_of(twin))
    learn(twin, others, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_observe_their_own_gates(copied):
    model = make_model()
    ranks = comera.ImportancePruning(model, 0.5, 9)
    learn(model, ranks, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin, others = copied((model, ranks))
    assert torch.equal(others.state_dict()["importance"], ranks.state_dict()["importance"])
    learn(model, ranks, 2)
    learn(twin, others, 2)
    assert torch.equal(others.state_dict()["importance"], ranks.state_dict()["importance"])


def test_a_gradient_that_is_not_finite_is_left_out(model, batch):
    seen, twin = (comera.ImportancePruning(model, 0.5, 9) for _ in range(2))
    for ranks, scales in ((seen, (1.0, float("inf"), 1.0)), (twin, (1.0, 1.0))):
        ranks.discard_()
        for scale in scales:
            loss = loss_fn(model, batch) * scale
            loss.backward()
            ranks.follow_(loss)
    assert_equal(seen.state_dict()["importance"], twin.state_dict()["importance"])


@torch.no_grad()
def close_one(model):
    gates_of(model)[0][2] = 0
    comera.truncate_(model)


def load_anew(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("change", [close_one, load_anew])
def test_a_model_that_changes_meanwhile_is_still_observed(change):
    model = make_model()
    ranks = comera.ImportancePruning(model, 0.5, 20)
    learn(model, ranks, 2)
    change(model)
    learn(model, ranks, 2)
    mean = ranks.state_dict()["importance"]
    assert mean.numel() == sum(gate.numel() for gate in gates_of(model))
    assert mean.dtype == gates_of(model)[0].dtype
    assert (mean > 0).any()
    first = ranks.finish_()
    assert first["size"] <= first["target_size"]
    assert ranks.finish_()["size"] == first["size"]  # nothing is left to do


def test_without_a_step_it_says_what_it_does_instead(model, caplog):
    twin = copy.deepcopy(model)
    ranks = comera.ImportancePruning(model, 0.5, 9)
    outcome = ranks.finish_()
    assert "no step has told the importance of ranks" in caplog.text
    prune_to_(tensor_trains(twin), outcome["target_size"])
    comera.truncate_(twin)
    assert [m.ranks for m in tensor_trains(model).values()] == [
        m.ranks for m in tensor_trains(twin).values()
    ]


def test_a_layer_made_afterwards_is_left_as_it_is(model):
    ranks = comera.ImportancePruning(model, 0.5, 9)
    learn(model, ranks, 2)
    model[4] = comera.TTLinear(24, 5, rank=3, dtype=torch.float64)
    before = model[4].ranks
    assert ranks.finish_()["size"] <= 0.5 * ranks.start_size
    assert model[4].ranks == before


def test_it_is_due_once(model):
    ranks = comera.ImportancePruning(model, 0.5, 4)
    assert not ranks.due
    optimizer = learn(model, ranks, 4)
    assert (ranks.due, ranks.stage) == (True, "done")
    ranks.finish_()  # cuts the state of the optimizer that made the steps
    assert (ranks.due, ranks.stage) == (False, "done")
    learn(model, ranks, 1, optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number of steps, from 1: they tell the importance"),
        ({"steps": None}, "steps=None must be a whole number"),
        ({"target": 2}, "target=2 must be in"),
        ({"min_keep": -1}, r"min_keep=-1 must be in \[0, 1\]"),
        ({"canonical": "false"}, "canonical='false' must be True or False"),
        ({"min_rank": 2}, "min_rank=2 must be 0"),
    ],
)
def test_wrong_settings_are_named(model, settings, message):
    with pytest.raises(ValueError, match=message):
        comera.ImportancePruning(model, **{"target": 0.5, "steps": 5, **settings})
