"""Time the rank objective in a training step, and a step before and after truncation.

The objective alone, forward and backward, stands beside the step without it, in both stages.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.checks import agreement
from benchmarks.encoders import (
    TARGET,
    Batch,
    add_encoders,
    encoders_of,
    learned_ranks,
    loss_fn,
    train_step,
)
from benchmarks.session import Session, add_repeats, add_sizes, count
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_
from comera.surgery.truncate import truncate_


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_sizes(parser, {"batch": (8, "Number of sequences in a batch.")})
    parser.add_argument(
        "--keep", type=float, default=TARGET, help="Share of the entries of the cores that remains."
    )
    add_encoders(parser)
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Time the objective, then the truncated model; raises ``ValueError`` for a wrong share."""
    if not 0 < options.keep <= 1:
        raise ValueError(
            f"keep={options.keep} must be in (0, 1]: the share of the cores that remains"
        )
    encoders = encoders_of(options)
    model = encoders.model("comera", session.device)
    data = encoders.batch(options.batch, session.device)
    title = f"{encoders}, {options.batch} sequences of {encoders.length} tokens"
    encoders.check(session, model, data)
    step = train_step(model)
    loss = torch.ones((), requires_grad=True, device=session.device)
    for stage in ("early", "late"):
        ranks = learned_ranks(model, early=stage == "early")

        def alone(ranks=ranks) -> None:
            ranks.objective(loss * 1).backward()
            ranks.step(loss.detach())
            step.optimizer.zero_grad()

        runs: dict[str, Callable[[], object]] = {"step": partial(step, data), "objective": alone}
        timings = session.measure(f"{title}, {stage} stage", runs, "step")
        session.note(f"{stage} stage: the objective adds {100 / timings.ratio('objective'):.2f} %")

    masked = encoders.model("comera", session.device)
    cut_ranks_(masked, options.keep)
    truncate_(cut := copy.deepcopy(masked))
    encoders.check(session, masked, data)
    losses = {"the loss": (_loss(cut, data), _loss(masked, data))}
    session.print(agreement(f"{encoders}, truncated", losses, torch.float32, "the masked model"))
    steps = {"masked": train_step(masked), "truncated": train_step(cut)}
    session.measure(
        f"{title}, cores cut to {options.keep:g}",
        {name: partial(one, data) for name, one in steps.items()},
        "masked",
        {"masked": count(masked), "truncated": count(cut)},
    )


def cut_ranks_(model: nn.Module, keep: float) -> None:
    """Prune ranks until a share of the entries of all cores remains."""
    layers = tensor_trains(model)
    prune_to_(layers, keep * sum(core.numel() for layer in layers.values() for core in layer.cores))


@torch.no_grad()
def _loss(model: nn.Module, data: Batch) -> Tensor:
    model.eval()
    loss = loss_fn(model, data)
    model.train()
    return loss
