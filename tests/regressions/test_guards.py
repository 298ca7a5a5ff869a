"""What operators took that they cannot mean, and what a context did not see."""

import subprocess
import sys

import pytest
import torch

import comera

TABLES = [comera.TTEmbedding, comera.TTEmbeddingBag]

NO_BAGS = """
import comera, sys, torch
bag = comera.TTEmbeddingBag(10, 4, mode=sys.argv[1], rank=2, dtype=torch.float64)
try:
    bag(torch.tensor([1, 2]), torch.tensor([], dtype=torch.long))
except ValueError as refused:
    print(refused)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_entries_in_no_bag_do_not_end_the_process(mode):
    command = [sys.executable, "-c", NO_BAGS, mode]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "the input has 2 entries" in done.stdout


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("hot_rows", [0, 5])
def test_a_mask_is_no_index(kind, hot_rows):
    with pytest.raises(TypeError, match=r"torch\.bool"):
        kind(50, 24, rank=4, hot_rows=hot_rows)(torch.tensor([[True, False]]))


def test_an_evaluation_sees_weights_that_change_inside_its_context():
    layer, x = comera.TTLinear(24, 36, rank=5), torch.randn(3, 24)
    with torch.no_grad(), comera.BatchedContraction(layer):
        before = layer(x)
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
        after = layer(x)
    torch.testing.assert_close(after, layer(x))
    assert not torch.allclose(after, before)
