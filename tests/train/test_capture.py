"""The captured step against the eager one, on a CPU with recordings in the place of CUDA graphs.

On a GPU the same is tested with CUDA graphs in ``test_cuda_graphs.py``.
"""

import contextlib
import random

import numpy as np
import pytest
import torch

import comera
from comera.checkpoint.chain import CheckpointChain
from comera.ops.context import static_shapes
from comera.train.capture import WARM_UP
from comera.train.loop import train

from .captured import FIRST, assert_same, eager_step, static_steps_
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
    monkeypatch.setattr(step._capture, "_replay", lambda batch: torch.zeros(()))

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


def test_gradients_that_are_there_already_are_added_to(tapes):
    captured, eager = make_step(early=100), eager_step(early=100)
    batches = [get_batch(k) for k in range(8)]
    assert_same(captured, eager, batches)
    for step in (captured, eager):
        with static_shapes():
            torch.manual_seed(0)
            loss_fn(step.model, get_batch(99)).backward()
    assert_same(captured, eager, batches)


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
    assert_equal(state_of(other), want)
    other(get_batch(0))
