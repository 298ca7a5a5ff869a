"""``torchrun -m comera train``: stopped, killed, started again."""

import signal

import pytest
import torch
from safetensors.torch import load_file

from comera.train.log import read_metrics
from tests.texts import write_functions

from .torchrun import Torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills processes"),
]

STEPS = 60
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
    """A run to be started, and one of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs")
    write_functions(folder / "text", 8, 40)
    (folder / "run.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMERA_CACHE", str(folder / "cache"))
        assert Torchrun(folder, "whole", 2).end() == 0
        yield folder


def weights(folder, out):
    return load_file(folder / out / "model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_first_process_speaks_and_writes_alone(folder):
    said = (folder / "whole.txt").read_text()
    assert said.count("2 processes: preparing data") == 1
    assert said.count("after training") == 1
    assert "Traceback" not in said
    steps = [line["step"] for line in read_metrics(folder / "whole") if "loss" in line]
    assert steps == list(range(1, STEPS + 1))


def test_ctrl_c_saves_and_the_same_command_goes_on(folder):
    run = Torchrun(folder, "stopped", 2)
    run.wait_for(20)
    run.process.send_signal(signal.SIGINT)
    assert run.end() != 0
    stopped = read_metrics(folder / "stopped")[-1]["step"]
    saved = (folder / f"stopped/checkpoints/step-{stopped:09d}").is_dir()
    assert saved
    assert stopped < STEPS
    assert not (folder / "stopped/result.json").exists()
    assert Torchrun(folder, "stopped", 2).end() == 0
    assert_same(weights(folder, "stopped"), weights(folder, "whole"))


def test_processes_are_killed_and_torchrun_starts_all_again(folder):
    """Before the first checkpoint, and about where ranks are cut; begun anew only once."""
    run = Torchrun(folder, "killed", 2, "--overwrite=true", restarts=2)
    run.wait_for(1)
    run.kill(1)
    run.wait_for(26)
    run.kill(0)
    assert run.end() == 0
    assert_same(weights(folder, "killed"), weights(folder, "whole"))
    steps = [line["step"] for line in read_metrics(folder / "killed") if "loss" in line]
    assert steps == list(range(1, STEPS + 1))
    said = (folder / "killed.txt").read_text()
    assert said.count("2 processes: preparing data") == 3


def test_four_processes_one_of_which_is_killed(folder):
    """With more than two, gloo adds in an order that depends on where in a buffer a number is."""
    assert Torchrun(folder, "four", 4).end() == 0
    run = Torchrun(folder, "four killed", 4, restarts=1)
    run.wait_for(34)
    run.kill(2)
    assert run.end() == 0
    whole, killed = weights(folder, "four"), weights(folder, "four killed")
    for name, weight in whole.items():
        torch.testing.assert_close(killed[name], weight, rtol=1e-3, atol=1e-3)
