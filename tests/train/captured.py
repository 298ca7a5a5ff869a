"""Steps that are captured beside eager ones that compute as they do, on a CPU."""

import torch

from comera.ops.context import static_shapes
from comera.train.capture import WARM_UP
from comera.train.host_state import make_capturable_

from .conftest import make_step
from .test_loop import assert_equal, state_of

FIRST = WARM_UP + 2
"""The step that is captured: one makes the optimizer's state, then so many are alike."""


def eager_step(**settings):
    """As a captured step computes, operation by operation."""
    step = make_step(graph=False, **settings)
    make_capturable_(step.optimizer, torch.device("cpu"))
    return step


def static_steps_(step):
    """Let its updates alone have static shapes, as a captured one's have: evaluations do not."""
    update = step._update

    def updated(batch):
        with static_shapes():
            return update(batch)

    step._update = updated
    return step


def run_eagerly(step, batches):
    with static_shapes():
        return [step(batch) for batch in batches]


def assert_same(captured, eager, batches):
    """Losses, all states and random numbers, bit for bit."""
    torch.manual_seed(7)
    got = [captured(batch) for batch in batches]
    state = state_of(captured)
    torch.manual_seed(7)
    want = run_eagerly(eager, batches)
    assert [float(loss) for loss in got] == [float(loss) for loss in want]
    assert_equal(state, state_of(eager))


def said(caplog):
    """Warnings of the step."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if not text.startswith(("tensorize_", "TwoStage: "))]
