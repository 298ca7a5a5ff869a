"""Steps that raise before their end: the next one is as if they had not been asked for."""

import copy

import pytest
import torch

import comera
from comera.nn.module import tensor_trains
from comera.ops.context import static_shapes
from comera.train import step as step_module
from comera.train.capture import WARM_UP
from comera.train.host_state import make_capturable_

from .conftest import get_batch, loss_fn, make_step
from .tape import Tapes
from .test_loop import assert_equal, state_of

FIRST = WARM_UP + 2
"""The step that is captured."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("no room for a gradient")


class Failing:
    """A ``loss_fn`` that raises once, when it is armed: in the so-manyth part of a batch."""

    def __init__(self, error=MemoryError, in_backward=False):
        self.error, self.in_backward, self.parts_left = error, in_backward, None

    def __call__(self, model, batch):
        loss = loss_fn(model, batch)
        if self.parts_left is None:
            return loss
        self.parts_left -= 1
        if self.parts_left:
            return loss
        self.parts_left = None
        if self.in_backward:
            return FailsInBackward.apply(loss)
        raise self.error("no room")


def with_loss(step, loss):
    step._loss_fn = step._eager_loss_fn = loss
    return step


def break_off(step, number, part, **batch):
    """Ask for a step whose so-manyth part raises."""
    failing = step._loss_fn
    failing.parts_left = part
    with pytest.raises(failing.error, match="no room"):
        step(get_batch(number, **batch))
    assert failing.parts_left is None
    assert all(param.grad is None for param in step.model.parameters())


def go_on(broken, other, count=6):
    """Both, bit for bit."""
    for number in range(100, 100 + count):
        assert torch.equal(broken(get_batch(number)), other(get_batch(number)))
    assert_equal(state_of(broken), state_of(other))


STAGES = {
    "early": {},
    "first late step": {"early": 2, "late": 20},
    "late from the start": {"early": 0, "late": 20, "steps": 0},
    "importance": {"early": 20, "late": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("how", ["loss", "backward", "ctrl-c"])
@pytest.mark.parametrize("stage", STAGES)
def test_neither_gradients_nor_rank_learning_keep_anything(stage, how, part):
    settings = {"dropout": 0.0, "accumulate": 2} | STAGES[stage]
    steps = settings.pop("steps", 2)
    error = KeyboardInterrupt if how == "ctrl-c" else MemoryError
    broken, other = (
        with_loss(make_step(**settings), Failing(error, how == "backward")) for _ in range(2)
    )
    for number in range(steps):
        broken(get_batch(number))
        other(get_batch(number))
    before = copy.deepcopy(state_of(broken))
    break_off(broken, 50, part)
    assert_equal(state_of(broken), before)
    go_on(broken, other)


def test_an_optimizer_that_raises_before_it_steps():
    broken, other = (make_step(dropout=0.0, accumulate=2) for _ in range(2))

    def refuse(*_):
        raise RuntimeError("not now")

    for step in (broken, other):
        step(get_batch(0))
    hook = broken.optimizer.register_step_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not now"):
        broken(get_batch(50))
    hook.remove()
    assert all(param.grad is None for param in broken.model.parameters())
    go_on(broken, other)


def in_backward(**settings):
    base = make_step(dropout=0.0, clip_norm=None, **settings)
    updates = comera.OptimizerInBackward(base.optimizer)
    return comera.TrainStep(
        base.model, Failing(), updates, base.ranks,
        accumulate=base.accumulate, scheduler=base.scheduler,
    )  # fmt: skip


@pytest.mark.parametrize("part", [1, 2])
def test_with_per_layer_updates_a_part_that_raises_before_its_backward(part):
    broken, other = (in_backward(accumulate=2) for _ in range(2))
    for number in range(2):
        broken(get_batch(number))
        other(get_batch(number))
    break_off(broken, 50, part)
    go_on(broken, other)


def test_with_per_layer_updates_a_backward_that_breaks_off_midway():
    """What has been updated stays so, and the next step updates everything again."""
    step = in_backward(accumulate=2)
    step(get_batch(0))
    armed = [True]

    def fail(grad):
        if armed:
            raise MemoryError("no room")

    gate = next(iter(tensor_trains(step.model).values())).gates[0]  # of what is read first
    gate.register_hook(fail)
    with pytest.raises(MemoryError):
        step(get_batch(1))
    armed.clear()
    assert all(param.grad is None for param in step.model.parameters())
    before = [param.detach().clone() for param in step.model.parameters()]
    step(get_batch(2))
    pairs = zip(step.model.parameters(), before, strict=True)
    assert not any(torch.equal(param, was) for param, was in pairs)
    assert step.steps_done == step.ranks.steps_done == 2


@pytest.mark.usefixtures("contracted_together")
def test_layers_keep_nothing_of_a_merge_that_broke_off(monkeypatch):
    """Else an evaluation would go on with gates of the step before."""
    step = make_step(dropout=0.0)

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("comera.nn.linear.contract_groups", fail)
    with pytest.raises(MemoryError):
        step(get_batch(0))
    assert all(layer.shared_gates is None for layer in tensor_trains(step.model).values())


@pytest.fixture
def captured(monkeypatch):
    """A step that records and replays, and one that computes the same eagerly."""
    tapes = Tapes()
    settings = {"dropout": 0.0, "early": 30, "accumulate": 2}
    other = with_loss(make_step(graph=False, **settings), Failing())
    make_capturable_(other.optimizer, torch.device("cpu"))
    monkeypatch.setattr(step_module, "graphs_on", lambda device: tapes)
    return with_loss(make_step(**settings), Failing()), other, tapes


@pytest.mark.parametrize(
    ("done", "batch"),
    [(1, {}), (WARM_UP, {}), (FIRST + 1, {"rows": 5})],
    ids=["first", "warming up", "short batch after a recording"],
)
@pytest.mark.parametrize("part", [1, 2])
def test_where_steps_are_captured(captured, done, batch, part):
    broken, other, tapes = captured
    with static_shapes():
        for number in range(done):
            assert torch.equal(broken(get_batch(number)), other(get_batch(number)))
        break_off(broken, 50, part, **batch)
        go_on(broken, other, FIRST + 2)
    assert broken.describe().captured
    assert len(tapes.tapes) == 1


@pytest.mark.parametrize("part", [1, 2])
def test_ctrl_c_while_a_step_is_recorded(captured, part):
    broken, other, tapes = captured
    broken._loss_fn.error = KeyboardInterrupt
    with static_shapes():
        for number in range(FIRST - 1):
            assert torch.equal(broken(get_batch(number)), other(get_batch(number)))
        assert not tapes.tapes
        break_off(broken, 50, part)
        go_on(broken, other, FIRST + 2)
    assert broken.describe().captured
