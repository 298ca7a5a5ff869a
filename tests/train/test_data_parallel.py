"""Steps of several processes, with recordings in the place of CUDA graphs; on a GPU with those."""

import functools
import gc
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import comera
from comera.ops.context import static_shapes
from comera.train import step as step_module
from comera.train.data_parallel import WARM_UP_TOGETHER, DataParallel
from comera.train.host_state import make_capturable_
from tests.processes import in_two_processes

from .conftest import get_batch, loss_fn, make_step
from .tape import Tapes
from .test_broken_off import Failing, with_loss
from .test_loop import assert_equal

FIRST = WARM_UP_TOGETHER + 2
"""The step that is captured: one makes the optimizer's state, then so many are alike."""

LEARNING = {"early": 18, "late": 22, "dropout": 0.0}
STEPS, TRUNCATED_AFTER = 66, 40


def make_parallel_step(tapes=None, model_settings=None, **settings):
    """Of a ``DistributedDataParallel``; with tapes a captured one."""
    settings = LEARNING | settings
    step = make_step(graph=False, **settings)
    model = nn.parallel.DistributedDataParallel(step.model, **(model_settings or {}))
    before, step_module.graphs_on = step_module.graphs_on, lambda device: tapes
    try:
        make_capturable_(step.optimizer, torch.device("cpu"))
        made = comera.TrainStep(
            model, loss_fn, step.optimizer, step.ranks, accumulate=step.accumulate,
            clip_norm=step.clip_norm, scheduler=step.scheduler, graph=tapes is not None,
        )  # fmt: skip
    finally:
        step_module.graphs_on = before
    return made


def rows_of(rank, number, rows=8):
    """This process' part of a batch of twice as many rows."""
    batch = get_batch(number, rows=2 * rows)
    return {name: value[rank::2].contiguous() for name, value in batch.items()}


def run(step, get, steps=STEPS):
    """All stages; the ranks are truncated when the last one has ended."""
    losses = []
    with static_shapes():
        for number in range(steps):
            losses.append(float(step(get(number))))
            if number + 1 == TRUNCATED_AFTER:
                step.ranks.finish_(step.optimizer)
    return losses


def weights_of(step):
    return {
        name.removeprefix("module."): value.clone()
        for name, value in step.model.state_dict().items()
    }


def said(records):
    return [r.getMessage() for r in records if not r.getMessage().startswith("tensorize_")]


class Heard(logging.Handler):
    """What ``comera`` says meanwhile."""

    def __enter__(self):
        self.records = []
        logging.getLogger("comera").addHandler(self)
        return self.records

    def __exit__(self, *problem):
        logging.getLogger("comera").removeHandler(self)

    def emit(self, record):
        self.records.append(record)


def stages(rank):
    """Captured, eager, and one process on the whole batches."""
    found = {}
    for parts in (1, 2):
        tapes = Tapes()
        captured = make_parallel_step(tapes, accumulate=parts)
        found["captured", parts] = run(captured, functools.partial(rows_of, rank))
        eager = make_parallel_step(accumulate=parts)
        found["eager", parts] = run(eager, functools.partial(rows_of, rank))
        found["weights", parts] = weights_of(captured), weights_of(eager)
        found["counts", parts] = len(tapes.tapes), captured.describe().replays
        captured._capture.free()
    static = make_parallel_step(None, {"static_graph": True})
    found["static graph"] = run(static, functools.partial(rows_of, rank))
    single = make_step(graph=False, **LEARNING)
    found["single"] = run(single, functools.partial(get_batch, rows=16))
    found["single", "weights"] = weights_of(single)
    return found


def chosen(rank):
    """Ranks chosen by gradients, which each process has of its own rows."""
    step, single = make_parallel_step(early=6, late=0), make_step(early=6, late=0, dropout=0.0)
    for number in range(6):
        step(rows_of(rank, number))
        single(get_batch(number))
    before = [each.ranks.state_dict()["importance"].clone() for each in (step, single)]
    outcome = step.ranks.finish_(step.optimizer)
    layers = comera.compression_report(step.model).to_pandas()
    return before, outcome, layers["ranks"].tolist(), float(step(rows_of(rank, 7)))


