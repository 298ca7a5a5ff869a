"""The captured step against the eager one, on a CPU with recordings in the place of CUDA graphs.

On a GPU the same is tested with CUDA graphs in ``test_cuda_graphs.py``.
"""

import contextlib
import logging
import math
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.checkpoint.chain import CheckpointChain
from comera.train.capture import WARM_UP
from comera.train.host_state import host_random_state, set_random_state
from comera.train.loop import train

from .captured import FIRST, assert_same, eager_step, said, static_steps_
from .conftest import evaluate, get_batch, loss_fn, make_step
from .test_loop import Stop, assert_equal, figures, state_of


def came(groups):
    return comera.CAME(groups, lr=1e-2, weight_decay=0.01)


def muon(groups):
    return comera.MuonAdamW(groups, fused=True)


def adam(groups):
    return torch.optim.Adam(groups, fused=True, amsgrad=True)


def sgd(groups):
    return torch.optim.SGD(groups, fused=True, momentum=0.9)


@pytest.mark.parametrize("make_optimizer", [None, came, muon, adam, sgd])
def test_all_stages_equal_eager_ones(tapes, make_optimizer):
    settings = {} if make_optimizer is None else {"make_optimizer": make_optimizer}
    captured = make_step(**settings)
    assert_same(captured, eager_step(**settings), [get_batch(k) for k in range(30)])
    assert len(tapes.tapes) == 3  # early, late, done
    # The first late step sets a goal, which is one change more.
    assert tapes.eager == FIRST - 1 + WARM_UP + 1 + WARM_UP


def test_blocks_are_captured_and_their_ranks_learned(tapes):
    config = comera.TTConfig(linear_format="btt", rank=2, embedding_rank=5, exclude_modules=["4"])
    captured, eager = (make(config=config, make_optimizer=muon) for make in (make_step, eager_step))
    assert type(captured.model[1]) is comera.BTTLinear
    batches = [get_batch(k) for k in range(30)]
    assert_same(captured, eager, batches[:20])
    assert captured.ranks.finish_(captured.optimizer) == eager.ranks.finish_(eager.optimizer)
    assert_same(captured, eager, batches[20:])
    assert captured.describe().captured


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2},
        {"accumulate": 3, "clip_norm": None},
        {"clip_norm": 1e-2},
        {"precision": "bf16"},
        {"scheduler": None},
    ],
    ids=str,
)
def test_settings_are_part_of_the_recording(tapes, settings):
    captured = make_step(**settings)
    assert_same(captured, eager_step(**settings), [get_batch(k) for k in range(20)])
    assert captured.describe().captured


def test_the_loss_is_a_tensor_of_its_own(tapes):
    step = make_step()
    losses = [step(get_batch(k)) for k in range(FIRST + 2)]
    values = [float(loss) for loss in losses]
    step(get_batch(50))
    assert [float(loss) for loss in losses] == values
    assert len(set(values)) == len(values)


def test_recording_is_no_step(tapes, monkeypatch):
    """It changes no tensor and draws no random number; the replay after it does."""
    step = make_step(early=100)
    for k in range(FIRST - 1):
        step(get_batch(k))
    monkeypatch.setattr(step._capture, "_replay", lambda *_: torch.zeros(()))

    def draws(model, batch):
        return loss_fn(model, batch) * (1 + random.random() + np.random.rand())  # noqa: NPY002

    step._loss_fn = draws
    for k in range(WARM_UP):
        step(get_batch(k))
    before = state_of(step)
    host = random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    step(get_batch(9))
    assert len(tapes.tapes) == 1
    assert step.steps_done == before["ranks"]["steps_done"] + 1
    step.ranks.steps_done -= 1
    after = state_of(step)
    for part in ("model", "ranks", "random"):
        assert_equal(after[part], before[part])
    assert_equal(after["optimizer"]["state"], before["optimizer"]["state"])
    assert (random.getstate(), np.random.get_state()[2]) == host  # noqa: NPY002


def test_training_goes_on_through_truncation_evaluation_and_checkpoints(tapes, tmp_path):
    """The loop, stopped and resumed, equals an eager run without any stop."""

    def run(step, folder, stop=None):
        def get(number):
            if number == stop:
                raise Stop
            return get_batch(number)

        options = {"steps": 30, "log_every": 5, "evaluate": evaluate, "eval_every": 3}
        options |= {"quiet": True, "tensorboard": False, "resume": True, "save_every": 3}
        train(step, get, folder=folder, **options)
        return step

    whole = run(static_steps_(eager_step()), tmp_path / "eager")
    assert any(c.numel() < d.numel() for c, d in zip(
        whole.model.parameters(), make_step(graph=False).model.parameters(), strict=True
    ))  # fmt: skip
    torch.manual_seed(3)
    step = run(make_step(), tmp_path / "captured")
    assert_equal(state_of(step), state_of(whole))
    assert figures(tmp_path / "captured") == figures(tmp_path / "eager")
    assert len(tapes.tapes) == 3
    tapes.tapes.clear()
    torch.manual_seed(3)
    for stop in (4, 9, 20, None):  # each in a process of its own
        parts = make_step()
        with pytest.raises(Stop) if stop else contextlib.nullcontext():
            run(parts, tmp_path / "parts", stop)
        parts._capture.free()
    assert_equal(state_of(parts), state_of(whole))
    assert figures(tmp_path / "parts") == figures(tmp_path / "eager")
    assert len(tapes.tapes) == 3


