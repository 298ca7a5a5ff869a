"""A whole training step: forward, rank objective, backward, optimizer."""

import functools
import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from comera.bench import peers
from comera.bench.encoders import (
    LEARNING_RATE,
    Batch,
    Encoders,
    learned_ranks,
    loss_fn,
    loss_of_rows,
    train_step,
)
from comera.bench.linear_speed import count
from comera.bench.numerics import compare_model
from comera.bench.session import Session
from comera.bench.timing import Timings
from comera.train.capture import WARM_UP
from comera.train.step import TrainStep

_DENSE, _COMERA = "dense, AdamW", "comera, AdamW, rank objective"
_COMPILED, _GRAPH = f"{_COMERA}, compiled", ", CUDA graph"
_GALORE = f"dense, GaLoreAdamW, rank {peers.GALORE_RANK}"


def step(
    session: Session,
    encoders: Encoders,
    batches: Sequence[int],
    with_peers: bool,
    compile: bool = False,
) -> None:
    """Time dense, comera with the rank objective, and GaLore on dense, at every batch size.

    On a GPU both as CUDA graphs too, and what is in these.
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
        graphs = {
            _DENSE + _GRAPH: train_step(dense),
            _COMERA + _GRAPH: train_step(model, learned_ranks(model)),
        }
        steps |= graphs
    parameters = dict.fromkeys((_DENSE, _DENSE + _GRAPH, _GALORE), count(dense))
    parameters |= dict.fromkeys((_COMERA, _COMPILED, _COMERA + _GRAPH), count(model))

    @functools.cache
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
        if _GALORE in runs:
            adjust = functools.partial(_amortise, _refresh(session, galore(), batch))
        counts = {name: parameters[name] for name in runs}
        title = f"{encoders}, {size} sequences of {encoders.length} tokens, training step"
        session.measure(title, runs, _DENSE, counts, adjust)
        for name, one in graphs.items():
            session.print(f"{name}: {one.describe()}")


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