def a_failure(rank, when):
    """The second process cannot capture, and says why."""

    def fails(model, batch):
        loss = loss_fn(model, batch)
        if rank == 1 and when == "while recording":
            return loss * float(loss.detach() > 0)
        return loss

    def get(number):
        batch = rows_of(rank, number)
        if rank == 1 and when == "before":
            batch["y"] = batch["y"].numpy()
        return batch

    def takes_all(model, batch):
        return fails(model, {**batch, "y": torch.as_tensor(batch["y"])})

    tapes = Tapes()
    step, eager = make_parallel_step(tapes), make_parallel_step()
    step._loss_fn = step._eager_loss_fn = takes_all
    with Heard() as records:
        losses = run(step, get, FIRST + 4)
    want = run(eager, functools.partial(rows_of, rank), FIRST + 4)
    return {
        "equal": losses == want,
        "said": said(records),
        "why": step.describe().why,
        "recordings": len(tapes.tapes),
        "all freed": all(tape.freed for tape in tapes.tapes),
    }


def a_short_batch(rank):
    """Only the second process has one; replaying would wait for it forever."""

    def get(number):
        return rows_of(rank, number, rows=5 if rank == 1 and number == FIRST + 3 else 8)

    tapes = Tapes()
    captured, eager = make_parallel_step(tapes, early=100), make_parallel_step(early=100)
    equal = run(captured, get, FIRST + 8) == run(eager, get, FIRST + 8)
    eager_steps = tapes.eager
    captured._capture.free()
    return {"equal": equal, "eager": eager_steps, "recordings": len(tapes.tapes)}


def batches_of_another_shape(rank):
    """From some step on in the second process: both capture anew."""

    def get(number):
        return rows_of(rank, number, rows=5 if rank == 1 and number >= FIRST + 3 else 8)

    tapes = Tapes()
    count = FIRST + 3 + WARM_UP_TOGETHER + 4
    captured, eager = make_parallel_step(tapes, early=100), make_parallel_step(early=100)
    equal = run(captured, get, count) == run(eager, get, count)
    freed = [tape.freed for tape in tapes.tapes]
    captured._capture.free()
    return {"equal": equal, "freed": freed}


def a_loss_that_is_not_finite(rank):
    step = make_parallel_step()
    step._loss_fn = step._eager_loss_fn = lambda model, batch: (
        loss_fn(model, batch) * (float("nan") if rank == 1 else 1.0)
    )
    try:
        step(rows_of(rank, 0))
    except comera.train.step.NonFiniteLossError as problem:
        return str(problem)
    return "nothing was raised"


def refusals(rank):
    def average(state, bucket):
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    found = {}
    for name, settings in (
        ("unused", {"find_unused_parameters": True}),
        ("view", {"gradient_as_bucket_view": True}),
    ):
        tapes = Tapes()
        step = make_parallel_step(tapes, settings, early=100)
        eager = make_parallel_step(None, settings, early=100)
        get = functools.partial(rows_of, rank)
        equal = run(step, get, FIRST + 2) == run(eager, get, FIRST + 2)
        found[name] = equal, step.describe().captured, step.describe().why
        step._capture.free()
    step = make_parallel_step(Tapes())
    step.model.register_comm_hook(None, average)
    step(rows_of(rank, 0))
    found["hook"] = step.describe().why
    return found


def broken_off(rank):
    """In both processes of a ``DistributedDataParallel`` the same part raises."""
    found = {}
    for how in ("loss", "backward", "ctrl-c", "optimizer"):
        for settings in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            for part in (1, 2):
                error = KeyboardInterrupt if how == "ctrl-c" else MemoryError
                broken, other = (
                    with_loss(
                        make_parallel_step(None, settings, accumulate=2, early=2),
                        Failing(error, how == "backward"),
                    )
                    for _ in range(2)
                )
                for number in range(2):
                    broken(rows_of(rank, number))
                    other(rows_of(rank, number))
                break_off_together(broken, rank, how, part)
                clean = all(param.grad is None for param in broken.model.parameters())
                losses = [
                    [float(step(rows_of(rank, number))) for number in range(100, 104)]
                    for step in (broken, other)
                ]
                weights = [weights_of(step) for step in (broken, other)]
                found[how, *settings, part] = clean, losses, weights
    return found


