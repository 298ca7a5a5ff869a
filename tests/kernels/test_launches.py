"""What a training step would start on a card where the kernels run."""

import pytest
import torch

from comera.ops.context import static_shapes
from comera.ops.kernels import contract_kernel, lookup_kernel
from comera.train.host_state import make_capturable_
from tests.train.counting import Launches, attention_as_on_a_card
from tests.train.test_launches import batch, make_step

pytestmark = pytest.mark.usefixtures("contracted_together")


@pytest.mark.parametrize(
    ("late", "precision", "budget"),
    [(False, "fp32", 481), (True, "fp32", 507), (True, "bf16", 554)],
    ids=["early", "late", "late, bfloat16"],
)
def test_launches_of_a_captured_step_stay_within_their_budget(
    late, precision, budget, emulated, monkeypatch
):
    """The paper's six encoders: what PyTorch starts, as ``tests/train`` counts, and the kernels.

    Products of the batch with factors are torch's. Gradients of the table's halves are summed in
    float64, one operation more than in float32. Two operations of the mask are for sequences of
    padding alone. Raise a budget only for a reason.
    """
    started = []
    for module in (contract_kernel, lookup_kernel):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda *a, launch=launch: started.append(a[1]) or launch(*a)
        )
    step, data = make_step(late=late, precision=precision), batch()
    make_capturable_(step.optimizer, torch.device("cpu"))
    with attention_as_on_a_card(), static_shapes():
        step(data)
        started.clear()
        with Launches() as counter:
            step(data)
    assert counter.count + len(started) <= budget
    of_layers = "contract_f32_bf16" if precision == "bf16" else "contract_f32"
    contracted = sorted(name for name in started if name.startswith("contract"))
    assert contracted == sorted(  # the layers', the table's
        name.replace("contract", kernel)
        for name in (of_layers, "contract_f32")
        for kernel in ("contract", "contract_back_last", "contract_back_first")
    )
