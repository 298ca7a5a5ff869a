"""What went wrong on a card, each shown on a CPU in a few lines."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

import comera
from comera.models.transformer import Encoder
from comera.ops.context import static_shapes
from comera.ops.kernels import choose, launch, lookup_kernel
from comera.ops.table.lookup import lookup as lookup_op
from comera.train import step as step_module
from comera.train.capture import WARM_UP
from comera.train.log import StepClock
from tests import test_notebooks
from tests.train.conftest import get_batch, make_step
from tests.train.counting import Launches
from tests.train.tape import Tapes


@pytest.mark.skipif(launch.find_gxx() is None, reason="no g++, which the emulation needs")
def test_one_row_five_thousand_times_is_five_thousand_times_the_row(monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "emulate")
    left, right = torch.randn(3, 4, 5), torch.randn(2, 5, 4)
    assert lookup_kernel.refuses(left, right) is None
    indices, offsets = torch.ones(5000, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    got, _, _ = lookup_op(indices, left, right, None, None, None, offsets, 6, 16, False)
    want = 5000 * (left[0].double() @ right[1].double()).reshape(1, 16)
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_compiling_a_look_up_of_a_captured_step_warns_of_nothing():
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    lookup = torch.compile(comera.TTEmbedding(24, 36, rank=5), backend="eager")
    with static_shapes():
        assert lookup(torch.tensor([1, 2])).shape == (2, 36)


def test_steps_after_a_failed_capture_stay_on_its_stream(monkeypatch):
    def fails(*_):
        raise RuntimeError("cannot be captured")

    tapes = Tapes()
    monkeypatch.setattr(tapes, "record", fails)
    monkeypatch.setattr(step_module, "graphs_on", lambda device: tapes)
    step = make_step()
    for number in range(WARM_UP + 5):
        step(get_batch(number))
    assert "cannot be captured" in step.describe().why
    assert tapes.eager == WARM_UP + 5


def test_notebooks_tests_are_collected_without_what_runs_notebooks(monkeypatch):
    for name in ("nbformat", "nbclient"):
        monkeypatch.setitem(sys.modules, name, None)
    text = Path(test_notebooks.__file__).read_text()
    exec(compile(text, "test_notebooks.py", "exec"), {"__file__": test_notebooks.__file__})


def test_an_encoder_reads_no_table_by_an_index():
    """Which takes a GPU longest of all that a step does, where a table has two rows."""
    model = Encoder(50, 16, 1, 2, 32, 12, num_segments=2)
    tokens = torch.ones(2, 5, dtype=torch.long)
    with Launches() as counter:
        model(tokens, tokens).sum().backward()
    assert not [name for name in counter.log if name in ("index", "_index_put_impl_", "index_put")]


def test_a_run_counts_the_seconds_its_steps_take_a_card(monkeypatch):
    """Here each launches four seconds of work in no time."""
    events = itertools.count(step=4000.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    event = {
        "record": lambda self, stream: setattr(self, "at", next(events)),
        "query": lambda self: True,
        "elapsed_time": lambda self, end: end.at - self.at,
    }
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: type("Event", (), event)())
    clock = StepClock(torch.device("cuda", 0))
    with clock.step():
        pass
    assert clock.seconds() == 4.0


def test_no_test_patches_a_setting_that_torch_only_makes_look_like_an_attribute():
    """pytest 9.2 deletes those afterwards: that fails, and the setting stays for other tests."""
    files = set(Path(__file__).parents[1].rglob("*.py")) - {Path(__file__)}
    assert not [path for path in files if "setattr(torch.backends" in path.read_text()]


def test_compiling_products_of_float32_on_a_card_does_not_fail_tests(monkeypatch):
    """torch advises tf32 there, once a process."""
    from torch._inductor import compile_fx  # with it come seconds of other imports

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()
