"""A ``Trainer`` of Lightning in two processes: as one process trains, and resumed exactly."""

import os

import pytest
import torch

from tests.integrations.test_lightning import (
    Module,
    check_as_our_own_step,
    fit,
    lightning,
    rows,
)
from tests.processes import in_two_processes

pytestmark = [
    pytest.mark.slow,  # two interpreters have to start
    pytest.mark.filterwarnings("ignore"),
]

EPOCHS = 8
"""Of one step each: both stages take three."""


def _trained(folder, rank, dropout, epochs, resume=None, **settings):
    module = Module(dropout).double()
    trainer, callback = fit(
        module, folder, resume=resume, max_epochs=epochs, shuffle=bool(dropout), strategy="ddp",
        devices=2, precision="64-true", gradient_clip_val=0.1, **settings,
    )  # fmt: skip
    state = {key: value.clone() for key, value in module.state_dict().items()}
    return callback.outcome, state, trainer.global_step


def _found(rank):
    os.environ |= {  # as torchrun has it
        "TORCHELASTIC_RUN_ID": "run", "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    folder = os.environ["FOLDER"]
    found = {"plain": _trained(folder, rank, 0.0, EPOCHS)}
    found["whole"] = _trained(folder, rank, 0.2, EPOCHS)
    for epochs in (2, 5, 7):  # in the early stage, in the late one, after the cut
        name = "{epoch}" + f"-{epochs}"
        keep = lightning.callbacks.ModelCheckpoint(folder, name, save_top_k=-1)
        _trained(folder, rank, 0.2, epochs, callbacks=[keep])
        path = f"{folder}/epoch={epochs - 1}-{epochs}.ckpt"
        found[epochs] = _trained(folder, rank, 0.2, EPOCHS, resume=path)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(tmp_path_factory.mktemp("runs")))
        return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


def test_they_train_and_cut_as_one_process_does(results):
    batch = tuple(tensor.double() for tensor in rows().tensors)
    for found in results:
        outcome, state, _ = found["plain"]
        check_as_our_own_step(state, outcome, [batch], EPOCHS, clip_norm=0.1)


def test_both_hold_the_same_model(results):
    first, second = (found["whole"] for found in results)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


@pytest.mark.parametrize("epochs", [2, 5, 7], ids=["early", "late", "after the cut"])
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(results, epochs):
    for found in results:
        _, whole, steps = found["whole"]
        _, resumed, resumed_steps = found[epochs]
        assert steps == resumed_steps == EPOCHS
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