def break_off_together(step, rank, how, part):
    if how != "optimizer":
        step._loss_fn.parts_left = part
        with pytest.raises(step._loss_fn.error, match="no room"):
            step(rows_of(rank, 50))
        return

    def refuse(*_):
        raise MemoryError("no room")

    hook = step.optimizer.register_step_pre_hook(refuse)
    with pytest.raises(MemoryError):
        step(rows_of(rank, 50))
    hook.remove()


def a_layer_that_is_left_out(linear_format, wrap):
    """Weights after steps of which only the first uses every layer; gates stay as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    config = comera.TTConfig(rank=2, linear_format=linear_format, init="orthogonal")
    comera.tensorize_(model, config)
    params = [p for name, p in model.named_parameters() if "gates" not in name]
    step = comera.TrainStep(
        wrap(Cut(model)), lambda m, batch: m(*batch).square().mean(), torch.optim.AdamW(params, 0.1)
    )
    for both in (True, False, False):
        step((torch.ones(4, 64), both))
    return {name: p.detach() for name, p in model.named_parameters()}


class Cut(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, both):
        return self.layers(x) if both else self.layers[0](x)


def left_out(rank):
    wrap = functools.partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
    return {of: a_layer_that_is_left_out(of, wrap) for of in ("tt", "btt")}


def _found(rank):
    return {
        "left out": left_out(rank),
        "broken off": broken_off(rank),
        "stages": stages(rank),
        "before": a_failure(rank, "before"),
        "while recording": a_failure(rank, "while recording"),
        "short batch": a_short_batch(rank),
        "other shape": batches_of_another_shape(rank),
        "not finite": a_loss_that_is_not_finite(rank),
        "refusals": refusals(rank),
        "chosen": chosen(rank),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes found; starting them takes longer than all they do."""
    return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_captured_steps_equal_eager_ones_through_stages_and_truncation(results, parts):
    for found in (result["stages"] for result in results):
        assert found["captured", parts] == found["eager", parts]
        captured, eager = found["weights", parts]
        assert captured.keys() == eager.keys()
        assert all(torch.equal(captured[name], eager[name]) for name in captured)
        assert found["counts", parts] == (3, 30)  # early, late, truncated
    assert results[0]["stages"]["captured", parts] == results[1]["stages"]["captured", parts]


@pytest.mark.slow
def test_processes_choose_the_same_ranks(results):
    (mine, *first), (theirs, *second) = (result["chosen"] for result in results)
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(*mine)  # as one process that has all rows
    assert first == second


@pytest.mark.slow
def test_processes_together_learn_as_one_that_has_the_whole_batch(results):
    """The rank objective included, which weighs the size against the loss of all."""
    for found in (result["stages"] for result in results):
        for name in (("eager", 1), ("eager", 2), "static graph"):
            assert found[name] == pytest.approx(found["single"], rel=1e-5)
        weights, single = found["weights", 1][1], found["single", "weights"]
        assert [w.shape for w in weights.values()] == [w.shape for w in single.values()]
        for name in weights:
            torch.testing.assert_close(weights[name], single[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "why", "recordings"),
    [
        ("before", "in process 1: batch['y'] is a ndarray: give tensors", [0, 0]),
        ("while recording", "in process 1: NotCapturableError: aten._local_scalar", [1, 0]),
    ],
)
def test_where_one_process_cannot_capture_all_run_eagerly(results, when, why, recordings):
    found = [result[when] for result in results]
    assert [one["recordings"] for one in found] == recordings
    for one in found:
        assert one["equal"]
        assert one["all freed"]
        assert one["why"].startswith(why)
    ((said,), nothing) = (one["said"] for one in found)
    assert why in said
    assert not nothing


