"""A lossy chain around canonical form and truncation, in a process that is killed at any moment.

Whatever the moment, all that was saved is there, and its loss as read is that of the run.
"""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import comera
from comera.checkpoint import archive
from comera.checkpoint.chain import CheckpointChain
from comera.nn.module import tensor_trains
from tests.processes import killed

KILLS = int(os.environ.get("COMERA_KILLS", "20"))
"""How often a training process is killed; 200 takes some minutes."""

LARGEST_DEVIATION = 0.01
"""Of the loss as read from the loss that was saved, as a share of it."""

CANONICAL, TRUNCATED, NEW, LAST = (3, 8), (5, 10), 12, 13
"""Checkpoints before which cores are brought into canonical form, ranks are cut, a layer starts
anew; and the last of a run."""


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        comera.TTLinear(64, 128, rank=16),
        nn.GELU(),
        comera.TTLinear(128, 64, rank=16),
        nn.GELU(),
        nn.Linear(64, 16),
    )


def make_teacher():
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)).requires_grad_(False)
    teacher[2].weight *= 6
    return teacher


def batch_of(teacher, seed, size):
    """Inputs, and classes drawn from the teacher's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 64, generator=generator)
    return x, torch.multinomial(teacher(x).softmax(1), 1, generator=generator).squeeze(1)


class Training:
    """A small model that learns its teacher's classes."""

    def __init__(self):
        self.model, self._teacher = make_model(), make_teacher()
        self._held_out = batch_of(self._teacher, 10**6, 2000)
        self._start()

    def load_(self, model, optimizer):
        self.model.load_state_dict(model)
        self._start()
        self.optimizer.load_state_dict(optimizer)

    def _start(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def train_(self, first, steps):
        for seed in range(first, first + steps):
            x, y = batch_of(self._teacher, seed, 256)
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def advance_(self, number):
        """Five steps, and what comes before the checkpoint of that number."""
        self.train_(5 * number, 5)
        if number in CANONICAL:
            comera.canonicalize_(self.model, self.optimizer)
        if number in TRUNCATED:
            self._truncate()
        if number == NEW:
            self.model[4].reset_parameters()

    @torch.no_grad()
    def _truncate(self):
        for layer in tensor_trains(self.model).values():
            for gate in layer.gates:
                gate[gate.abs().argsort()[: max(1, len(gate) // 8)]] = 0
        comera.truncate_(self.model, self.optimizer)

    @torch.no_grad()
    def loss(self):
        x, y = self._held_out
        return float(nn.functional.cross_entropy(self.model(x), y))


def run(folder, warm, dies_at, ready):
    """Train and save, from what is there, until the last checkpoint or death.

    Args:
        folder: Of the run; its file ``losses`` says of every checkpoint what it is to be read as.
        warm: A file to start from where there is no checkpoint.
        dies_at: This process kills itself when it has written so many bytes of checkpoints.
        ready: Told when saving begins.
    """
    torch.set_num_threads(1)
    if dies_at is not None:
        archive._write_through = _mortal(dies_at)
    training = Training()
    with CheckpointChain(folder / "chain", background=dies_at is None, key_every=8) as chain:
        if chain.steps():
            saved = chain.load()
            start = saved.step
        else:
            saved, start = torch.load(warm), 0
        training.load_(*((saved.model, saved.optimizer) if start else saved))
        with (folder / "losses").open("a") as losses:
            ready.send("ready")
            for number in range(start + 1, LAST + 1):
                training.advance_(number)
                print(number, training.loss(), file=losses, flush=True)
                chain.save(number, training.model, training.optimizer)


def _mortal(left):
    """The writer of files, which ends with the process after so many bytes."""
    write = archive._write_through

    def write_or_die(path, raw):
        nonlocal left
        if left < len(raw):
            path.write_bytes(raw[:left])
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(raw)
        write(path, raw)

    return write_or_die


def losses_as_read(training, folder, known):
    """Of every checkpoint that is not known yet, beside the loss it was saved with."""
    text = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    logged = {int(number): float(loss) for number, loss in map(str.split, text)}
    chain = CheckpointChain(folder / "chain")
    found = {}
    for step in chain.steps():
        if step not in known:
            saved = chain.load(step)
            training.load_(saved.model, saved.optimizer)
            found[step] = (training.loss(), logged[step])
    return found


@pytest.mark.slow
def test_killed_at_any_moment_all_that_was_saved_is_read_with_its_loss(tmp_path, capsys):
    rng = random.Random(0)
    training = Training()
    training.train_(10_000, 200)
    warm = tmp_path / "warm.pt"
    torch.save((training.model.state_dict(), training.optimizer.state_dict()), warm)
    folder, known, deviations = Path(tmp_path / "run-0"), {}, {}
    folder.mkdir()
    for kill in range(KILLS):
        dies_at = rng.randrange(100_000) if kill % 2 else None
        seconds = rng.random() * 0.6 if dies_at is None else None
        code = killed(run, folder, warm, dies_at, after=seconds)
        assert code in (-signal.SIGKILL, 0)  # 0: the run ended before
        found = losses_as_read(training, folder, known)
        for step, (read, logged) in found.items():
            deviations[kill, step] = abs(read / logged - 1)
            assert deviations[kill, step] < LARGEST_DEVIATION, (step, read, logged)
        known |= found
        if LAST in known:
            assert set(CheckpointChain(folder / "chain").verify().values()) == {None}
            folder, known = tmp_path / f"run-{kill + 1}", {}
            folder.mkdir()
    with capsys.disabled():
        worst = max(deviations, key=deviations.get)
        print(f"\n{KILLS} kills, {len(deviations)} checkpoints read; at most "
              f"{deviations[worst]:.2%} from the loss saved (checkpoint {worst[1]})")  # fmt: skip
    reached = {step for _, step in deviations}
    assert reached >= {*CANONICAL[:1], *TRUNCATED[:1]}
