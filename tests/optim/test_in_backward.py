"""Per-layer updates: as the same optimizer after backward; their memory, hooks and limits."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import comera
from comera import OptimizerInBackward
from comera.optim import galore
from tests.peers import peer
from tests.states import assert_equal

from .updating import (
    OPTIMIZERS,
    Counting,
    assert_same,
    galore_groups,
    loss_of,
    make_model,
    state_of,
    train,
)


def pair(name, **settings):
    """Two equal models and their optimizers, the second one to step in backward."""
    a, b = make_model(**settings), make_model(**settings)
    make = OPTIMIZERS[name] if isinstance(name, str) else name
    return a, make(a), b, make(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_steps_after_backward(name, dtype):
    a, first, b, second = pair(name, dtype=dtype)
    schedules = [lr_scheduler.CosineAnnealingLR(o, 24, 1e-3) for o in (first, second)]
    updates = OptimizerInBackward(second)
    train(a, first, 0, 24, schedules[0])
    train(b, updates, 0, 24, schedules[1])
    assert_same(a, first, b, second)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert all(p.grad is None for p in b.parameters())


@pytest.mark.parametrize("later", [False, True])
def test_subspaces_are_found_in_the_same_steps_with_the_same_seeds(monkeypatch, later):
    asked, new_bases = [], galore.new_bases

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

    a, first, b, second = pair("AdamW")
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
    a, first, b, second = pair(name)
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


def test_accumulation_inside_accumulation_goes_on_to_the_outer_end():
    model = make_model()
    updates = OptimizerInBackward(torch.optim.AdamW(model.parameters(), 1e-2))
    before = copy.deepcopy(model.state_dict())
    with updates.accumulate():
        with updates.accumulate():
            loss_of(model, 0).backward()
        loss_of(model, 1).backward()
    assert_equal(model.state_dict(), before)
    loss_of(model, 2).backward()
    changed = [not torch.equal(value, before[key]) for key, value in model.state_dict().items()]
    assert any(changed)


def test_only_accumulated_gradients_step_all_the_same():
    a, first, b, second = pair("AdamW")
    updates = OptimizerInBackward(second)
    train(a, first, 0, 3)
    with updates.accumulate():
        train(b, updates, 0, 3)
    assert_same(a, first, b, second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    a, first, b, second = pair("AdamW", checkpointed=reentrant)
    train(a, first, 0, 5)
    train(b, OptimizerInBackward(second), 0, 5)
    assert_same(a, first, b, second)


class Shared(nn.Module):
    """One layer used in two checkpointed blocks."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x.square().mean()

    def block(self, x):
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("named", [False, True])
def test_a_layer_in_two_reentrant_checkpoints_is_named(named):
    model = Shared(reentrant=True)
    params = model.named_parameters() if named else [{"params": model.parameters(), "name": "all"}]
    updates = OptimizerInBackward(torch.optim.AdamW(params))
    name = "the parameter 'layer.(weight|bias)'" if named else "parameter [01]"
    with pytest.raises(RuntimeError, match=rf"{name} of shape .* second .*use_reentrant=False"):
        model(torch.randn(4, 8, requires_grad=True)).backward()
    updates.remove()


def test_a_layer_in_two_other_checkpoints_steps_once():
    a, first, b, second = pair("AdamW", kind=Shared, reentrant=False)
    x = torch.randn(4, 8)
    for model, optimizer in ((a, first), (b, OptimizerInBackward(second))):
        for _ in range(5):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(a, first, b, second)


def test_two_backward_passes_without_a_step_are_refused():
    model = make_model()
    OptimizerInBackward(OPTIMIZERS["AdamW"](model))
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"Call step\(\) .* `with updates.accumulate\(\):`"):
        loss_of(model, 1).backward()


def test_a_gradient_that_comes_back_is_refused():
    model = make_model()
    updates = OptimizerInBackward(OPTIMIZERS["AdamW"](model))
    loss_of(model, 0).backward()
    with updates.accumulate():
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"shape .* has a gradient again.*Distributed"):
        updates.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "GaLoreAdamW"])
def test_closures(name):
    a, first, b, second = pair(name)
    losses = []
    for model, optimizer in ((a, first), (b, OptimizerInBackward(second))):
        for k in range(5):

            def closure(model=model, optimizer=optimizer, k=k):
                optimizer.zero_grad()
                loss = loss_of(model, k)
                loss.backward()
                return loss.detach()

            losses.append(optimizer.step(closure))
    assert losses[:5] == losses[5:]
    assert_same(a, first, b, second)


def test_step_hooks():
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    updates = OptimizerInBackward(optimizer)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model.wide.bias.detach().clone()))
    train(model, updates, 0, 3)
    assert len(seen) == 3
    assert torch.equal(seen[-1], model.wide.bias)
    optimizer.register_step_pre_hook(print)
    with pytest.raises(ValueError, match=r"AdamW has a step pre-hook \(print\).*no gradients"):
        train(model, updates, 3, 4)
    updates.remove()
    with pytest.raises(ValueError, match="register_step_post_hook"):
        OptimizerInBackward(optimizer)


