"""A save that is broken off leaves the earlier model, or the later one; never a mixture."""

import errno
import signal
from itertools import cycle

import pytest
import torch
from torch import nn

import comera
from comera import files
from comera.saved import model_folder
from tests.processes import killed


def _save_without_end(folder, ready):
    for rank in cycle([2, 3]):
        model = comera.tensorize_(nn.Linear(64, 64), comera.TTConfig(rank=rank, init="orthogonal"))
        with torch.no_grad():
            for core in model.cores:
                core.fill_(rank)
        comera.save_model(model, folder)
        ready.send("saved")


@pytest.mark.slow
def test_killed_at_any_time(tmp_path):
    for kill in range(6):
        assert killed(_save_without_end, tmp_path, after=0.004 * kill) == -signal.SIGKILL
        loaded = comera.load_model(tmp_path, nn.Linear(64, 64))
        assert all((core == loaded.ranks[0]).all() for core in loaded.cores)


def test_a_model_that_is_trained_meanwhile(tmp_path, monkeypatch):
    """By another thread: what is noted of a tensor and what is written would not be one."""
    model = comera.tensorize_(nn.Linear(64, 64), comera.TTConfig(rank=2, init="orthogonal"))
    comera.save_model(model, tmp_path)
    want, real = model.cores[1].detach().clone(), model_folder.write_tensors

    def slow(*args):
        with torch.no_grad():
            model.cores[1].mul_(2)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "write_tensors", slow)
        with pytest.raises(RuntimeError, match=r"being saved: cores\.1\. .*copy\.deepcopy"):
            comera.save_model(model, tmp_path)
    assert torch.equal(comera.load_model(tmp_path, nn.Linear(64, 64)).cores[1], want)
    comera.save_model(model, tmp_path)
    assert torch.equal(comera.load_model(tmp_path, nn.Linear(64, 64)).cores[1], 2 * want)


@pytest.mark.parametrize("failing", [0, 1], ids=["weights", "description"])
def test_a_disk_that_is_full(tmp_path, monkeypatch, failing):
    first, second = (
        comera.tensorize_(nn.Linear(64, 64), comera.TTConfig(rank=rank, init="orthogonal"))
        for rank in (2, 3)
    )
    comera.save_model(first, tmp_path)
    names = (model_folder.WEIGHTS, model_folder.DESCRIPTION)
    real = model_folder.replacing

    def full(path):
        if path.name == names[failing]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path)

    for module in (model_folder, files):
        monkeypatch.setattr(module, "replacing", full)
    with pytest.raises(OSError, match="No space left"):
        comera.save_model(second, tmp_path)
    whole = (first, second)[failing]
    loaded = comera.load_model(tmp_path, nn.Linear(64, 64))
    assert torch.equal(loaded.weight, whole.weight)
