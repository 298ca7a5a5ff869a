"""``torchrun -m comera train``: stopped, killed, started again."""

import os
import signal

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from comera.recipes.parse import parse_settings
from comera.recipes.run import run
from comera.recipes.run_config import RunConfig
from comera.train.log import read_metrics
from tests.processes import in_worlds, this_process
from tests.texts import write_functions

from .torchrun import Torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills processes"),
]

STEPS = 60
ROWS = 9
"""Of a batch of three processes."""
CONFIG = f"""
masked_text: {{folder: text, vocab_size: 300, length: 16, heldout: 0.2}}
model: {{d_model: 16, num_layers: 1, num_heads: 2, ffn_dim: 32, dropout: 0.1}}
tensorize: {{rank: 6, embedding_rank: 6, order: 2}}
two_stage: {{target: 0.6}}
optimizer: {{gate_lr: 0.05}}
train: {{steps: {STEPS}, batch_size: 8, eval_batches: 4, save_every: 10, log_every: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run to be started, and runs of two and of three processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs")
    write_functions(folder / "text", 8, 40)
    (folder / "run.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMERA_CACHE", str(folder / "cache"))
        patch.setenv("FOLDER", str(folder))
        in_worlds([(2, _two), (3, _three)], tmp_path_factory.mktemp("processes"))
        yield folder


def _two(rank):
    return _whole("two")


def _three(rank):
    return _whole("three", ROWS)


def _whole(out, rows=8):
    """Train by processes that were forked, not started by torchrun."""
    os.chdir(os.environ["FOLDER"])
    config = parse_settings(RunConfig, yaml.safe_load(CONFIG) | {"out": out})
    config.train.batch_size = rows
    return run(config, Console(quiet=True), quiet=True, processes=this_process())


def weights(folder, out):
    return load_file(folder / out / "model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ctrl_c_saves_and_the_same_command_goes_on(folder):
    """The first process speaks and writes alone."""
    run = Torchrun(folder, "stopped", 2)
    run.wait_for(20)
    run.process.send_signal(signal.SIGINT)
    assert run.end() != 0
    stopped = read_metrics(folder / "stopped")[-1]["step"]
    saved = (folder / f"stopped/checkpoints/step-{stopped:09d}").is_dir()
    assert saved
    assert stopped < STEPS
    assert not (folder / "stopped/result.json").exists()
    again = Torchrun(folder, "stopped", 2)
    assert again.end() == 0
    assert_same(weights(folder, "stopped"), weights(folder, "two"))
    said = again.said.read_text()
    assert said.count("2 processes: preparing data") == 1
    assert said.count("after training") == 1
    assert "Traceback" not in said
    assert logged(folder / "stopped") == list(range(1, STEPS + 1))


def logged(run):
    return [line["step"] for line in read_metrics(run) if "loss" in line]


def test_killed_after_a_checkpoint_three_go_on_from_there(folder):
    """With more than two, gloo adds in an order that depends on where in a buffer a number is."""
    words = "--overwrite=true", f"--train.batch_size={ROWS}"  # which deletes only the first time
    # Once is enough, but a port that torchrun has found free may be taken before it is used.
    train = Torchrun(folder, "three killed", 3, *words, restarts=3)
    train.wait_for(34)
    train.kill(2)
    assert train.end() == 0, train.said.read_text()[-3000:]
    assert "compressed: going on after step 30" in train.said.read_text()
    whole, killed = weights(folder, "three"), weights(folder, "three killed")
    for name, weight in whole.items():
        torch.testing.assert_close(killed[name], weight, rtol=1e-3, atol=1e-3)