def test_a_loaded_state_is_captured_anew(tapes):
    captured, eager = make_step(), eager_step()
    batches = [get_batch(k) for k in range(30)]
    torch.manual_seed(7)
    for batch in batches[:10]:
        captured(batch)
    saved = {
        "model": {k: v.clone() for k, v in captured.model.state_dict().items()},
        "optimizer": _copied(captured.optimizer.state_dict()),
    }
    for step in (captured, eager):
        step.ranks = None
        step.model.load_state_dict(saved["model"])
        step.optimizer.load_state_dict(_copied(saved["optimizer"]))
        step.scheduler = None
    assert_same(captured, eager, batches[10:])


def _copied(tree):
    return torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree
    )


def test_a_change_of_mode_or_settings_is_captured_anew(tapes):
    captured, eager = make_step(early=100), eager_step(early=100)
    batches = [get_batch(k) for k in range(8)]

    def nothing(step):
        pass

    def evaluation(step):
        step.model.eval()

    def decay(step):
        step.optimizer.param_groups[0]["weight_decay"] = 0.5

    def frozen(step):
        step.model[4].bias.requires_grad_(False)

    def clip(step):
        step.clip_norm = 1e-3

    def faster(step):
        step.optimizer.param_groups[0]["lr"].mul_(0.5)

    def rounded(step):
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    for change, captures in (
        (nothing, 1), (evaluation, 1), (decay, 1), (frozen, 1), (clip, 1), (faster, 0),
        (rounded, 1),
    ):  # fmt: skip
        before, rounding = len(tapes.tapes), torch.backends.cuda.matmul.fp32_precision
        try:
            change(captured)
            change(eager)
            assert_same(captured, eager, batches)
        finally:
            torch.backends.cuda.matmul.fp32_precision = rounding
        assert len(tapes.tapes) == before + captures, change.__name__


@pytest.mark.parametrize("stages", [{"early": 0, "late": 8}, {"early": 8, "late": 0}], ids=str)
def test_truncation_between_steps(tapes, stages):
    captured, eager = make_step(**stages), eager_step(**stages)
    batches = [get_batch(k) for k in range(20)]
    assert_same(captured, eager, batches[:10])
    assert captured.ranks.finish_(captured.optimizer) == eager.ranks.finish_(eager.optimizer)
    assert_same(captured, eager, batches[10:])
    assert captured.describe().captured


def test_gradients_from_before_the_step_are_dropped(tapes):
    captured, eager = make_step(early=100), eager_step(early=100)
    batches = [get_batch(k) for k in range(8)]
    assert_same(captured, eager, batches)
    loss_fn(captured.model, get_batch(99)).backward()
    assert_same(captured, eager, [*batches, get_batch(8, rows=5)])  # the last one runs eagerly
    assert len(tapes.tapes) == 1


def test_the_step_describes_itself(tapes):
    step = make_step(early=100)
    step(get_batch(0))
    assert "captured once 3 steps in a row were alike; 0 were" in str(step.describe())
    for k in range(FIRST + 1):
        step(get_batch(k))
    described = step.describe()
    assert described.captured
    assert described.replays == 3
    assert described.contents.kernels["aten._fused_adamw_.tensor_lr"] == 4
    assert "as one CUDA graph" in str(described)
    assert "_fused_adamw_" in str(described)


def test_checkpoints_hold_rates_in_tensors(tapes, tmp_path):
    from comera.train.run_state import load_checkpoint, save_checkpoint

    step = make_step()
    for k in range(FIRST + 1):
        step(get_batch(k))
    with CheckpointChain(tmp_path, mode="lossless") as chain:
        save_checkpoint(chain, step)
        want = state_of(step)
        step._capture.free()
        other = make_step(graph=False)  # and eager steps can go on from it
        load_checkpoint(chain, other)
    for group in want["optimizer"]["param_groups"]:  # most optimizers capture on a GPU alone
        assert group["capturable"]
        group |= {"capturable": False, "lr": float(group["lr"])}
    assert_equal(state_of(other), want)
    other(get_batch(0))


