"""Training steps, rank stages, truncation and checkpoints with per-layer updates."""

import pytest
import torch
from torch import nn

import comera
from comera.train.loop import train
from comera.train.step import NonFiniteLossError

from .conftest import get_batch, loss_fn, make_step


def steps(optimizer=None, early=6, late=10, dropout=0.0, **settings):
    """The same training step twice: as ever, and with updates in backward."""
    made = []
    for wrap in (lambda optimizer: optimizer, comera.OptimizerInBackward):
        base = make_step(early, late, dropout=dropout)
        inner = optimizer(base.model) if optimizer else base.optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda k: 1 / (1 + 0.1 * k))
        made.append(
            comera.TrainStep(
                base.model, loss_fn, wrap(inner), base.ranks, scheduler=scheduler, **settings
            )
        )
    return made


def assert_same(a, b):
    for (name, p), q in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    torch.testing.assert_close(
        a.optimizer.state_dict()["state"], b.optimizer.state_dict()["state"], rtol=0, atol=0
    )


def decayed(model):
    return comera.param_groups(model, 1e-2, gate_lr=0.2, weight_decay=0.1)


OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(decayed(m), fused=True),
    "CAME": lambda m: comera.CAME(decayed(m), state_dtype="8bit"),
    "GaLore": lambda m: comera.GaLoreAdamW(
        comera.galore_param_groups(m, 1e-2, 2, update_proj_gap=3, gate_lr=0.2)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_stages_truncation_and_the_rest_are_the_same(name, accumulate):
    a, b = steps(OPTIMIZERS[name], accumulate=accumulate)
    for step in (a, b):
        for k in range(16):
            step(get_batch(k))
        assert step.ranks.stage == "done"
        before = [layer.ranks for layer in step.ranks.size.layers.values()]
        step.ranks.finish_(step.optimizer)
        assert [layer.ranks for layer in step.ranks.size.layers.values()] != before
        for k in range(16, 22):
            step(get_batch(k))
    assert_same(a, b)
    assert all(p.grad is None for p in b.model.parameters())


def test_truncate_between_steps_keeps_the_hooks():
    a, b = steps()
    for step in (a, b):
        for k in range(4):
            step(get_batch(k))
        with torch.no_grad():
            next(iter(step.ranks.size.layers.values())).gates[1][2:] = 0
        comera.truncate_(step.model, step.optimizer)
        for k in range(4, 8):
            step(get_batch(k))
        kept = loss_fn(step.model, get_batch(8))  # a loss that somebody keeps
        with torch.no_grad():
            next(iter(step.ranks.size.layers.values())).gates[1][1:] = 0
        comera.truncate_(step.model, step.optimizer)
        step(get_batch(9))
        assert kept.requires_grad
    assert_same(a, b)


def test_a_run_stops_and_resumes_the_same(tmp_path):
    a, b = steps(accumulate=2)
    settings = {"quiet": True, "tensorboard": False}
    train(a, get_batch, steps=24, folder=tmp_path / "a", **settings)
    train(b, get_batch, steps=9, folder=tmp_path / "b", **settings)
    _, c = steps(accumulate=2)
    train(c, get_batch, steps=24, folder=tmp_path / "b", resume=True, **settings)
    # `b` ended its ranks at step 9 as its last one; only the whole run is the other's
    _, d = steps(accumulate=2)
    train(d, get_batch, steps=24, folder=tmp_path / "d", **settings)
    assert_same(a, d)
    assert c.steps_done == 24


def test_mixed_precision():
    a, b = steps(precision="bf16")
    for step in (a, b):
        for k in range(4):
            step(get_batch(k))
    assert_same(a, b)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_that_no_gradient_reaches_is_not_stepped(accumulate):
    made = []
    for wrap in (lambda optimizer: optimizer, comera.OptimizerInBackward):
        torch.manual_seed(0)
        model = nn.ModuleList(comera.TTLinear(16, 16, rank=2) for _ in range(2))
        optimizer = wrap(torch.optim.AdamW(model.parameters(), 1e-2))

        def loss_of(model, batch):
            x = model[0](batch["x"])
            return (model[1](x) if batch["both"] else x).square().mean()

        step = comera.TrainStep(model, loss_of, optimizer, accumulate=accumulate)
        for both in (True, False, False):
            step({"x": torch.ones(4, 16), "both": both})
        made.append(step)
    assert_same(*made)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_updates_nothing(accumulate):
    _, step = steps(accumulate=accumulate)
    step(get_batch(0))
    before = [p.detach().clone() for p in step.model.parameters()]
    batch = get_batch(1)
    batch["y"][-8:] = -100  # the last part has a mean over nothing
    if accumulate == 1:
        batch["y"][:] = -100
    with pytest.raises(NonFiniteLossError, match="loss is nan at step 2"):
        step(batch)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in step.model.parameters())
    step(get_batch(2))


def test_what_needs_all_gradients_is_refused():
    _, step = steps()
    with pytest.raises(ValueError, match=r"clip_norm=0.5 needs all gradients .*comera.CAME"):
        comera.TrainStep(step.model, loss_fn, step.optimizer, clip_norm=0.5)


def test_a_model_that_averages_gradients_itself_is_refused(tmp_path):
    _, step = steps()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(step.model)
        with pytest.raises(ValueError, match=r"model unwrapped, and .*process_group="):
            comera.TrainStep(wrapped, loss_fn, step.optimizer)
    finally:
        torch.distributed.destroy_process_group()
