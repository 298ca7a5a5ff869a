"""``torchrun -m comera train``: stopped, killed, started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills processes"),
]

ROOT = Path(__file__).parents[2]
STEPS = 40
CONFIG = f"""
masked_text: {{folder: text, vocab_size: 300, length: 16, heldout: 0.2}}
model: {{d_model: 16, num_layers: 1, num_heads: 2, ffn_dim: 32, dropout: 0.1}}
tensorize: {{rank: 6, embedding_rank: 6, order: 2}}
two_stage: {{target: 0.6}}
optimizer: {{gate_lr: 0.05}}
train: {{steps: {STEPS}, batch_size: 8, eval_batches: 4, save_every: 10, log_every: 1}}
"""


class Torchrun:
    """Two processes of ``torchrun -m comera train`` in a folder, watched while they run.

    Args:
        folder: Folder of ``run.yaml``.
        out: The folder of the run; the output goes beside it.
        words: More words of the command line.
        restarts: How often the processes are started again.
    """

    def __init__(self, folder: Path, out: str, *words: str, restarts: int = 0) -> None:
        self.out = folder / out
        self.said = folder / f"{out}.txt"
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            f"--max-restarts={restarts}", "--monitor-interval=0.1",
        ]  # fmt: skip
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                [*launcher, "-m", "comera", "train", "run.yaml", f"--out={out}", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, step: int) -> None:
        """Wait until a step has been logged, or the run has ended."""
        logged = -1
        while logged < step and self.process.poll() is None:
            time.sleep(0.02)
            try:
                lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                logged = json.loads(lines[-1])["step"]
            except (OSError, IndexError, ValueError):  # not there yet, or being written
                continue

    def wait_for_words(self, words: str) -> None:
        """Wait until the processes have said something, or the run has ended."""
        while words not in self.said.read_text() and self.process.poll() is None:
            time.sleep(0.02)

    def kill_one(self) -> None:
        """End the last of the processes that train, without a chance to save."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        os.kill(max(map(int, children)), signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(timeout=500)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run to be started, and in ``whole`` one of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs")
    write_functions(folder / "text", 8, 40)
    (folder / "run.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMERA_CACHE", str(folder / "cache"))
        patch.setenv("FOLDER", str(folder))
        in_worlds([(2, _whole)], tmp_path_factory.mktemp("processes"))
        yield folder


def _whole(rank):
    """Train by processes that were forked, not started by torchrun."""
    os.chdir(os.environ["FOLDER"])
    config = parse_settings(RunConfig, yaml.safe_load(CONFIG) | {"out": "whole"})
    return run(config, Console(quiet=True), quiet=True, processes=this_process())


def test_killed_and_stopped_they_end_as_if_nothing_had_happened(folder):
    """The first process speaks and writes alone. Killed, they start from a checkpoint at once."""
    # The word deletes only the first time. Once is enough, but a port that torchrun has found free
    # may be taken before it is used.
    run = Torchrun(folder, "mine", "--overwrite=true", restarts=3)
    run.wait_for(14)
    run.kill_one()
    run.wait_for_words("going on after step")
    run.wait_for(25)
    run.process.send_signal(signal.SIGINT)
    assert run.end() != 0
    stopped = read_metrics(folder / "mine")[-1]["step"]
    saved = (folder / f"mine/checkpoints/step-{stopped:09d}").is_dir()
    assert saved
    assert stopped < STEPS
    assert not (folder / "mine/result.json").exists()
    again = Torchrun(folder, "mine")
    assert again.end() == 0
    mine, whole = (load_file(folder / out / "model.safetensors") for out in ("mine", "whole"))
    assert mine.keys() == whole.keys()
    assert all(torch.equal(mine[name], whole[name]) for name in mine)
    said = again.said.read_text()
    assert said.count("2 processes: preparing data") == 1
    assert said.count("after training") == 1
    assert "Traceback" not in said
    steps = [line["step"] for line in read_metrics(folder / "mine") if "loss" in line]
    assert steps == list(range(1, STEPS + 1))
