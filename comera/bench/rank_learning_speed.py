"""Time what rank learning adds to a step, and what a truncation saves."""

import copy

import torch
from torch import nn

from comera.bench.encoders import Batch, Encoders, learned_ranks, loss_fn, loss_of_rows, train_step
from comera.bench.linear_speed import count
from comera.bench.numerics import Pairs, compare, compare_model
from comera.bench.session import Session
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_
from comera.surgery.truncate import truncate_


def objective(session: Session, encoders: Encoders, batch: int) -> None:
    """Time the objective alone, forward and backward, against the whole step without it."""
    model, data = encoders.model("comera", session.device), encoders.batch(batch, session.device)
    session.check(compare_model(f"{encoders}, batch {batch}", model, loss_of_rows, data))
    step = train_step(model)
    loss = torch.ones((), requires_grad=True, device=session.device)
    for stage in ("early", "late"):
        ranks = learned_ranks(model, early=stage == "early")

        def alone(ranks=ranks) -> None:
            ranks.objective(loss * 1).backward()
            ranks.step(loss.detach())
            step.optimizer.zero_grad()

        title = f"{encoders}, {batch} sequences of {encoders.length} tokens, {stage} stage"
        timings = session.measure(title, {"step": lambda: step(data), "objective": alone}, "step")
        session.note(f"{stage} stage: the objective adds {100 / timings.ratio('objective'):.2f} %")


def truncation(session: Session, encoders: Encoders, batch: int, keep: float) -> None:
    """Time a model at ``keep`` times the size of its cores, before and after truncation."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} must be in (0, 1]: the share of the cores that remains")
    masked, data = encoders.model("comera", session.device), encoders.batch(batch, session.device)
    cores = sum(core.numel() for m in tensor_trains(masked).values() for core in m.cores)
    prune_to_(tensor_trains(masked), keep * cores)
    cut = copy.deepcopy(masked)
    truncate_(cut)
    session.check(compare_model(f"{encoders}, batch {batch}", masked, loss_of_rows, data))
    pairs: Pairs = {"the loss": (_loss(cut, data), _loss(masked, data))}
    dtype = next(cut.parameters()).dtype
    session.check(compare(f"{encoders}, truncated", pairs, dtype, "the masked model"))
    steps = {"masked": train_step(masked), "truncated": train_step(cut)}
    session.measure(
        f"{encoders}, {batch} sequences of {encoders.length} tokens, cores cut to {keep:g}",
        {name: lambda one=one: one(data) for name, one in steps.items()},  # type: ignore[misc]
        "masked",
        {"masked": count(masked), "truncated": count(cut)},
    )


@torch.no_grad()
def _loss(model: nn.Module, data: Batch) -> torch.Tensor:
    model.eval()
    loss = loss_fn(model, data)
    model.train()
    return loss
