"""What a training step would start on a card where the kernels run."""

import pytest
import torch

from comera.ops.fixed_sizes import fixed_sizes
from comera.ops.kernels import look_up, merge
from comera.optim.capturable import make_capturable_
from tests.train.test_launches import launches, make_step


@pytest.mark.parametrize(("late", "budget"), [(False, 585), (True, 625)], ids=["early", "late"])
def test_launches_of_a_captured_step_stay_within_their_budget(late, budget, emulated, monkeypatch):
    """The paper's six encoders, counted as in ``tests/train``; raise a budget only for a reason."""
    started = []
    for module in (merge, look_up):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda *a, launch=launch: started.append(a[1]) or launch(*a)
        )
    step = make_step(late=late)
    make_capturable_(step.optimizer, torch.device("cpu"))
    with fixed_sizes():
        assert launches(step) <= budget
    assert len(started) == 2 * 8  # the layers' joining takes three a step, the table five
