"""Time the updates of optimizers on a dense language model, and measure their state.

Each is timed for --gap updates of one model by the gradients of one batch, in turn, so that each
GaLore finds its subspaces once. A step is forward and backward, the same for all, and an update.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks import peers
from benchmarks.session import Session, add_peers, add_repeats, add_sizes, count
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.optim.came import CAME
from comera.optim.galore import GaLore, GaLoreAdamW
from comera.optim.groups import galore_param_groups, param_groups
from comera.optim.muon import MuonAdamW
from comera.optim.state_layout import stored_bytes
from comera.report.memory_use import state_bytes

_LR = 1e-5
_BASELINE = "AdamW, fused"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; the model has 58 million parameters."""
    add_decoder(parser, layers=8, width=512, ffn=1376, heads=8)
    add_sizes(
        parser,
        {
            "length": (128, "Number of tokens of a sequence."),
            "batch": (4, "Number of sequences in a batch."),
            "rank": (128, "Rank of the subspaces of GaLore."),
            "gap": (200, "Number of updates from one subspace to the next."),
        },
    )
    help = "Beside AdamW time only optimizers whose names contain one of these words."
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=help)
    add_peers(parser)
    add_repeats(parser)


def add_decoder(
    parser: argparse.ArgumentParser, layers: int, width: int, ffn: int, heads: int
) -> None:
    """Add the shape of a language model."""
    add_sizes(
        parser,
        {
            "layers": (layers, "Number of blocks of the model."),
            "width": (width, "Width of the model."),
            "ffn": (ffn, "Hidden width of the feed-forward parts."),
            "heads": (heads, "Number of attention heads of a block."),
            "vocab": (32000, "Number of tokens of the vocabulary."),
        },
    )


def run(session: Session, options: argparse.Namespace) -> None:
    """Time all optimizers that are asked for; raises ``ValueError`` if one does not exist."""
    torch.manual_seed(0)
    decoder = Decoder(options.vocab, options.width, options.layers, options.heads, options.ffn)
    model: nn.Module = CausalLanguageModel(decoder, options.vocab).to(session.device)
    rank, gap = options.rank, options.gap
    ours = _ours(model, rank, gap)
    theirs: dict[str, Callable[[], Optimizer]] = {}
    if options.peers == "all":
        theirs["galore-torch, AdamW"] = lambda: peers.galore_adamw(model, _LR, rank, gap)
        theirs["came-pytorch"] = lambda: peers.came(model, _LR)
    for part in options.only:
        if not any(part in name for name in (*ours, *theirs)):
            raise ValueError(f"only={part!r} is part of none of {', '.join((*ours, *theirs))}")
    backward = _backward_seconds(session, model, options)

    def wanted(name: str) -> bool:
        parts = options.only
        return not parts or name == _BASELINE or any(part in name for part in parts)

    made = {name: make() for name, make in ours.items() if wanted(name)}
    runs: dict[str, Callable[[], object]] = {name: made[name].step for name in made}
    for update in runs.values():  # first updates make the state and the first subspaces
        update()

    def peer(name: str, make: Callable[[], Optimizer]) -> Callable[[], object]:
        made[name] = make()
        return made[name].step

    for name, make in theirs.items():
        if wanted(name):
            session.add_peer(runs, name, functools.partial(peer, name, make))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(gap):  # each round begins with another one
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_seconds(session, runs[name]))
    title = (
        f"{count(model):,} parameters, {options.layers} layers of width {options.width}, "
        f"{options.batch} x {options.length} tokens, GaLore of rank {rank}: "
        f"means over {gap} updates"
    )
    columns = {
        "optimizer": "", "state MiB": ",.1f", "state ratio": ".2f", "update ms": ",.1f",
        "update ratio": ".2f", "step ms": ",.1f", "step ratio": ".3f",
        "longest / median step": ".2f",
    }  # fmt: skip

    def rows() -> Iterator[tuple[Any, ...]]:
        base: tuple[float, ...] = ()
        for name in runs:
            update = mean(seconds[name])
            found = _state_bytes(made[name]) / 2**20, 1e3 * update, 1e3 * (backward + update)
            base = base or found
            pairs = [value for a, b in zip(found, base, strict=True) for value in (a, a / b)]
            longest, middle = max(seconds[name]), median(seconds[name])
            yield name, *pairs, (backward + longest) / (backward + middle)

    caption = "ratios: to the first line; a step is an update and what comes before it"
    session.table(title, columns, rows(), caption)


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


def _backward_seconds(session: Session, model: nn.Module, options: argparse.Namespace) -> float:
    """Time forward and backward."""
    size = options.batch, options.length + 1
    tokens = torch.randint(options.vocab, size, device=session.device)

    def run() -> None:
        model.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    run()
    return median(_seconds(session, run) for _ in range(session.repeats))


def _state_bytes(optimizer: Optimizer) -> int:
    """Count the bytes of an optimizer's state, in galore-torch's objects too."""
    if type(optimizer).__module__.startswith("galore_torch"):
        kept = (value for state in optimizer.state.values() for value in state.values())
        return sum(stored_bytes(getattr(value, "ortho_matrix", value)) for value in kept)
    return sum(state_bytes(optimizer).values())


def _seconds(session: Session, run: Callable[[], object]) -> float:
    session.synchronize()
    began = time.perf_counter()
    run()
    session.synchronize()
    return time.perf_counter() - began
