"""What cannot be captured runs eagerly, and is named."""

import logging
import math
import re

import pytest
import torch
from torch import nn

import comera
from comera.train.capture import WARM_UP
from comera.train.loop import train

from .captured import FIRST, assert_same, eager_step, said
from .conftest import get_batch, loss_fn, make_step
from .test_loop import assert_equal, state_of


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda model, batch, loss: loss * float(loss > 0), "_local_scalar_dense"),
        (lambda model, batch, loss: loss if loss > 0 else -loss, "is_nonzero|_local_scalar"),
        (lambda model, batch, loss: loss + 0 * batch["y"][batch["y"] > 1].sum(), "boolean index"),
        (lambda model, batch, loss: loss + 0 * torch.unique(batch["y"]).sum(), "_unique2"),
        (lambda model, batch, loss: loss * torch.tensor(1.0), "lift_fresh"),
    ],
    ids=["item", "if", "boolean-index", "unique", "python-value"],
)
def test_what_cannot_be_captured_runs_eagerly_as_if_nothing_had_been_tried(
    tapes, caplog, what, message
):
    def reads_back(model, batch):
        return what(model, batch, loss_fn(model, batch))

    captured, eager = make_step(), eager_step()
    captured._loss_fn = eager._loss_fn = reads_back
    assert_same(captured, eager, [get_batch(k) for k in range(FIRST - 1)])
    for k in range(FIRST - 1, FIRST + 5):  # any faster way is open to an eager step
        random_state = torch.get_rng_state()
        loss = captured(get_batch(k))
        torch.set_rng_state(random_state)
        assert torch.equal(loss, eager(get_batch(k)))
    assert_equal(state_of(captured), state_of(eager))
    (text,) = said(caplog)
    assert "not captured as a CUDA graph: NotCapturableError" in text
    assert re.search(message, text)
    assert re.search(message, str(captured.describe()))
    assert not captured.describe().captured


def test_an_error_of_the_model_is_raised_by_the_first_step(tapes):
    def fails(model, batch):
        raise KeyError("tokens")

    step = make_step()
    step._loss_fn = fails
    with pytest.raises(KeyError, match="tokens"):
        step(get_batch(0))


class Sometimes(nn.Module):
    """Uses its second layer from a certain call on."""

    def __init__(self, first_use):
        super().__init__()
        self.always, self.later = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.first_use = 0, first_use

    def forward(self, x):
        self.calls += 1
        x = self.always(x)
        return x if self.calls < self.first_use else x + self.later(x)


def test_a_parameter_first_used_while_recording_is_noticed(tapes, caplog):
    """Its new state would be made anew in each replay."""
    model = Sometimes(FIRST)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = comera.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer)
    for _ in range(FIRST - 1):
        step(torch.ones(3, 4))
    assert model.later.weight not in optimizer.state
    step(torch.ones(3, 4))
    assert "would have to start from: state of the optimizer" in caplog.text
    assert float(optimizer.state[model.later.weight]["step"]) == 1.0
    assert float(optimizer.state[model.always.weight]["step"]) == FIRST


def test_a_gradient_that_is_not_finite_is_left_to_the_loop(tapes, tmp_path):
    step = make_step(early=100)
    step._loss_fn = lambda model, batch: loss_fn(model, batch) * batch["factor"]

    def poisoned(number):
        return get_batch(number) | {"factor": torch.tensor(math.nan if number == 8 else 1.0)}

    with pytest.raises(comera.train.step.NonFiniteLossError, match="at or before step 10"):
        train(step, poisoned, steps=20, folder=tmp_path, log_every=5, quiet=True, tensorboard=False)
    assert step.describe().captured


REFUSED = {
    "in backward": (
        lambda m: comera.OptimizerInBackward(torch.optim.SGD(m.parameters(), fused=True)),
        "OptimizerInBackward steps in hooks",
    ),
    "galore": (
        lambda m: comera.GaLoreAdamW(comera.galore_param_groups(m, 1e-2, 2)),
        "GaLoreAdamW finds its subspaces anew",
    ),
    "sgd": (lambda m: torch.optim.SGD(m.parameters()), "make it with fused=True"),
    "adafactor": (
        lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor has no setting capturable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_be_captured_are_named(tapes, caplog, name):
    make_optimizer, message = REFUSED[name]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    step = comera.TrainStep(model, lambda m, x: m(x).square().mean(), make_optimizer(model))
    losses = [float(step(torch.ones(2, 8))) for _ in range(FIRST + 2)]
    assert losses[-1] < losses[0]
    (text,) = said(caplog)
    assert message in text
    assert message in step.describe().why
    assert not tapes.tapes


def test_hooks_of_the_optimizer_are_run(tapes, caplog):
    step, seen = make_step(early=100), []
    for k in range(FIRST + 1):
        step(get_batch(k))
    assert step.describe().captured
    step.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for k in range(6):
        step(get_batch(k))
    assert len(seen) == 6
    assert "AdamW has hooks on its step" in caplog.text


def test_a_step_that_never_repeats_itself_says_what_changes(tapes, caplog, monkeypatch):
    monkeypatch.setattr("comera.train.capture._PATIENCE", 12)
    step = make_step(early=100)
    for k in range(20):
        step.optimizer.param_groups[1]["weight_decay"] = 0.01 * k
        step(get_batch(k, rows=8 + k % 2))
    text = "still runs eagerly after 12 steps, since no 3 in a row are alike: settings of the"
    assert caplog.text.count(text) == 1
    assert "the batch" in caplog.text
    assert not tapes.tapes


def test_on_a_cpu_it_says_that_it_runs_eagerly(caplog):
    assert "eagerly: the model is on cpu" in str(make_step().describe())
    assert not said(caplog)
    assert "eagerly: graph=False" in str(make_step(graph=False).describe())
    with caplog.at_level(logging.WARNING, "comera"):
        make_step(graph=True)
    assert "graph=True captures a CUDA graph, but the model is on cpu" in caplog.text


def test_steps_after_a_failed_capture_stay_on_its_stream(tapes, monkeypatch):
    def fails(*_):
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(tapes, "record", fails)
    step = make_step()
    for number in range(WARM_UP + 5):
        step(get_batch(number))
    assert "cannot be captured" in step.describe().why
    assert tapes.eager == WARM_UP + 5
