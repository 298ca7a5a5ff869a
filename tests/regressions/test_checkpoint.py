"""What once went wrong in saving and reading training, each in a few lines."""

import errno

import pytest
import torch
from torch import nn

import comera
from comera.checkpoint.streams import DamagedError
from comera.files import replacing

from ..checkpoint.test_damage import made_up, nested


def read_after(folder, *states, **arguments):
    """What is read of the last of several states of a model that were saved one by one."""
    with comera.CheckpointChain(folder, background=False, **arguments) as chain:
        for step, state in enumerate(states):
            chain.save(step, state)
        return chain.load().model


def test_a_lossy_chain_reads_the_checkpoint_after_canonicalize(tmp_path):
    def make():
        return nn.Sequential(
            comera.TTLinear(64, 128, rank=24), nn.GELU(), comera.TTLinear(128, 64, rank=24)
        )

    model, read, x = make(), make(), torch.randn(256, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    comera.canonicalize_(model)
    read.load_state_dict(read_after(tmp_path, before, model.state_dict()))
    with torch.no_grad():
        assert float((read(x) - model(x)).norm() / model(x).norm()) < 0.08  # it was 0.63


def test_a_layer_that_became_zero_is_read_as_zeros(tmp_path):
    weight = torch.randn(64, 64)
    read = read_after(tmp_path, {"w": weight}, {"w": torch.zeros_like(weight)})
    assert not read["w"].any()


@pytest.mark.parametrize("sizes", [(3e19, 4e19), (1, 1e-20), (1, 1e30), (1, 1e-25)], ids=str)
def test_weights_of_extreme_sizes_are_saved_and_read(tmp_path, sizes):
    first, last = (torch.randn(64, 64) * size for size in sizes)
    read = read_after(tmp_path, {"w": first}, {"w": last})["w"]
    assert float((read.double() - last.double()).norm() / last.double().norm()) < 0.25


def test_a_file_nested_600_deep_is_damaged(tmp_path):
    made_up(tmp_path, {"skeleton": nested(600), "records": []})
    with pytest.raises(DamagedError, match="nested more than"):  # it was a RecursionError
        comera.CheckpointChain(tmp_path).load(9)


def test_a_full_disk_says_which_file_and_what_to_do(tmp_path):
    told = pytest.raises(OSError, match=r"No space left .*free some space.*result.json")
    with told as caught, replacing(tmp_path / "result.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
