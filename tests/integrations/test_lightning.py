"""A ``Trainer`` of Lightning that learns ranks: as our own step does, and resumed exactly."""

import importlib
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import comera
from comera.nn.module import tensor_trains

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it warns of is its own affair, here and below
    lightning: Any = pytest.importorskip("pytorch_lightning")
    integration: Any = importlib.import_module("comera.integrations.lightning")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """A small network with dropout, and targets that it can learn."""

    def __init__(self, dropout=0.2, decay=0.0, groups=True):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(24, 48), nn.ReLU(), nn.Dropout(dropout), nn.Linear(48, 24)
        )
        comera.tensorize_(self.net, comera.TTConfig(rank=6, order=2, init="orthogonal"))
        self.decay, self.groups, self.losses = decay, groups, []

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        params = comera.param_groups(self, 1e-2, gate_lr=0.3) if self.groups else self.parameters()
        optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=self.decay)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def rows():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 24, generator=generator)
    return TensorDataset(x, x.roll(1, 1))


def fit(module, folder, ranks=None, resume=None, shuffle=True, **settings):
    ranks = ranks or comera.TwoStage(module.net, 0.5, early_steps=3, late_steps=3)
    callback = integration.RankCallback(ranks)
    more = settings.pop("callbacks", [])
    torch.manual_seed(3)
    trainer = lightning.Trainer(
        **{"max_epochs": 5, "accelerator": "cpu", "logger": False, "log_every_n_steps": 1,
           "enable_progress_bar": False, "enable_model_summary": False,
           "default_root_dir": folder, "enable_checkpointing": bool(more), **settings},
        callbacks=[callback, *more],
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(), 8, shuffle=shuffle), ckpt_path=resume)
    return trainer, callback


def check_as_our_own_step(found, outcome, batches, epochs, **settings):
    """A state and an outcome, of a module without dropout that saw these batches in each epoch."""
    module = Module(dropout=0.0).double()
    ranks = comera.TwoStage(module.net, 0.5, early_steps=3, late_steps=3)
    optimizer = torch.optim.AdamW(comera.param_groups(module, 1e-2, gate_lr=0.3), weight_decay=0.0)
    step = comera.TrainStep(
        module, lambda m, b: (m.net(b[0]) - b[1]).square().mean(), optimizer, ranks, **settings
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(epochs):
        for batch in batches:
            step(batch)
            if ranks.due:
                assert ranks.finish_(optimizer) == pytest.approx(outcome, rel=1e-5)
        schedule.step()
    assert ranks.stage == "done"
    for key, value in module.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("parts", [1, 2])
def test_it_trains_as_our_own_step_does(parts, tmp_path):
    module, epochs = Module(dropout=0.0).double(), 4 * parts
    _, callback = fit(
        module, tmp_path, shuffle=False, accumulate_grad_batches=parts, max_epochs=epochs,
        precision="64-true", gradient_clip_val=1.0,
    )  # fmt: skip
    x, y = (tensor.double() for tensor in rows().tensors)
    batches = [(x, y)] if parts == 2 else [(x[:8], y[:8]), (x[8:], y[8:])]
    check_as_our_own_step(
        module.state_dict(), callback.outcome, batches, epochs, accumulate=parts, clip_norm=1.0
    )


@pytest.mark.parametrize("epoch", [1, 2, 4], ids=["early", "late", "after the cut"])
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(epoch, tmp_path):
    """With dropout, shuffled rows, momentum and a schedule."""
    whole = Module()
    fit(whole, tmp_path / "whole")

    keep = lightning.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(Module(), tmp_path / "broken", callbacks=[keep], max_epochs=epoch)
    resumed = Module()
    trainer, callback = fit(
        resumed, tmp_path / "resumed", resume=tmp_path / f"epoch={epoch - 1}.ckpt"
    )
    assert trainer.global_step == 10
    assert callback.ranks.stage == "done"
    wanted, found = whole.state_dict(), resumed.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_what_it_logs_is_the_loss_and_then_what_was_cut(tmp_path):
    module = Module()
    trainer, callback = fit(module, tmp_path)
    assert trainer.callback_metrics["loss"] == pytest.approx(module.losses[-1])
    assert trainer.callback_metrics["ranks_size"] == callback.outcome["size"]
    layers = comera.nn.module.tensor_trains(module).values()
    assert callback.outcome["size"] == sum(core.numel() for layer in layers for core in layer.cores)
    assert "backward" not in vars(trainer.strategy)


def test_importance_pruning_is_learned_too(tmp_path):
    module = Module()
    _, callback = fit(module, tmp_path, comera.ImportancePruning(module.net, 0.5, steps=4))
    assert callback.outcome["size"] <= callback.ranks.target_size


# ── what is refused, and what is said ────────────────────────────────────────────────────────────


def test_gates_that_are_decayed_are_named(tmp_path, caplog):
    fit(Module(decay=0.1, groups=False), tmp_path)
    assert "decays gates by weight_decay=0.1" in caplog.text


def test_training_that_ends_before_the_cut_is_named(tmp_path, caplog):
    fit(Module(), tmp_path, max_epochs=2)
    assert "takes 6 more steps and the trainer 4" in caplog.text
    assert "no rank was cut" in caplog.text


def test_ranks_of_another_model_are_refused(tmp_path):
    ranks = comera.TwoStage(Module().net, 0.5, 3, 3)
    with pytest.raises(ValueError, match="another model"):
        fit(Module(), tmp_path, ranks)


def test_a_checkpoint_without_ranks_is_refused(tmp_path):
    plain = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    plain.fit(Module(), DataLoader(rows(), 8))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="no state of rank learning"):
        fit(Module(), tmp_path, resume=tmp_path / "plain.ckpt")


