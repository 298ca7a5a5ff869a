"""Time a training step of a transformer.

Dense, comera with the rank objective, and GaLore on dense, at every batch size; on a GPU both as
CUDA graphs too. With --compile comera compiled, and on a GPU both compiled and as graphs.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from benchmarks import peers
from benchmarks.encoders import (
    LEARNING_RATE,
    Batch,
    Encoders,
    add_encoders,
    encoders_of,
    learned_ranks,
    loss_fn,
    train_step,
)
from benchmarks.session import Session, add_peers, add_repeats, add_several, count
from comera.calibrate.ways import tf32_products
from comera.train.capture import WARM_UP
from comera.train.step import TrainStep

_DENSE, _COMERA = "dense, AdamW", "comera, AdamW, rank objective"
_COMPILE, _GRAPH = ", compiled", ", CUDA graph"
_PRECISIONS = ("fp32", "tf32", "bf16")
_GALORE = f"dense, GaLoreAdamW, rank {peers.GALORE_RANK}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_several(parser, "--batch", [8], "Numbers of sequences in a batch.")
    parser.add_argument(
        "--compile", action="store_true",
        help="Time comera under torch.compile too, and on a GPU both, as CUDA graphs.",
    )  # fmt: skip
    parser.add_argument(
        "--precision", nargs="+", choices=_PRECISIONS, default=["fp32"],
        help="Products in float32, in float32 by tf32 on a GPU, or in bfloat16 by autocast.",
    )  # fmt: skip
    add_encoders(parser)
    add_peers(parser)
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Time steps at every batch size, in every precision."""
    encoders = encoders_of(options)
    model = encoders.model("comera", session.device)
    data = [encoders.batch(size, session.device) for size in options.batch]
    for batch in data:
        encoders.check(session, model, batch)
    for precision in options.precision:
        with tf32_products(precision == "tf32"):
            _steps(session, encoders, data, precision, options.peers == "all", options.compile)


def _steps(
    session: Session,
    encoders: Encoders,
    data: Sequence[Batch],
    precision: str,
    with_peers: bool,
    compile: bool,
) -> None:
    make = functools.partial(train_step, precision="bf16" if precision == "bf16" else "fp32")
    model, dense = (encoders.model(kind, session.device) for kind in ("comera", "dense"))
    steps = {
        _DENSE: make(dense, graph=False),
        _COMERA: make(model, learned_ranks(model), graph=False),
    }
    if compile:
        other = encoders.model("comera", session.device)
        steps[_COMERA + _COMPILE] = make(other, learned_ranks(other), compile=True, graph=False)
    graphs: dict[str, TrainStep] = {}
    if session.device.type == "cuda":  # with an optimizer each, on the same model
        for how in ("", _COMPILE) if compile else ("",):
            graphs[_DENSE + how + _GRAPH] = make(dense, compile=bool(how))
            graphs[_COMERA + how + _GRAPH] = make(model, learned_ranks(model), compile=bool(how))
        steps |= graphs

    @functools.cache  # once for all batches, if its package is installed
    def galore() -> TrainStep:
        other = encoders.model("dense", session.device)
        return TrainStep(other, loss_fn, peers.galore_adamw(other, LEARNING_RATE))

    for batch in data:
        for one in graphs.values():
            for _ in range(WARM_UP + 3):  # until it is captured for this batch
                one(batch)
        runs: dict[str, Callable[[], object]] = {
            name: functools.partial(one, batch) for name, one in steps.items()
        }
        if with_peers:
            session.add_peer(
                runs, _GALORE, lambda batch=batch: functools.partial(galore(), batch)  # type: ignore[misc]
            )  # fmt: skip
        counts = {name: count(model if name.startswith(_COMERA) else dense) for name in runs}
        where = "" if precision == "fp32" else f", {precision}"
        title = f"{encoders}, {len(batch[0])} sequences of {encoders.length} tokens, training step"
        refresh = _refresh(session, galore(), batch) if _GALORE in runs else None
        timings = session.time(title, runs, _DENSE)
        if refresh is not None:  # one refreshing step among the plain ones of each period
            gap, plain = peers.GALORE_GAP, timings.seconds[_GALORE]
            seconds = [((gap - 1) * t + refresh) / gap for t in plain]
            timings = timings.with_seconds(_GALORE, seconds)
        session.show_times(title + where, timings, counts)
        for name, one in graphs.items():
            described = one.describe()
            session.print(f"{name}: {described}")
            if described.contents is not None and described.contents.peak_bytes is not None:
                peaks = session.results[-1].setdefault("peak_bytes", {})
                peaks[name] = described.contents.peak_bytes


def _refresh(session: Session, step: TrainStep, batch: Batch) -> float:
    """Time a step in which GaLore refreshes its subspaces."""
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
