"""Which batches a captured step takes, and what it says of others."""

import re

import pytest
import torch
from torch.nn import functional as F

from comera.train.capture import WARM_UP

from .captured import FIRST, assert_same, eager_step, said
from .conftest import get_batch, loss_fn, make_step


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