def test_optimization_by_hand_is_refused(tmp_path):
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization=False"):
        fit(module, tmp_path)


def test_a_scheduler_of_parts_changes_no_objective(tmp_path):
    from pytorch_lightning.callbacks import GradientAccumulationScheduler

    states = []
    for settings in (
        {"accumulate_grad_batches": 2},
        {"callbacks": [GradientAccumulationScheduler({0: 2})]},
    ):
        module = Module(dropout=0.0)
        fit(module, tmp_path, shuffle=False, max_epochs=8, **settings)
        states.append(module.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averages_of_weights_have_the_ranks_of_the_small_model(kind, tmp_path):
    from pytorch_lightning import callbacks

    how = {"swa_lrs": 1e-3, "swa_epoch_start": 1} if kind.startswith("Stoch") else {"decay": 0.5}
    module = Module(dropout=0.0)
    average = getattr(callbacks, kind)(**how)
    _, callback = fit(module, tmp_path, callbacks=[average], max_epochs=8)
    assert callback.outcome["size"] < callback.outcome["start_size"]
    cores = [core for layer in tensor_trains(module).values() for core in layer.cores]
    assert sum(core.numel() for core in cores) == callback.outcome["size"]
    assert all(param.isfinite().all() for param in module.parameters())


@pytest.mark.parametrize("by", ["steps", "epochs", "steps with other ranks"])
def test_averages_of_weights_begin_again_after_the_cut(by, tmp_path):
    """All weights since then count alike, and none from before; an epoch has two steps.

    They do so as well when importance is to be observed on other ranks, here after nine steps.
    """
    from pytorch_lightning import callbacks

    seen = []

    class Recorder(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append([param.detach().clone() for param in module.parameters()])

    average = callbacks.WeightAveraging()
    if by == "epochs":
        average = callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    module, ranks = Module(dropout=0.0), None
    if by == "steps with other ranks":
        ranks = comera.ImportancePruning(module.net, 0.5, 18)
    fit(module, tmp_path, ranks, callbacks=[average, Recorder()], max_epochs=8)
    since = seen[5:] if by == "steps" else seen[5:-2:2]  # ranks are cut after six steps
    since = since if ranks is None else seen[8:]
    want = [torch.stack(params).mean(0) for params in zip(*since, strict=True)]
    torch.testing.assert_close(list(module.parameters()), want, rtol=1e-5, atol=1e-6)


def test_a_step_that_an_epoch_ends_early_counts_with_its_whole_loss(tmp_path):
    """Two batches of three: what ranks are weighed against is a mean loss still."""
    losses = []
    for parts in (2, 3):
        module = Module(dropout=0.0)
        ranks = comera.TwoStage(module.net, 0.5, early_steps=3, late_steps=3)
        fit(module, tmp_path, ranks, shuffle=False, accumulate_grad_batches=parts, max_epochs=1)
        losses.append(ranks.state_dict()["running_loss"])
    torch.testing.assert_close(losses[0], losses[1])
