"""Ranks chosen by what their gates' gradients say."""

import copy
import pickle
import warnings

import pytest
import torch

import comera
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_
from comera.rank.sensitivity import Sensitivities
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
    ranks = comera.TwoStage(model, 0.5, early_steps=10, choose="sensitivity")
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
    torch.testing.assert_close(ranks._sensitivities.mean, want, rtol=1e-4, atol=0)


def test_to_first_order_it_is_what_the_loss_would_lose(model, batch):
    gates = gates_of(model)
    seen = Sensitivities(tensor_trains(model))
    seen.watch_()
    loss = loss_fn(model, batch)
    loss.backward()
    seen.follow_()
    told = (seen.mean / 0.02).sqrt()
    actual = []
    with torch.no_grad():
        for gate in gates:
            for k in range(len(gate)):
                gate[k] -= 1e-4
                actual.append(abs(float(loss_fn(model, batch) - loss)) / 1e-4)
                gate[k] += 1e-4
    torch.testing.assert_close(told, torch.tensor(actual, dtype=told.dtype), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_early_steps_train_the_loss_alone_and_the_cut_comes_at_once(compile):
    model, twin = make_model(), make_model()
    ranks = comera.TwoStage(model, 0.4, early_steps=8, choose="sensitivity", canonical=False)
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


def test_what_is_worth_least_goes_first(model):
    worth = {id(gate): torch.ones(len(gate)) for gate in gates_of(model)}
    layer = model[1]
    worth[id(layer.gates[0])][2] = 1e-6
    size = sum(m.shape.num_params for m in tensor_trains(model).values())
    prune_to_(tensor_trains(model), size - 1, worth=worth)
    assert layer.gates[0][2] == 0
    assert sum(int((gate == 0).sum()) for gate in gates_of(model)) == 1


def test_dear_ranks_go_before_cheap_ones_of_equal_worth():
    cheap, dear = comera.TTLinear(16, 16, rank=8, order=1), comera.TTLinear(64, 64, rank=8, order=1)
    model = torch.nn.Sequential(cheap, dear)
    worth = {id(gate): torch.ones(8) for gate in gates_of(model)}
    prune_to_(tensor_trains(model), 8 * 32 + 5 * 128, worth=worth)
    assert (cheap.live_ranks, dear.live_ranks) == ((8,), (5,))


def test_a_run_goes_on_from_its_state():
    whole, part = make_model(), make_model()
    ranks = comera.TwoStage(whole, 0.5, 6, choose="sensitivity")
    optimizer = optimizer_for(whole)
    step = comera.TrainStep(whole, loss_fn, optimizer, ranks)
    for number, batch in enumerate(batches(6)):
        if number == 3:
            state, weights = copy.deepcopy(ranks.state_dict()), copy.deepcopy(whole.state_dict())
            moments = copy.deepcopy(optimizer.state_dict())
        step(batch)
    part.load_state_dict(weights)
    others = comera.TwoStage(part, 0.5, 6, choose="sensitivity")
    others.load_state_dict(state)
    other = optimizer_for(part)
    other.load_state_dict(moments)
    again = comera.TrainStep(part, loss_fn, other, others)
    for batch in batches(6)[3:]:
        again(batch)
    assert torch.equal(ranks._sensitivities.mean, others._sensitivities.mean)
    assert ranks.finish_(optimizer) == others.finish_(other)
    assert [m.ranks for m in tensor_trains(whole).values()] == [
        m.ranks for m in tensor_trains(part).values()
    ]


def test_a_run_goes_back_to_before_its_cut():
    model, twin = make_model(), make_model()
    ranks = comera.TwoStage(model, 0.5, 6, choose="sensitivity")
    optimizer = learn(model, ranks, 4)
    state, weights = copy.deepcopy(ranks.state_dict()), copy.deepcopy(model.state_dict())
    learn(model, ranks, 2, optimizer)
    first = ranks.finish_(optimizer)
    model.load_state_dict(weights)
    ranks.load_state_dict(state)
    assert ranks.stage == "early"
    torch.testing.assert_close(ranks._sensitivities.mean, state["sensitivities"])
    others = comera.TwoStage(twin, 0.5, 6, choose="sensitivity")
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
        ranks = comera.TwoStage(m, 0.5, 50, choose="sensitivity")
        optimizer = torch.optim.SGD(comera.param_groups(m, 0.0, gate_lr=0.0))
        step = comera.TrainStep(m, spoilt, optimizer, ranks, **settings)
        for batch in given:
            if batch is spoil:
                with pytest.raises(NonFiniteLossError):
                    step(batch)
            else:
                step(batch)
        seen.append(ranks._sensitivities.mean)
    assert seen[0].any()
    torch.testing.assert_close(*seen)


def test_a_layer_that_is_frozen_meanwhile_is_named(model, batch):
    ranks = comera.TwoStage(model, 0.5, 5, choose="sensitivity")
    ranks.objective(loss_fn(model, batch))
    model[3].requires_grad_(False)
    with pytest.raises(ValueError, match="rank gates of 3 have been frozen"):
        ranks.objective(loss_fn(model, batch))


def test_after_the_state_of_a_finished_run_no_gate_is_watched():
    model, twin = make_model(), make_model()
    ranks = comera.TwoStage(model, 0.5, 2, choose="sensitivity")
    ranks.finish_(learn(model, ranks, 2))
    twin.load_state_dict(model.state_dict())
    others = comera.TwoStage(twin, 1.0, 2, choose="sensitivity")
    others.load_state_dict(ranks.state_dict())
    assert not any(gate._backward_hooks for gate in gates_of(twin))
    learn(twin, others, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_watch_their_own_gates(copied):
    model = make_model()
    ranks = comera.TwoStage(model, 0.5, 9, choose="sensitivity")
    learn(model, ranks, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin, others = copied((model, ranks))
    assert torch.equal(others._sensitivities.mean, ranks._sensitivities.mean)
    learn(model, ranks, 2)
    learn(twin, others, 2)
    assert torch.equal(others._sensitivities.mean, ranks._sensitivities.mean)


def test_a_gradient_that_is_not_finite_is_left_out(model, batch):
    seen = Sensitivities(tensor_trains(model))
    for scale in (1.0, float("inf"), 1.0):
        seen.watch_()
        (loss_fn(model, batch) * scale).backward()
        seen.follow_()
    twin = Sensitivities(tensor_trains(model))
    for _ in range(2):
        twin.watch_()
        loss_fn(model, batch).backward()
        twin.follow_()
    assert_equal(seen.mean, twin.mean)


@torch.no_grad()
def close_one(model):
    gates_of(model)[0][2] = 0
    comera.truncate_(model)


def load_anew(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("change", [close_one, load_anew])
def test_a_model_that_changes_meanwhile_is_still_heard(change):
    model = make_model()
    ranks = comera.TwoStage(model, 0.5, 20, choose="sensitivity")
    learn(model, ranks, 2)
    change(model)
    learn(model, ranks, 2)
    mean = ranks._sensitivities.mean
    assert mean.numel() == sum(gate.numel() for gate in gates_of(model))
    assert mean.dtype == gates_of(model)[0].dtype
    assert (mean > 0).any()
    first = ranks.finish_()
    assert first["size"] <= first["target_size"]
    assert ranks.finish_()["size"] == first["size"]  # nothing is left to do


def test_without_a_step_it_says_what_it_does_instead(model, caplog):
    twin = copy.deepcopy(model)
    ranks = comera.TwoStage(model, 0.5, 9, choose="sensitivity")
    outcome = ranks.finish_()
    assert "no step has told what a rank is worth" in caplog.text
    prune_to_(tensor_trains(twin), outcome["target_size"])
    comera.truncate_(twin)
    assert [m.ranks for m in tensor_trains(model).values()] == [
        m.ranks for m in tensor_trains(twin).values()
    ]


def test_a_layer_made_afterwards_is_left_as_it_is(model):
    ranks = comera.TwoStage(model, 0.5, 9, choose="sensitivity")
    learn(model, ranks, 2)
    model[4] = comera.TTLinear(24, 5, rank=3, dtype=torch.float64)
    before = model[4].ranks
    assert ranks.finish_()["size"] <= 0.5 * ranks.start_size
    assert model[4].ranks == before


@pytest.mark.parametrize(
    ("given", "spare"),
    [({}, 0.5), ({"late_steps": 3}, 0.0), ({"gamma": 0.1}, 0.0), ({"gamma": 0.0}, 0.5)],
)
def test_ranks_are_chosen_by_the_objective_where_it_presses_on_them(model, given, spare):
    ranks = comera.TwoStage(model, 0.5, 5, **given)
    assert (ranks.spare, ranks.canonical) == (spare, spare > 0)


def test_it_is_due_once(model):
    ranks = comera.TwoStage(model, 0.5, 4)
    assert not ranks.due
    optimizer = learn(model, ranks, 4)
    assert (ranks.due, ranks.stage) == (True, "done")
    ranks.finish_()  # cuts the state of the optimizer that made the steps
    assert (ranks.due, ranks.stage) == (False, "done")
    learn(model, ranks, 1, optimizer)


def test_wrong_settings_are_named(model):
    with pytest.raises(ValueError, match="choose='best' must be one of"):
        comera.TwoStage(model, 0.5, 5, choose="best")
    with pytest.raises(ValueError, match=r"late_steps=3 and gamma=0\.0 must be 0"):
        comera.TwoStage(model, 0.5, 5, 3, choose="sensitivity")
    with pytest.raises(ValueError, match=r"late_steps=0 and gamma=0\.1 must be 0"):
        comera.TwoStage(model, 0.5, 5, choose="sensitivity", gamma=0.1)
    with pytest.raises(ValueError, match="early_steps=0 must be at least 1"):
        comera.TwoStage(model, 0.5, 0, choose="sensitivity")