@pytest.mark.slow
def test_a_short_batch_of_one_process_is_an_eager_step_of_all(results):
    for found in (result["short batch"] for result in results):
        assert found["equal"]
        assert found["recordings"] == 1
        assert found["eager"] == FIRST - 1 + 1


@pytest.mark.slow
def test_batches_of_another_shape_in_one_process_are_captured_anew_by_all(results):
    for found in (result["other shape"] for result in results):
        assert found["equal"]
        assert found["freed"] == [True, False]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_process_stops_all(results):
    advice = "at a learning rate of 0.01: if the data are sound, halve the rate"
    assert [result["not finite"] for result in results] == [
        f"the loss is nan at step 1, {advice}"
    ] * 2


@pytest.mark.slow
def test_processes_that_all_break_off_go_on_together(results):
    mine, theirs = (result["broken off"] for result in results)
    assert len(mine) == 24
    for case in mine:
        for clean, (losses, want), (weights, wanted) in (mine[case], theirs[case]):
            assert clean, case
            assert losses == want, case
            assert_equal(weights, wanted)
        assert_equal(mine[case][2], theirs[case][2])


@pytest.mark.slow
@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_a_layer_that_all_processes_leave_out_is_not_stepped(results, linear_format):
    want = a_layer_that_is_left_out(linear_format, lambda model: model)
    for result in results:
        torch.testing.assert_close(result["left out"][linear_format], want)


@pytest.mark.slow
def test_what_of_distributed_data_parallel_can_be_captured(results):
    for found in (result["refusals"] for result in results):
        equal, captured, why = found["unused"]
        assert equal
        assert not captured
        assert "find_unused_parameters=True) reads back which parameters were used" in why
        equal, captured, _ = found["view"]
        assert equal
        assert captured
        assert "communication hook" in found["hook"]


def test_what_nccl_needs_to_be_captured(monkeypatch):
    def why(backends, version=(2, 27, 5)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
        wrapper = SimpleNamespace(
            module=nn.Linear(1, 1), process_group=None, find_unused_parameters=False,
            _comm_hooks=[], mixed_precision=None, _delay_all_reduce_params=[],
        )  # fmt: skip
        return DataParallel(wrapper).why_not_capturable(torch.device("cuda"))

    assert why("cpu:gloo,cuda:nccl") is None
    assert "talk over gloo, and only operations of nccl" in why("cpu:gloo,cuda:gloo")
    assert "talk over None" in why("cpu:gloo")
    assert why("cuda:nccl", (2, 8, 3)).startswith("NCCL (2, 8, 3) cannot be captured, (2, 9, 6)")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert why("cuda:nccl") == (
        "TORCH_NCCL_BLOCKING_WAIT makes the host wait for each reduction: unset it"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
def test_cuda_graphs_of_one_process(tmp_path, parts):
    """Everything but a second GPU: operations of NCCL, hooks and buffers are in the graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        settings = {"device": "cuda", "dropout": 0.0, "accumulate": parts, "early": 1000}
        steps = [make_step(graph=False, **settings) for _ in range(2)]
        captured, eager = (
            comera.TrainStep(
                nn.parallel.DistributedDataParallel(step.model), loss_fn, step.optimizer,
                step.ranks, accumulate=parts, clip_norm=1.0, scheduler=step.scheduler, graph=graph,
            )
            for step, graph in zip(steps, (True, False), strict=True)
        )  # fmt: skip
        make_capturable_(eager.optimizer, device)
        batches = [get_batch(k, device="cuda") for k in range(FIRST + 8)]
        got = torch.stack([captured(batch) for batch in batches])
        with static_shapes():
            want = torch.stack([eager(batch) for batch in batches])
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        described = captured.describe()
        assert described.captured, described
        assert described.replays == 9
        captured.ranks.finish_(captured.optimizer)
        for batch in batches:
            captured(batch)
        assert captured.describe().captures == 2
        captured._capture.free()
        del captured, eager, steps
    finally:
        gc.collect()
        dist.destroy_process_group()
