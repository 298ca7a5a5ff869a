"""What a training step would start on a card where the kernels run."""

import pytest
import torch

from comera.ops.context import static_shapes
from comera.ops.kernels import contract_kernel, lookup_kernel, low_rank_kernel
from comera.train.host_state import make_capturable_
from tests.train.counting import Launches
from tests.train.test_launches import batch, make_step


@pytest.mark.parametrize(
    ("late", "precision", "budget"),
    [(False, "fp32", 368), (True, "fp32", 395), (True, "bf16", 451)],
    ids=["early", "late", "late, bfloat16"],
)
def test_launches_of_a_captured_step_stay_within_their_budget(
    late, precision, budget, emulated, monkeypatch
):
    """The paper's six encoders: what PyTorch starts, as ``tests/train`` counts, and the kernels.

    In float32 a block adds 39: forward four kernels for its six layers, two products of all
    heads' factors, fused attention, the activation, and twice dropout, residual and layer norm;
    backward eight kernels, four products of factors, four operations of attention, three of the
    activation, and twice layer norm, dropout and the sum of two gradients. Under autocast come
    six casts, mostly of what layer norms take and give. Gradients of the table's halves are summed
    in float64, one operation more than in float32. Raise a budget only for a reason.
    """
    started = []
    for module in (contract_kernel, lookup_kernel, low_rank_kernel):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda *a, launch=launch: started.append(a[1]) or launch(*a)
        )
    step, data = make_step(late=late, precision=precision), batch()
    make_capturable_(step.optimizer, torch.device("cpu"))
    with static_shapes():
        step(data)
        started.clear()
        with Launches() as counter:
            step(data)
    assert counter.count + len(started) <= budget
    kinds = [name.rsplit("_", 1)[0] for name in started]
    assert (
        kinds.count("contract") == kinds.count("contract_back_cores") == 2
    )  # the layers', the table's
    assert kinds.count("low_rank_forward") == 6 * 4 + 1  # q, k and v together, and the pooler
    assert kinds.count("low_rank_back_rows") == kinds.count("low_rank_back_columns") == 6 * 4 + 1
