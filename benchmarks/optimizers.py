"""Optimizers of a dense language model side by side: their step, and what it adds to training."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks import peers
from benchmarks.linear import count
from benchmarks.session import Session
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.optim.came import CAME
from comera.optim.galore import GaLore, GaLoreAdamW
from comera.optim.groups import galore_param_groups, param_groups
from comera.optim.muon import MuonAdamW
from comera.optim.state_layout import stored_bytes
from comera.optim.state_size import state_bytes

_LR = 1e-5
_BASELINE = "AdamW, fused"
_MIB = 1 << 20


@dataclass(frozen=True)
class Llama:
    """A dense causal language model in the shape of LLaMA, and its batch.

    Args:
        layers: Layers of the model.
        width: Width of the model.
        ffn: Width of the feed-forward part.
        heads: Heads of each attention.
        vocab: Tokens.
        length: Tokens of every sequence.
        batch: Sequences.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    vocab: int
    length: int
    batch: int

    def model(self) -> nn.Module:
        """Make a new model."""
        torch.manual_seed(0)
        decoder = Decoder(self.vocab, self.width, self.layers, self.heads, self.ffn)
        return CausalLanguageModel(decoder, self.vocab)


def optimizers(
    session: Session, llama: Llama, rank: int, gap: int, with_peers: bool, only: Sequence[str]
) -> None:
    """Time ``gap`` updates of each optimizer, so that each GaLore finds its subspaces once.

    A whole step is forward and backward, the same for all, and an update. The updates are all of
    one model, in turn, with the gradients of one batch.

    Args:
        session: Where to run and print.
        llama: The model.
        rank: Rank of GaLore's subspaces.
        gap: Updates from one subspace to the next.
        with_peers: Time galore-torch and came-pytorch too.
        only: Names of those to time, beside AdamW, or parts of names; none for all.

    Raises:
        ValueError: If one of ``only`` is part of no name.
    """
    model = llama.model().to(session.device)
    backward = _backward_seconds(session, model, llama)
    ours, theirs = _ours(model, rank, gap), _theirs(model, rank, gap) if with_peers else {}
    for part in only:
        if not any(part in name for name in (*ours, *theirs)):
            raise ValueError(f"only={part!r} is part of none of {', '.join((*ours, *theirs))}")

    def wanted(name: str) -> bool:
        return not only or name == _BASELINE or any(part in name for part in only)

    made = {name: make() for name, make in ours.items() if wanted(name)}
    runs: dict[str, Callable[[], object]] = {name: made[name].step for name in made}
    for run in runs.values():  # first updates make the state, and find the first subspaces
        run()

    def peer(name: str, make: Callable[[], Optimizer]) -> Callable[[], object]:
        made[name] = make()
        return made[name].step

    for name, make in theirs.items():
        if wanted(name):
            session.add_peer(runs, name, functools.partial(peer, name, make))
    seconds = _in_turn(session, runs, gap)
    title = (
        f"{count(model):,} parameters, {llama.layers} layers of width {llama.width}, "
        f"{llama.batch} x {llama.length} tokens, GaLore of rank {rank}: means over {gap} updates"
    )
    rows = [_Row(name, _state_bytes(made[name]), seconds[name], backward) for name in runs]
    session.show_table(title, _table(rows))
    session.results.append({"title": title, "rows": [row.as_dict(rows[0]) for row in rows]})


@dataclass(frozen=True)
class _Row:
    """One optimizer: bytes of its state, seconds of its updates, seconds of what comes before."""

    name: str
    state: int
    seconds: list[float]
    backward: float

    @property
    def update(self) -> float:
        return mean(self.seconds)

    @property
    def step(self) -> float:
        return self.backward + self.update

    @property
    def stall(self) -> float:
        """Return the longest step over the median one."""
        return (self.backward + max(self.seconds)) / (self.backward + median(self.seconds))

    def as_dict(self, base: "_Row") -> dict[str, float | str]:
        return {
            "optimizer": self.name,
            "state_bytes": self.state,
            "state_ratio": self.state / base.state,
            "update_ms": 1e3 * self.update,
            "update_ratio": self.update / base.update,
            "step_ms": 1e3 * self.step,
            "step_ratio": self.step / base.step,
            "longest_over_median_step": self.stall,
        }


def _table(rows: list[_Row]) -> Table:
    table = Table(caption="ratios: to the first line; a step is an update and what comes before it",
                  caption_justify="left")  # fmt: skip
    table.add_column("")
    for heading in (
        "state MiB", "ratio", "update ms", "ratio", "step ms", "ratio", "longest / median step",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        found = row.as_dict(rows[0])
        table.add_row(
            row.name,
            f"{row.state / _MIB:,.1f}",
            f"{found['state_ratio']:.2f}",
            f"{found['update_ms']:,.1f}",
            f"{found['update_ratio']:.2f}",
            f"{found['step_ms']:,.1f}",
            f"{found['step_ratio']:.3f}",
            f"{row.stall:.2f}",
        )
    return table


def _ours(model: nn.Module, rank: int, gap: int) -> dict[str, Callable[[], Optimizer]]:
    plain = param_groups(model, _LR)
    galore = galore_param_groups(model, _LR, rank, update_proj_gap=gap)
    muon = param_groups(model, _LR, muon_modules=r"model\.layers\..*")

    def copies(groups: list) -> list:
        return [dict(group) for group in groups]

    return {
        _BASELINE: lambda: torch.optim.AdamW(copies(plain), fused=True),
        "Adafactor": lambda: torch.optim.Adafactor(copies(plain)),
        "CAME": lambda: CAME(copies(plain)),
        "CAME, 8 bits": lambda: CAME(copies(plain), state_dtype="8bit"),
        "GaLore, AdamW": lambda: GaLoreAdamW(copies(galore), fused=True),
        "GaLore, CAME": lambda: GaLore(copies(galore), CAME),
        "Muon, AdamW": lambda: MuonAdamW(copies(muon), fused=True),
    }


def _theirs(model: nn.Module, rank: int, gap: int) -> dict[str, Callable[[], Optimizer]]:
    return {
        "galore-torch, AdamW": lambda: peers.galore_adamw(model, _LR, rank, gap),
        "came-pytorch": lambda: peers.came(model, _LR),
    }


def _backward_seconds(session: Session, model: nn.Module, llama: Llama) -> float:
    """Time forward and backward; the gradients stay."""
    tokens = torch.randint(llama.vocab, (llama.batch, llama.length + 1), device=session.device)

    def run() -> None:
        model.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    run()
    return median(_timed(session, run) for _ in range(session.repeats))


def _in_turn(
    session: Session, runs: dict[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Return seconds of every run in every round; each round begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in track(
        range(rounds), "updates", console=session.console, transient=True,
        disable=not session.console.is_terminal,
    ):  # fmt: skip
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_timed(session, runs[name]))
    return seconds


def _state_bytes(optimizer: Optimizer) -> int:
    """Count the bytes of all tensors kept for parameters, in galore-torch's objects too."""
    if type(optimizer).__module__.startswith("galore_torch"):
        kept = (value for state in optimizer.state.values() for value in state.values())
        return sum(stored_bytes(getattr(value, "ortho_matrix", value)) for value in kept)
    return sum(state_bytes(optimizer).values())


def _timed(session: Session, run: Callable[[], object]) -> float:
    session.synchronize()
    began = time.perf_counter()
    run()
    session.synchronize()
    return time.perf_counter() - began
