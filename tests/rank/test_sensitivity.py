"""Ranks chosen by what their gates' gradients say."""

import copy
import pickle
import warnings

import pytest
import torch

import comera
from comera.nn.module import tensor_trains
from comera.rank.sensitivity import Sensitivities
from comera.rank.truncate import prune_to_

from .conftest import loss_fn, make_model


def gates_of(model):
    return [gate for layer in tensor_trains(model).values() for gate in layer.gates]


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 120, (16, 3), generator=generator) for _ in range(count)]


def optimizer_for(model):
    return torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=1e-3))


def learn(model, ranks, steps, optimizer=None, **settings):
    optimizer = optimizer or optimizer_for(model)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks, **settings)
    for batch in batches(steps):
        step(batch)
    return optimizer


def test_the_mean_square_of_gate_times_gradient(model):
    ranks = comera.TwoStage(model, 0.5, early_steps=10, choose="sensitivity")
    optimizer, twin = optimizer_for(model), copy.deepcopy(model)
    other, want = optimizer_for(twin), 0.0
    step = comera.TrainStep(model, loss_fn, optimizer, ranks)
    for batch in batches(4):
        step(batch)
        loss_fn(twin, batch).backward()
        lost = torch.cat([gate.grad * gate.detach() for gate in gates_of(twin)])
        want = 0.98 * want + 0.02 * lost.square()
        other.step()
        other.zero_grad()
    torch.testing.assert_close(ranks.sensitivities.mean, want)


def test_to_first_order_it_is_what_the_loss_would_lose(model, batch):
    gates = gates_of(model)
    seen = Sensitivities(gates)
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
    ranks = comera.TwoStage(model, 0.4, early_steps=8, choose="sensitivity")
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
    prune_to_(model, size - 1, worth=worth)
    assert layer.gates[0][2] == 0
    assert sum(int((gate == 0).sum()) for gate in gates_of(model)) == 1


def test_dear_ranks_go_before_cheap_ones_of_equal_worth():
    cheap, dear = comera.TTLinear(16, 16, rank=8, order=1), comera.TTLinear(64, 64, rank=8, order=1)
    model = torch.nn.Sequential(cheap, dear)
    worth = {id(gate): torch.ones(8) for gate in gates_of(model)}
    prune_to_(model, 8 * 32 + 5 * 128, worth=worth)
    assert (cheap.live_ranks, dear.live_ranks) == ((8,), (5,))


def test_steps_in_backward_and_parts_of_a_batch_tell_as_much():
    model, twin = make_model(), make_model()
    ranks = comera.TwoStage(model, 0.5, 6, choose="sensitivity")
    others = comera.TwoStage(twin, 0.5, 6, choose="sensitivity")
    learn(model, ranks, 6)
    learn(twin, others, 6, comera.OptimizerInBackward(optimizer_for(twin)))
    torch.testing.assert_close(ranks.sensitivities.mean, others.sensitivities.mean)
    parts = comera.TwoStage(make_model(), 0.5, 6, choose="sensitivity")
    learn(parts.model, parts, 6, accumulate=2)
    assert (parts.sensitivities.mean > 0).all()


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
    assert torch.equal(ranks.sensitivities.mean, others.sensitivities.mean)
    assert ranks.finish_(optimizer) == others.finish_(other)
    assert [m.ranks for m in tensor_trains(whole).values()] == [
        m.ranks for m in tensor_trains(part).values()
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_watch_their_own_gates(copied):
    model = make_model()
    ranks = comera.TwoStage(model, 0.5, 9, choose="sensitivity")
    learn(model, ranks, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin, others = copied((model, ranks))
    assert torch.equal(others.sensitivities.mean, ranks.sensitivities.mean)
    learn(model, ranks, 2)
    learn(twin, others, 2)
    assert torch.equal(others.sensitivities.mean, ranks.sensitivities.mean)


def test_wrong_settings_are_named(model):
    with pytest.raises(ValueError, match="choose='best' must be one of"):
        comera.TwoStage(model, 0.5, 5, choose="best")
    with pytest.raises(ValueError, match="late_steps=3 must be 0"):
        comera.TwoStage(model, 0.5, 5, 3, choose="sensitivity")
    gates = gates_of(model)
    gates[0].requires_grad_(False)
    with pytest.raises(ValueError, match=f"1 of {len(gates)} rank gates are frozen"):
        comera.TwoStage(model, 0.5, 5, choose="sensitivity")
