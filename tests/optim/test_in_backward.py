"""Per-layer updates do what the same optimizer does after backward."""

import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import comera
from comera import OptimizerInBackward
from comera.optim import galore
from comera.optim.projection import new_bases
from tests.peers import peer

from .updating import OPTIMIZERS, assert_same, galore_groups, loss_of, make_model, state_of, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_steps_after_backward(name):
    a, b = make_model(), make_model()
    first, second = OPTIMIZERS[name](a), OPTIMIZERS[name](b)
    schedules = [lr_scheduler.CosineAnnealingLR(o, 24, 1e-3) for o in (first, second)]
    updates = OptimizerInBackward(second)
    train(a, first, 0, 24, schedules[0])
    train(b, updates, 0, 24, schedules[1])
    assert_same(a, first, b, second)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert all(p.grad is None for p in b.parameters())


@pytest.mark.parametrize("later", [False, True])
def test_subspaces_are_found_in_the_same_steps_with_the_same_seeds(monkeypatch, later):
    asked = []

    def note(grad, rank, proj_type, seed):
        asked[-1].append((tuple(grad.shape), seed))
        return new_bases(grad, rank, proj_type, seed)

    monkeypatch.setattr(galore, "new_bases", note)
    logs = []
    for wrap in (lambda optimizer: optimizer, OptimizerInBackward):
        model = make_model()
        *others, projected = galore_groups(model)
        optimizer = comera.GaLoreAdamW([*others, projected] if not later else [projected])
        if later:
            for group in others:
                optimizer.add_param_group(group)
            twin = {**projected, "params": [nn.Parameter(torch.randn(30, 20))]}
            optimizer.add_param_group(twin)
        updates = wrap(optimizer)
        for k in range(12):
            asked.append([])
            train(model, updates, k, k + 1)
        logs.append([sorted(step) for step in asked])
        asked.clear()
    assert logs[0] == logs[1]
    assert {seed for step in logs[0] for _, seed in step} == {0, 5, 10}


@pytest.mark.parametrize("name", ["AdamW", "CAME", "GaLoreAdamW"])
def test_bfloat16(name):
    a, b = make_model(dtype=torch.bfloat16), make_model(dtype=torch.bfloat16)
    first, second = OPTIMIZERS[name](a), OPTIMIZERS[name](b)
    train(a, first, 0, 20)
    train(b, OptimizerInBackward(second), 0, 20)
    assert_same(a, first, b, second)


def test_eight_bit_adamw(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # it takes longer than training
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own making
        low_bit = peer("torchao.optim")
    for make in (
        lambda m: low_bit.AdamW8bit(m.parameters(), lr=1e-2, weight_decay=0.1),
        lambda m: comera.GaLoreAdamW8bit([{"params": [m.weight], "rank": 64}], lr=1e-2),
    ):
        results = []
        for wrap in (lambda optimizer: optimizer, OptimizerInBackward):
            torch.manual_seed(0)
            model = nn.Linear(96, 128, bias=False)
            optimizer = wrap(make(model))
            for k in range(20):
                generator = torch.Generator().manual_seed(k)
                model(torch.randn(8, 96, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            moments = state_of(optimizer)[0]
            results.append((model.weight.detach(), moments["exp_avg"].dequantize()))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_learning_rate_in_a_tensor():
    a, b = make_model(), make_model()
    rates = [torch.tensor(1e-2), torch.tensor(1e-2)]
    first, second = (
        torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.1)
        for m, lr in zip((a, b), rates, strict=True)
    )
    updates = OptimizerInBackward(second)
    for k in range(20):
        train(a, first, k, k + 1)
        train(b, updates, k, k + 1)
        for lr in rates:
            lr.mul_(0.9)
    assert_same(a, first, b, second)


@pytest.mark.parametrize("name", ["AdamW", "CAME", "GaLoreAdamW"])
def test_resumes_exactly_with_or_without(name):
    a = make_model()
    first = OPTIMIZERS[name](a)
    updates = OptimizerInBackward(first)
    train(a, updates, 0, 9)
    file = io.BytesIO()
    torch.save((a.state_dict(), updates.state_dict()), file)
    train(a, updates, 9, 20)
    for wrap in (OptimizerInBackward, lambda optimizer: optimizer):
        b = make_model()
        second = OPTIMIZERS[name](b)
        resumed = wrap(second)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        b.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(b, resumed, 9, 20)
        assert_same(a, first, b, second)


def test_torchs_checkpoints_find_the_same_state():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    a, b = make_model(), make_model()
    first, second = OPTIMIZERS["AdamW"](a), OPTIMIZERS["AdamW"](b)
    updates = OptimizerInBackward(second)
    assert get_optimizer_state_dict(b, second)["state"].keys() == {
        name for name, _ in b.named_parameters()
    }  # made by a step with gradients of zeros
    train(a, first, 0, 3)
    second.state.clear()
    train(b, updates, 0, 3)
    mine, theirs = (get_optimizer_state_dict(m, o) for m, o in ((a, first), (b, second)))
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "GaLoreAdamW"])
def test_accumulated_gradients_step_with_the_last(name):
    a, b = make_model(), make_model()
    first, second = OPTIMIZERS[name](a), OPTIMIZERS[name](b)
    updates = OptimizerInBackward(second)
    for k in range(0, 24, 3):  # only the first of three has a gradient for `seldom`
        for part in range(k, k + 3):
            loss_of(a, part).backward()
        first.step()
        first.zero_grad()
        with updates.accumulate():
            for part in range(k, k + 2):
                loss_of(b, part).backward()
        loss_of(b, k + 2).backward()
        assert [n for n, p in b.named_parameters() if p.grad is not None] == [
            "seldom.weight", "seldom.bias"
        ]  # fmt: skip
        updates.step()
        assert all(param.grad is None for param in b.parameters())
    assert_same(a, first, b, second)


def test_only_accumulated_gradients_step_all_the_same():
    a, b = make_model(), make_model()
    first, second = OPTIMIZERS["AdamW"](a), OPTIMIZERS["AdamW"](b)
    updates = OptimizerInBackward(second)
    train(a, first, 0, 3)
    with updates.accumulate():
        train(b, updates, 0, 3)
    assert_same(a, first, b, second)
