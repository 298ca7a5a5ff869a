"""Per-layer updates: their memory, what lives with the hooks, and what is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from comera import OptimizerInBackward

from .updating import OPTIMIZERS, Counting, assert_same, loss_of, make_model, train


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    a, b = make_model(checkpointed=reentrant), make_model(checkpointed=reentrant)
    first, second = OPTIMIZERS["AdamW"](a), OPTIMIZERS["AdamW"](b)
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
    a, b = make_model(Shared, reentrant=False), make_model(Shared, reentrant=False)
    first, second = OPTIMIZERS["AdamW"](a), OPTIMIZERS["AdamW"](b)
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
    a, b = make_model(), make_model()
    first, second = OPTIMIZERS[name](a), OPTIMIZERS[name](b)
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
    a, b = make_model(), make_model()
    first, second = Child(a.parameters(), lr=0.1), Child(b.parameters(), lr=0.1)
    train(a, first, 0, 5)
    train(b, OptimizerInBackward(second), 0, 5)
    assert_same(a, first, b, second)


def test_removal_and_context():
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    with OptimizerInBackward(optimizer) as updates:
        train(model, updates, 0, 2)
        with pytest.raises(ValueError, match="AdamW is in an OptimizerInBackward already"):
            OptimizerInBackward(optimizer)
    updates.remove()  # a second time is nothing
    loss_of(model, 2).backward()
    assert model.wide.weight.grad is not None
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    optimizer.step()
    OptimizerInBackward(optimizer)


def test_parameters_added_later_and_frozen_ones():
    a, b = make_model(), make_model()
    first, second = (torch.optim.AdamW(m.hidden.parameters(), lr=1e-2) for m in (a, b))
    for model in (a, b):
        model.hidden[0].weight.requires_grad_(False)
    updates = OptimizerInBackward(second)
    for model, optimizer in ((a, first), (b, second)):
        optimizer.add_param_group({"params": list(model.wide.parameters()), "lr": 1e-3})
        model.hidden[0].weight.requires_grad_(True)
        model.hidden[1].weight.requires_grad_(False)
    train(a, first, 0, 5)
    train(b, updates, 0, 5)
    assert_same(a, first, b, second)


def test_hooks_outlive_a_change_of_type():
    a, b = make_model(), make_model()
    first, second = OPTIMIZERS["SGD"](a), OPTIMIZERS["SGD"](b)
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
