"""What went wrong on a card, each shown on a CPU in a few lines."""

import pytest
import torch

import comera
from comera.ops.fixed_sizes import fixed_sizes
from comera.ops.kernels import choose, emulate, look_up
from comera.ops.look_up import look_up as look_up_op


@pytest.mark.skipif(emulate.compiler() is None, reason="no g++, which the emulation needs")
def test_one_row_five_thousand_times_is_five_thousand_times_the_row(monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "emulate")
    left, right = torch.randn(3, 4, 5), torch.randn(2, 5, 4)
    assert look_up.reads_by_kernel(left, right)
    indices, offsets = torch.ones(5000, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    got, _, _ = look_up_op(indices, left, right, None, None, None, offsets, 6, 16)
    want = 5000 * (left[0].double() @ right[1].double()).reshape(1, 16)
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_compiling_a_look_up_of_a_captured_step_warns_of_nothing():
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    look_up = torch.compile(comera.TTEmbedding(24, 36, rank=5), backend="eager")
    with fixed_sizes():
        assert look_up(torch.tensor([1, 2])).shape == (2, 36)
