import logging
import math
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import comera
from comera.checkpoint.chain import CheckpointChain
from comera.nn import linear
from comera.nn.module import tensor_trains
from comera.ops.product import onednn_shapes
from comera.train.log import PlainLines, last_logged, read_metrics
from comera.train.loop import train
from comera.train.run_state import load_checkpoint, save_checkpoint
from comera.train.step import NonFiniteLossError

from ..states import assert_equal
from .conftest import evaluate, get_batch, loss_fn, make_step

STEPS = 24  # early to 6, late to 16, truncated from there on


def run(folder, step=None, get=get_batch, **settings):
    step = step or make_step()
    options = {"steps": STEPS, "log_every": 5, "evaluate": evaluate, "eval_every": 7}
    options |= {"quiet": True, "tensorboard": False, "resume": True, **settings}
    return step, train(step, get, folder=folder, **options)


def state_of(step):
    return {
        "model": step.model.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "scheduler": step.scheduler and step.scheduler.state_dict(),
        "ranks": step.ranks and step.ranks.state_dict(),
        "random": torch.get_rng_state(),
    }


def figures(folder):
    """The log without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if k not in ("time", "seconds")}
        for line in read_metrics(folder)
    ]


class Stop(Exception):
    pass


class Watch(SimpleNamespace):
    """A stand-in for the measurement of memory, whose peak is known."""

    def __init__(self, peak):
        super().__init__(begin=lambda: None, peak=lambda: peak)


def test_a_second_process_touches_nothing_of_the_first(tmp_path):
    run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = CheckpointChain(tmp_path / "checkpoints")
    other.lock()
    with pytest.raises(RuntimeError, match="being written to by another process"):
        run(tmp_path, steps=STEPS + 5)
    assert {path: path.read_bytes() for path in before} == before
    other.close()


@pytest.mark.parametrize("stop", [3, 6, 10, 16, 20], ids=lambda s: f"after-{s}")
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, stop):
    whole, _ = run(tmp_path / "whole")
    want = state_of(whole)

    def failing(number):
        if number == stop + 2:  # two steps after the last checkpoint are lost
            raise Stop
        return get_batch(number)

    with pytest.raises(Stop):
        run(tmp_path / "parts", get=failing, save_every=stop, watch=Watch(500))
    torch.manual_seed(12345)
    resumed, outcome = run(tmp_path / "parts", watch=Watch(700))
    assert_equal(state_of(resumed), want)
    assert outcome.peak_memory == 500  # of the first session, which measured it
    saved = load_checkpoint(CheckpointChain(tmp_path / "parts" / "checkpoints"), make_step())
    assert 0 < outcome.processor_seconds == saved["processor_seconds"]
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")
    assert outcome.steps == STEPS
    assert outcome.ranks["size"] <= outcome.ranks["target_size"]


def test_truncation_happens_when_the_schedule_ends(tmp_path):
    step, outcome = run(tmp_path)
    assert outcome.ranks["start_size"] > outcome.ranks["size"]
    stored = sum(c.numel() for m in tensor_trains(step.model).values() for c in m.cores)
    assert stored == outcome.ranks["size"]
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if line.get("stage") == "done" and "forced" in line] == [
        16
    ]


def test_the_log_is_one_line_a_window(tmp_path):
    run(tmp_path, tensorboard=True)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == [5, 10, 15, 20, 24]
    assert [line["step"] for line in lines if "eval/loss" in line] == [7, 14, 21, 24]
    assert lines[0]["live_ranks"].keys() == tensor_trains(make_step().model).keys()
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.usefixtures("hears_hang_ups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_the_run_goes_on(tmp_path, caplog, number):
    whole, _ = run(tmp_path / "whole")

    def interrupting(step):
        if step == 9:
            os.kill(os.getpid(), number)
        return get_batch(step)

    with caplog.at_level(logging.WARNING, "comera"):
        _, outcome = run(tmp_path / "parts", get=interrupting)
    assert outcome.interrupted
    assert outcome.steps == 10
    assert "stopping after this step" in caplog.text
    with caplog.at_level(logging.INFO, "comera"):
        resumed, outcome = run(tmp_path / "parts")
    assert not outcome.interrupted
    assert "train: going on after step 10" in caplog.text
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


@pytest.mark.usefixtures("hears_hang_ups")
def test_a_closed_terminal_is_heard_once_and_not_under_nohup(tmp_path):
    def hang_up():
        os.kill(os.getpid(), signal.SIGHUP)

    def hanging_up(step):
        if step == 9:
            hang_up()
            hang_up()  # by the system and by the shell
        return get_batch(step)

    _, outcome = run(tmp_path, get=hanging_up)
    assert (outcome.interrupted, outcome.steps) == (True, 10)
    hang_up()  # while the process ends
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    _, outcome = run(tmp_path, get=lambda step: hang_up() or get_batch(step))
    assert (outcome.interrupted, outcome.steps) == (False, STEPS)


def test_a_finished_run_is_not_trained_again(tmp_path):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    step, outcome = run(tmp_path, get=lambda number: pytest.fail("no batch is needed"))
    assert outcome.steps == STEPS
    with torch.no_grad():
        assert outcome.metrics == evaluate(step.model.eval())
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_nan_stops_saves_and_says_the_step(tmp_path):
    step = make_step()
    step._loss_fn = lambda model, batch: loss_fn(model, batch) * batch["factor"]

    def poisoned(number):
        return get_batch(number) | {"factor": torch.tensor(math.nan if number == 8 else 1.0)}

    with pytest.raises(NonFiniteLossError, match="step 9"):
        run(tmp_path, step, poisoned)
    again = make_step()
    load_checkpoint(CheckpointChain(tmp_path / "checkpoints"), again)
    assert again.steps_done == 8
    assert all(torch.isfinite(p).all() for p in again.model.parameters())
    assert last_logged(tmp_path, "failed")[0] == 9
    _, outcome = run(tmp_path)  # with other data it goes on, and nothing has failed any more
    assert outcome.steps == STEPS
    assert last_logged(tmp_path, "failed") is None


@pytest.fixture
def chain(tmp_path):
    with CheckpointChain(tmp_path, mode="lossless", background=False) as chain:
        yield chain


def test_a_checkpoint_of_another_model_is_named(chain):
    save_checkpoint(chain, make_step())
    other = make_step()
    other.model[4] = torch.nn.Linear(36, 6)
    with pytest.raises(ValueError, match=r"another model: 4.bias is \[5\] there and \[6\] here"):
        load_checkpoint(chain, other)
    other.model.append(torch.nn.Linear(6, 6))
    with pytest.raises(ValueError, match=r"it lacks 5\.bias"):
        load_checkpoint(chain, other)
    without = make_step()
    without.ranks = None
    with pytest.raises(ValueError, match="ranks"):
        load_checkpoint(chain, without)


def test_layers_that_share_their_cores_resume_after_the_cut(chain):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.output = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
            self.output.weight = self.tokens.weight

        def forward(self, x):
            return self.output(self.tokens(x))

    def tied_step():
        model = comera.tensorize_(Tied(), comera.TTConfig(embedding_rank=8, tied="share"))
        ranks = comera.ImportancePruning(model, 0.5, 1)
        optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-2))
        return comera.TrainStep(
            model, lambda m, x: nn.functional.cross_entropy(m(x), x), optimizer, ranks
        )

    step, tokens = tied_step(), torch.arange(64)
    step(tokens)
    step.ranks.finish_(step.optimizer)
    save_checkpoint(chain, step)
    resumed = tied_step()
    load_checkpoint(chain, resumed)
    assert [float(resumed(tokens)) for _ in range(2)] == [float(step(tokens)) for _ in range(2)]


def test_a_resumed_run_multiplies_by_the_same_library(chain):
    step = make_step()
    shapes = {(rows, 8, 8) for rows in range(600)}  # so many that MKL multiplies others
    onednn_shapes.update(shapes)
    save_checkpoint(chain, step)
    resumed = make_step()
    assert not onednn_shapes
    load_checkpoint(chain, resumed)
    assert onednn_shapes == shapes
    onednn_shapes.clear()


def test_a_checkpoint_that_is_missing_or_of_something_else_is_named(chain):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        load_checkpoint(chain, make_step())
    chain.save(0, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="does not hold checkpoints of a training step"):
        load_checkpoint(chain, make_step())


def test_a_run_goes_on_from_the_last_checkpoint_that_is_sound(tmp_path, caplog):
    whole, _ = run(tmp_path / "whole")
    folder = tmp_path / "damaged"

    def failing(number):
        if number == 10:
            raise Stop
        return get_batch(number)

    with pytest.raises(Stop):
        run(folder, get=failing, save_every=3)
    damaged = folder / "checkpoints" / "step-000000009" / "tensors.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    resumed, outcome = run(folder, save_every=3)
    assert "step-000000009" in caplog.text
    assert outcome.steps == STEPS
    assert_equal(state_of(resumed), state_of(whole))


def test_a_run_that_is_not_resumed_deletes_the_checkpoints_of_the_one_before(tmp_path):
    run(tmp_path, save_every=3)
    run(tmp_path, steps=2, resume=False)
    assert CheckpointChain(tmp_path / "checkpoints").steps() == [2]


def test_a_lossy_run_is_resumed_too(tmp_path):
    def chain():
        return CheckpointChain(tmp_path / "checkpoints", key_every=3)

    run(tmp_path, steps=12, save_every=2, chain=chain())
    again, outcome = run(tmp_path, steps=16, save_every=2, chain=chain())
    assert outcome.steps == 16
    assert chain().steps() == [2, 4, 6, 8, 10, 12, 14, 16]
    assert all(torch.isfinite(p).all() for p in again.model.parameters())


def test_a_run_that_restarts_is_one_that_is_broken_off_at_each_checkpoint(tmp_path):
    lossy = {"save_every": 4, "eval_every": 0}

    def chain(name):
        return CheckpointChain(tmp_path / name / "checkpoints", key_every=3)

    def failing(number):
        if number == stops[0]:
            raise Stop
        return get_batch(number)

    stops = list(range(4, STEPS, 4))
    while stops:
        with pytest.raises(Stop):
            run(tmp_path / "parts", get=failing, chain=chain("parts"), **lossy)
        stops.pop(0)
    resumed, parts = run(tmp_path / "parts", chain=chain("parts"), **lossy)
    restarted, whole = run(tmp_path / "whole", chain=chain("whole"), restart=True, **lossy)
    assert_equal(state_of(restarted), state_of(resumed))
    assert figures(tmp_path / "whole") == figures(tmp_path / "parts")
    assert 0 < whole.seconds < 2 * parts.seconds
    never, _ = run(tmp_path / "never", chain=chain("never"), **lossy)
    assert not torch.equal(next(never.model.parameters()), next(restarted.model.parameters()))


@pytest.mark.usefixtures("contracted_together")
def test_an_evaluation_joins_the_cores_once(tmp_path, monkeypatch):
    joined = []
    original = linear.contract_groups
    monkeypatch.setattr(
        linear, "contract_groups", lambda *args: joined.append("together") or original(*args)
    )
    monkeypatch.setattr(linear, "contract_layer", lambda *args: joined.append("alone"))

    def many(model):
        before = len(joined)
        figures = [evaluate(model) for _ in range(3)][-1]
        assert len(joined) == before
        return figures

    run(tmp_path, steps=2, evaluate=many)
    assert joined == ["together"] * 3  # two steps and one evaluation


@pytest.mark.parametrize("at", [7, STEPS])
def test_an_evaluation_that_fails_loses_nothing(tmp_path, at):
    want, straight = run(tmp_path / "straight", save_every=0)

    def fail(model):
        if step.steps_done == at:
            raise RuntimeError("no metric")
        return evaluate(model)

    step = make_step()
    with pytest.raises(RuntimeError, match="no metric"):
        run(tmp_path / "run", step, evaluate=fail, save_every=0)
    again, outcome = run(tmp_path / "run", save_every=0)
    assert_equal(state_of(again), state_of(want))
    assert outcome.metrics == straight.metrics


def test_metrics_may_be_tensors_and_numpys_numbers(tmp_path):
    found = {"one": torch.tensor(1.5), "two": np.float32(2.5)}
    _, outcome = run(tmp_path, evaluate=lambda model: found, steps=3)
    assert outcome.metrics == {"one": 1.5, "two": 2.5}
    assert read_metrics(tmp_path)[-1]["eval/one"] == 1.5


def test_a_folder_is_free_again_after_a_checkpoint_that_does_not_fit(tmp_path):
    run(tmp_path, steps=3)
    wide = comera.TrainStep(nn.Linear(3, 4), loss_fn, torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(ValueError, match="belongs to another model") as kept:
        run(tmp_path, wide)
    assert kept  # as a notebook keeps it, and with it all that it holds
    _, outcome = run(tmp_path)
    assert outcome.steps == STEPS


def test_output_that_is_no_terminal_gets_a_line_now_and_then(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(PlainLines, "EVERY", 0.0)
    run(tmp_path / "a", quiet=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if "/24: loss " in line]
    assert [int(line.split("/")[0].split()[-1]) for line in lines] == [5, 10, 15, 20, 24]
    run(tmp_path / "b")
    assert "loss" not in capsys.readouterr().out