def test_a_class_that_calls_its_parents_step():
    class Child(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # now the parent's step runs hooks, too
    a, first, b, second = pair(lambda model: Child(model.parameters(), lr=0.1))
    train(a, first, 0, 5)
    train(b, OptimizerInBackward(second), 0, 5)
    assert_same(a, first, b, second)


def test_removal():
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    updates = OptimizerInBackward(optimizer)
    train(model, updates, 0, 2)
    with pytest.raises(ValueError, match="AdamW is in an OptimizerInBackward already"):
        OptimizerInBackward(optimizer)
    updates.remove()
    updates.remove()  # a second time is nothing
    loss_of(model, 2).backward()
    assert model.wide.weight.grad is not None
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    optimizer.step()
    OptimizerInBackward(optimizer)


def test_parameters_added_later_and_frozen_ones():
    a, first, b, second = pair(lambda m: torch.optim.AdamW(m.hidden.parameters(), lr=1e-2))
    for model in (a, b):
        model.hidden[0].weight.requires_grad_(False)
    updates = OptimizerInBackward(second)
    for model, optimizer in ((a, first), (b, second)):
        optimizer.add_param_group({"params": list(model.wide.parameters()), "lr": 1e-3})
        model.hidden[0].weight.requires_grad_(True)
        model.hidden[1].weight.requires_grad_(False)
    train(a, first, 0, 5)
    for k in range(5):  # the loop of the docstring, without zero_grad
        loss_of(b, k).backward()
        updates.step()
    assert_same(a, first, b, second)


def test_hooks_outlive_a_change_of_type():
    a, first, b, second = pair("SGD")
    updates = OptimizerInBackward(second)
    for model in (a, b):
        model.bfloat16()
    train(a, first, 0, 3)
    train(b, updates, 0, 3)
    assert_same(a, first, b, second)
    loss_of(b, 3).backward()
    assert all(p.grad is None for p in b.parameters())


def test_models_can_be_copied_and_it_cannot():
    model = make_model()
    updates = OptimizerInBackward(OPTIMIZERS["AdamW"](model))
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    loss_of(twin, 0).backward()
    assert twin.wide.weight.grad is not None  # nobody's but its own
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            attempt(updates)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scalers_are_refused(fused):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    updates = OptimizerInBackward(optimizer)
    for handed in (optimizer, updates):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(RuntimeError, match=r"GradScaler cannot work .* bfloat16"):
            scaler.step(handed)
        updates.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model, 1)).backward()
    off.step(optimizer)


def test_what_needs_all_gradients_is_refused():
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS needs all gradients at once"):
        OptimizerInBackward(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="of type Tied; it must be an optimizer"):
        OptimizerInBackward(model)
    with pytest.raises(ValueError, match="differentiable=True"):
        OptimizerInBackward(torch.optim.SGD(model.parameters(), differentiable=True))
    updates = OptimizerInBackward(Counting(model.parameters()))
    with pytest.raises(TypeError, match="Counting changes 'k' of its parameter groups"):
        loss_of(model, 0).backward()
    assert len(updates.param_groups[0]["params"]) == len(list(model.parameters()))


class Counted(list):
    """A list that says how often somebody went through it."""

    walks = 0

    def __iter__(self):
        Counted.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("name", ["AdamW", "CAME", "GaLoreAdamW", "GaLore around CAME"])
def test_nobody_goes_through_all_parameters_in_backward(name):
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    updates = OptimizerInBackward(optimizer)
    for group in optimizer.param_groups:
        group["params"] = Counted(group["params"])
    Counted.walks = 0
    loss_of(model, 0).backward()
    assert Counted.walks == 0
    updates.step()
    assert Counted.walks > 0


def live_gradients(model, backward):
    """Most bytes of gradients alive at once, whoever holds them: autograd, .grad or a hook."""
    alive, most = [], 0

    def note(grad):
        nonlocal most
        storage = grad.untyped_storage()
        alive.append((StorageWeakRef(storage), storage.nbytes()))
        most = max(most, sum(size for held, size in alive if not held.expired()))

    handles = [p.register_hook(note) for p in model.parameters()]
    backward()
    for handle in handles:
        handle.remove()
    return most


@pytest.mark.parametrize("name", ["SGD", "AdamW", "CAME", "GaLoreAdamW"])
def test_gradients_of_two_layers_at_most_are_alive_at_once(name):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    optimizer = OPTIMIZERS[name](model)
    layer = 4 * (64 * 64 + 64)

    def backward():
        model(torch.randn(2, 64)).square().mean().backward()

    assert live_gradients(model, backward) == 12 * layer
    optimizer.zero_grad()
    updates = OptimizerInBackward(optimizer)
    assert live_gradients(model, backward) <= 2 * layer
    updates.step()
