"""Time whole training steps, the rank objective in them, and steps of a truncated model."""

import copy
import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks import peers
from benchmarks.encoders import (
    LEARNING_RATE,
    Batch,
    Encoders,
    learned_ranks,
    loss_fn,
    loss_of_rows,
    train_step,
)
from benchmarks.linear import count
from benchmarks.numerics import Pairs, compare, compare_model
from benchmarks.session import Session
from benchmarks.timing import Timings
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_
from comera.surgery.truncate import truncate_
from comera.train.capture import WARM_UP
from comera.train.step import TrainStep

_DENSE, _COMERA = "dense, AdamW", "comera, AdamW, rank objective"
_COMPILE, _GRAPH = ", compiled", ", CUDA graph"
_COMPILED = _COMERA + _COMPILE
_GALORE = f"dense, GaLoreAdamW, rank {peers.GALORE_RANK}"


def step(
    session: Session,
    encoders: Encoders,
    batches: Sequence[int],
    with_peers: bool,
    compile: bool = False,
) -> None:
    """Time dense, comera with the rank objective, and GaLore on dense, at every batch size.

    On a GPU both as CUDA graphs too, and what is in these. With ``compile`` comera compiled, and on
    a GPU both compiled and as graphs: what a compressed step has to beat is the better dense one.
    """
    model = encoders.model("comera", session.device)
    data = [encoders.batch(size, session.device) for size in batches]
    for size, batch in zip(batches, data, strict=True):
        session.check(compare_model(f"{encoders}, batch {size}", model, loss_of_rows, batch))
    dense = encoders.model("dense", session.device)
    steps = {
        _DENSE: train_step(dense, graph=False),
        _COMERA: train_step(model, learned_ranks(model), graph=False),
    }
    if compile:
        other = encoders.model("comera", session.device)
        steps[_COMPILED] = train_step(other, learned_ranks(other), compile=True, graph=False)
    graphs: dict[str, TrainStep] = {}
    if session.device.type == "cuda":  # with an optimizer each, on the same model
        for how in ("", _COMPILE) if compile else ("",):
            graphs[_DENSE + how + _GRAPH] = train_step(dense, compile=bool(how))
            ranks = learned_ranks(model)
            graphs[_COMERA + how + _GRAPH] = train_step(model, ranks, compile=bool(how))
        steps |= graphs
    parameters = {
        name: count(model if name.startswith(_COMERA) else dense) for name in (*steps, _GALORE)
    }

    @functools.cache  # made only where its package is there, and once for all batches
    def galore() -> TrainStep:
        other = encoders.model("dense", session.device)
        return TrainStep(other, loss_fn, peers.galore_adamw(other, LEARNING_RATE))

    for size, batch in zip(batches, data, strict=True):
        for one in graphs.values():
            for _ in range(WARM_UP + 3):  # until it is captured for this batch
                one(batch)
        runs: dict[str, Callable[[], object]] = {
            name: functools.partial(one, batch) for name, one in steps.items()
        }
        adjust = None
        if with_peers:
            session.add_peer(
                runs,
                _GALORE,
                lambda batch=batch: functools.partial(galore(), batch),  # type: ignore[misc]
            )
        if _GALORE in runs:  # a step with new subspaces is too rare for the rounds to meet it
            adjust = functools.partial(_amortise, _refresh(session, galore(), batch))
        counts = {name: parameters[name] for name in runs}
        title = f"{encoders}, {size} sequences of {encoders.length} tokens, training step"
        session.measure(title, runs, _DENSE, counts, adjust)
        for name, one in graphs.items():
            described = one.describe()
            session.print(f"{name}: {described}")
            if described.contents is not None and described.contents.peak_bytes is not None:
                peaks = session.results[-1].setdefault("peak_bytes", {})
                peaks[name] = described.contents.peak_bytes


def _refresh(session: Session, step: TrainStep, batch: Batch) -> float:
    """Return the seconds of a step in which GaLore finds its subspaces anew."""
    assert isinstance(step.optimizer, Optimizer), "made by peers"
    peers.refresh_galore(step.optimizer)
    session.synchronize()
    began = time.perf_counter()
    step(batch)
    session.synchronize()
    took = time.perf_counter() - began
    session.print(
        f"GaLore: a step that finds the subspaces anew takes {took:.2f} s; every "
        f"{peers.GALORE_GAP}th does, and its share is in the figures below"
    )
    return took


def _amortise(refresh: float, timings: Timings) -> Timings:
    """Put one refreshing step among the plain ones of each period."""
    gap = peers.GALORE_GAP
    plain = timings.seconds[_GALORE]
    return timings.with_seconds(_GALORE, [((gap - 1) * t + refresh) / gap for t in plain])


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