def test_random_states_of_more_gpus_than_there_are(monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", found.extend)
    set_random_state({**host_random_state(), "cuda": ["first", "second"]})
    assert found == ["first"]


def test_a_short_batch_runs_eagerly_and_the_graph_stays(tapes, caplog):
    batches = [get_batch(k, rows=5 if k % 10 == 9 else 16) for k in range(30)]
    captured = make_step(early=100)
    assert_same(captured, eager_step(early=100), batches)
    assert len(tapes.tapes) == 1
    assert "does not fit" not in caplog.text


def test_batches_of_another_shape_are_named_and_then_captured(tapes, caplog):
    def wider(k):
        x = torch.randint(0, 100, (16, 5), generator=torch.Generator().manual_seed(k))
        return {"x": x, "y": x.sum(1) % 5}

    batches = [get_batch(k) for k in range(8)] + [wider(k) for k in range(8)]
    captured = make_step(early=100)
    assert_same(captured, eager_step(early=100), batches)
    assert [tape.freed for tape in tapes.tapes] == [True, False]
    assert caplog.text.count("does not fit the captured training step") == 1
    assert "batch['x'] is int64 (16, 5) on cpu instead of int64 (16, 3) on cpu" in caplog.text
    assert "batch['y']" not in caplog.text
    assert "Pad batches to one shape" in caplog.text


def test_batches_in_any_structure(tapes):
    def nested(model, batch):
        (x, [y]), scale = batch["data"], batch["scale"]
        return F.cross_entropy(model(x).mean(1), y) * scale

    batches = [
        {"data": (get_batch(k)["x"], [get_batch(k)["y"]]), "scale": 0.5 if k < 12 else 2.0}
        for k in range(24)
    ]
    captured, eager = make_step(early=100), eager_step(early=100)
    captured._loss_fn = eager._loss_fn = nested
    assert_same(captured, eager, batches)
    assert len(tapes.tapes) == 2  # the scale is a constant of each


def scaled(model, batch):
    return loss_fn(model, batch) * batch["scale"]


def test_batches_of_two_plain_values_keep_a_recording_each(tapes, caplog):
    """Such as whether anything in them is padding; however they are mixed."""
    scales = [0.5 if k % 3 else 2.0 for k in range(30)]
    batches = [get_batch(k) | {"scale": scale} for k, scale in enumerate(scales)]
    captured, eager = make_step(early=100), eager_step(early=100)
    captured._loss_fn = eager._loss_fn = scaled
    in_a_row = [get_batch(k) | {"scale": 0.5} for k in range(FIRST)]
    assert_same(captured, eager, in_a_row)
    assert len(tapes.tapes) == 1
    assert_same(captured, eager, batches)
    assert [tape.freed for tape in tapes.tapes] == [False, False]
    assert captured.describe().replays == 1 + 30 - WARM_UP
    assert not said(caplog)


def test_a_third_plain_value_takes_the_place_of_the_oldest(tapes):
    batches = [get_batch(k) | {"scale": 1.0 + k // 6} for k in range(30)]
    captured, eager = make_step(early=100), eager_step(early=100)
    captured._loss_fn = eager._loss_fn = scaled
    assert_same(captured, eager, batches)
    assert [tape.freed for tape in tapes.tapes] == [True, True, True, False, False]
    captured.clip_norm = eager.clip_norm = 0.5  # and all are dropped when the step changes
    assert_same(captured, eager, batches[-FIRST:])
    assert [tape.freed for tape in tapes.tapes] == [*[True] * 5, False]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda b: {**b, "y": b["y"].numpy()}, r"batch\['y'\] is a ndarray: give tensors"),
        (lambda b: {**b, "y": b["y"].to_sparse()}, r"batch\['y'\] is sparse"),
        (lambda b: {**b, "z": [torch.ones(2, device="meta")]}, r"batch\['z'\]\[0\] is on meta"),
        (lambda b: {**b, "z": torch.ones(2, requires_grad=True)}, r"batch\['z'\] requires a grad"),
    ],
    ids=["numpy", "sparse", "device", "gradient"],
)
def test_a_batch_that_cannot_be_captured_is_named(tapes, caplog, batch, message):
    def takes_all(model, given):
        y = torch.as_tensor(given["y"])
        return loss_fn(model, {**given, "y": y.to_dense() if y.is_sparse else y})

    step = make_step()
    step._loss_fn = takes_all
    for k in range(FIRST + 2):
        step(batch(get_batch(k)))
    assert step.steps_done == FIRST + 2
    (text,) = said(caplog)
    assert re.search(message, text)
    assert not step.describe().captured
    assert not tapes.tapes


def test_an_error_of_a_batch_that_does_not_fit_is_raised(tapes):
    step = make_step()
    for k in range(FIRST + 1):
        step(get_batch(k))
    with pytest.raises(ValueError, match="to match target batch_size"):
        step({"x": get_batch(0)["x"], "y": torch.zeros(3, dtype=torch.long)})


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


def test_a_failed_recording_leaves_nothing_to_importance(tapes):
    step = make_step(late=0, early=30)
    for k in range(FIRST - 1):
        step(get_batch(k))
    put_back = step._capture._host.hold()
    step.ranks.objective(loss_fn(step.model, get_batch(9))).backward()
    put_back()
    assert not step.ranks._lost


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
