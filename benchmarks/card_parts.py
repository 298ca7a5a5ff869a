"""What ``benchmarks.card`` measures: each part a table whose rows are made one after the other.

A part is a list of jobs, the most telling first, so that a budget of time cuts off the least.
"""

import contextlib
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

from benchmarks import kernels
from benchmarks.embedding import train_step as table_step
from benchmarks.encoders import Encoders, learned_ranks, train_step
from benchmarks.kernel_case import Case
from benchmarks.kernels import GROUPS, OPERATORS, floor_of
from benchmarks.linear import count, forward_backward
from benchmarks.peak import Job as PeakJob
from comera.calibrate.in_turn import in_turn, tf32_products
from comera.nn.convert import tensorize_
from comera.nn.embedding import TTEmbedding
from comera.nn.targets import TTConfig
from comera.ops.context import machine_of, static_shapes
from comera.ops.way_order import preferring
from comera.train.capture import WARM_UP
from comera.train.step import TrainStep

Cell = str | float | None
Row = tuple[Cell, ...]
Kind = Literal["dense", "comera"]

_ROUNDS = 5
_AT_LEAST = 0.05
"""Seconds of a sample."""

_PAPER_RANKS = [12, 30, 30, 30, 16]


@dataclass(frozen=True)
class Sizes:
    """What the parts are measured at.

    Attributes:
        models: Encoders, the most telling first.
        batches: Sequences in a batch of them.
        compiled: Widths and batches at which steps are compiled too, in mixed precision.
        tokens: Rows of operators.
        layers: Layers whose cores are contracted together, of each width.
        widths: Widths in and out of operators.
        rank: Rank of operators.
        table: Rows and width of a table.
        eager: Widths of single layers.
        joined: Layers of models whose cores are contracted together.
        host: Width, rows and rank of one so small that the host's time is all it takes.
        steps: Steps of a training run.
    """

    models: tuple[Encoders, ...]
    batches: tuple[int, ...]
    compiled: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    layers: int
    widths: tuple[tuple[int, int], ...]
    rank: int
    table: tuple[int, int]
    eager: tuple[int, ...]
    joined: tuple[int, ...]
    host: tuple[int, int, int]
    steps: int


FULL = Sizes(
    models=(
        Encoders(rank=_PAPER_RANKS),
        Encoders(layers=2, width=4096, ffn=16384, heads=64, rank=64, vocab=8192),
        Encoders(layers=4, width=2048, ffn=8192, heads=32, rank=64, vocab=8192),
    ),
    batches=(32, 8, 128),
    compiled=((768, 32), (768, 8), (4096, 32)),
    tokens=(4096, 1024),
    layers=12,
    widths=((768, 768), (768, 3072), (3072, 768)),
    rank=30,
    table=(30522, 768),
    eager=(768, 1024, 2048, 4096, 8192),
    joined=(6, 12, 24),
    host=(64, 4, 4),
    steps=200,
)
TINY = Sizes(
    models=(Encoders(1, 16, 32, 2, 40, 6, 4, 4),),
    batches=(2,),
    compiled=(),
    tokens=(8,),
    layers=1,
    widths=((16, 16),),
    rank=4,
    table=(60, 16),
    eager=(16,),
    joined=(2,),
    host=(16, 2, 4),
    steps=3,
)
"""For a look at all parts on any machine: of these times nothing is to be learnt."""


@dataclass(frozen=True)
class Job:
    """Some rows of a table.

    Attributes:
        what: What is measured, in words.
        run: Measures it.
    """

    what: str
    run: Callable[[], Sequence[Row]]


@dataclass(frozen=True)
class Part:
    """A table.

    Attributes:
        title: Heading.
        columns: Names of the columns, with units.
        jobs: Makes the jobs, the most telling first.
    """

    title: str
    columns: tuple[str, ...]
    jobs: Callable[[torch.device, Sizes], Iterator[Job]]


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, of several rounds, until the device is done."""
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    calls = max(1, round(_AT_LEAST / max(1e-9, time.perf_counter() - began)))
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(device)
        taken.append((time.perf_counter() - began) / calls)
    return median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PRECISIONS = ("bf16", "fp32", "tf32")


def _dtype_of(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _operators(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    for precision in PRECISIONS:
        for name in OPERATORS:
            yield Job(f"{name}, {precision}", partial(_operator, device, sizes, name, precision))


def _operator(device: torch.device, sizes: Sizes, name: str, precision: str) -> list[Row]:
    """Time one operator as it is chosen, by torch's way, and as one would write it, in a graph."""
    dtype, rows = _dtype_of(precision), list[Row]()
    with tf32_products(precision == "tf32"), static_shapes():
        for case in kernels.cases(
            device, [name], sizes.tokens, sizes.tokens, sizes.widths, sizes.rank, sizes.layers,
            sizes.table, dtype,
        ):  # fmt: skip
            ours, plain = (_of_case(case, run, device) for run in (case.ours, case.plain))
            by_torch = ours
            if name in GROUPS:
                with preferring(GROUPS[name], "torch"):
                    by_torch = _of_case(case, case.ours, device)
            floor = 1e6 * floor_of(case, machine_of(device), dtype)
            times = ours, by_torch, plain, floor
            rows.append((case.title, precision, *times, by_torch / ours, plain / ours))
    return rows


def _of_case(case: Case, run: Callable[[int], object], device: torch.device) -> float:
    """Return the microseconds of a run on one input."""
    together = in_turn([partial(run, k) for k in range(case.copies)], device)
    return 1e6 * seconds_of(together, device) / case.copies


_MODES = ("eager", "captured", "compiled, captured")


def _steps(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    """List steps as they are and compiled, which takes a minute to begin with, as ranked."""
    first = [(0, batch) for batch in sizes.batches[:2]]
    others = [(number, batch) for batch in sizes.batches for number in range(len(sizes.models))]
    for number, batch in dict.fromkeys(first + others):
        model = sizes.models[number]
        for precision in PRECISIONS:
            what = f"{model}, batch {batch}, {precision}"
            yield Job(what, partial(_step, device, model, batch, precision, _MODES[:2]))
        if (model.width, batch) in sizes.compiled:
            what = f"{model}, batch {batch}, bf16, compiled"
            yield Job(what, partial(_step, device, model, batch, "bf16", _MODES[2:]))


def _step(
    device: torch.device, encoders: Encoders, batch: int, precision: str, modes: Sequence[str]
) -> list[Row]:
    rows: list[Row] = []
    for mode in modes:
        if mode != "eager" and device.type != "cuda":
            continue
        found: dict[Kind, tuple[float, float | None]] = {}
        for kind in ("dense", "comera"):
            with tf32_products(precision == "tf32"):
                found[kind] = _time_of_step(device, encoders, batch, precision, mode, kind)
        (dense, dense_peak), (ours, peak) = found["dense"], found["comera"]
        rows.append(
            (
                str(encoders),
                batch,
                precision,
                mode,
                1e3 * dense,
                1e3 * ours,
                dense / ours,
                dense_peak,
                peak,
            )
        )
    return rows


def _time_of_step(
    device: torch.device, encoders: Encoders, batch: int, precision: str, mode: str, kind: Kind
) -> tuple[float, float | None]:
    """Return the seconds of a training step, and on a card the MiB at its peak."""
    before = _forget_peak(device)
    step = _make_step(device, encoders, precision, mode, kind)
    data = encoders.batch(batch, device)
    for _ in range(WARM_UP + 2 if mode != "eager" else 2):  # until it is captured
        step(data)
    seconds = seconds_of(lambda: step(data), device)
    peak = None if before is None else (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if mode != "eager" and not step.describe().captured:
        raise RuntimeError(f"the {kind} step was not captured: {step.describe().why}")
    return seconds, peak


def _make_step(
    device: torch.device, encoders: Encoders, precision: str, mode: str, kind: Kind
) -> TrainStep:
    model = encoders.model(kind, device)
    ranks = learned_ranks(model) if kind == "comera" else None
    graph, compile = None if mode != "eager" else False, mode.startswith("compiled")
    return train_step(model, ranks, compile, graph, "bf16" if precision == "bf16" else "fp32")


def _forget_peak(device: torch.device) -> int | None:
    """Begin to watch a card's memory; return what is taken now."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _layers(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    """List single layers, and models of several whose cores are joined before they are used."""
    cases = [(number, *sizes.host) for number in (1, *sizes.joined)]
    cases += [(1, width, sizes.tokens[0], sizes.rank) for width in sizes.eager]
    for precision in ("fp32", "bf16"):
        for number, width, tokens, rank in cases:
            what = f"{number} of width {width}, {tokens} tokens, {precision}"
            yield Job(what, partial(_layer, device, number, width, tokens, rank, precision))


def _layer(
    device: torch.device, number: int, width: int, tokens: int, rank: int, precision: str
) -> list[Row]:
    """Time layers there and back, as the host starts them and in a graph."""
    dtype = _dtype_of(precision)
    layers = [nn.Linear(width, width, device=device, dtype=dtype) for _ in range(number)]
    dense = nn.Sequential(*layers) if number > 1 else layers[0]
    layer = tensorize_(copy.deepcopy(dense), TTConfig(rank=rank, init="orthogonal"))
    x = torch.randn(tokens, width).to(device, dtype).requires_grad_()
    rows: list[Row] = []
    for mode in _MODES[: 2 if device.type == "cuda" else 1]:
        with static_shapes() if mode == "captured" else contextlib.nullcontext():
            runs = [forward_backward(one, x) for one in (dense, layer)]
            if mode == "captured":
                runs = [in_turn([run], device) for run in runs]
            theirs, ours = (1e3 * seconds_of(run, device) for run in runs)
        rows.append((number, width, tokens, precision, mode, theirs, ours, theirs / ours))
    return rows


def _tables(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    for precision in PRECISIONS[:2]:
        for indices in sizes.tokens:
            what = f"{indices} indices, {precision}"
            yield Job(what, partial(_table, device, sizes, indices, precision))


def _table(device: torch.device, sizes: Sizes, indices: int, precision: str) -> list[Row]:
    """Time lookup, backward and step of a table as the host starts them."""
    (rows, width), dtype = sizes.table, _dtype_of(precision)
    picked = torch.randint(0, rows, (indices,)).to(device)
    grad = torch.randn(indices, width).to(device, dtype)
    tables = (
        nn.Embedding(rows, width, device=device, dtype=dtype),
        TTEmbedding(rows, width, rank=sizes.rank, device=device, dtype=dtype),
    )
    theirs, ours = (
        1e3 * seconds_of(table_step(table, picked, grad, fused=True), device) for table in tables
    )
    return [(f"{rows:,} x {width}", indices, precision, theirs, ours, theirs / ours)]


def _memory(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    batches = (1, sizes.batches[0])
    for captured in (True, False) if device.type == "cuda" else (False,):
        for batch in batches:
            what = f"batch {batch}, {'captured' if captured else 'eager'}"
            yield Job(what, partial(_peaks, device, sizes.models[0], batch, captured))


def _peaks(device: torch.device, encoders: Encoders, batch: int, captured: bool) -> list[Row]:
    """Weigh a step of both models, each in a process of its own."""
    blank = PeakJob("dense", str(device), torch.get_num_threads(), False, batch, captured, encoders)
    dense, ours = (_peak(replace(blank, kind=kind)) for kind in ("dense", "comera"))
    mode = "captured" if captured else "eager"
    return [(batch, mode, dense[0], ours[0], dense[0] / ours[0], dense[1], ours[1])]


def _peak(job: PeakJob) -> tuple[float, float | None]:
    """Return the MiB that were allocated at most, and on a card those that were reserved."""
    words = [sys.executable, "-m", "benchmarks.peak", job.to_json()]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the {job.kind} step ended with status {ended.returncode}: {last}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    reserved = found.get("reserved")
    return found["peak"] / 2**20, None if reserved is None else reserved / 2**20


def _runs(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    for mode in ("captured", "eager") if device.type == "cuda" else ("eager",):
        what = f"{sizes.steps} steps, {mode}"
        yield Job(what, partial(_run, device, sizes, mode))


def _run(device: torch.device, sizes: Sizes, mode: str) -> list[Row]:
    """Time training by the clock on the wall: making, capturing and all steps, other data each."""
    encoders, batch, found = sizes.models[0], sizes.batches[0], list[float]()
    parameters = []
    data = [encoders.batch(batch, device) for _ in range(8)]
    kinds: tuple[Kind, ...] = ("dense", "comera")
    for kind in kinds:
        _wait(device)
        began = time.perf_counter()
        step = _make_step(device, encoders, "bf16", mode, kind)
        for number in range(sizes.steps):
            loss = step(data[number % len(data)])
            if number % 10 == 0:
                float(loss)  # as a loop does that logs
        _wait(device)
        found.append(time.perf_counter() - began)
        parameters.append(count(step.model))
    theirs, ours = found
    fewer = parameters[0] / parameters[1]
    return [(str(encoders), batch, mode, sizes.steps, theirs, ours, theirs / ours, fewer)]


PARTS: dict[str, Part] = {
    "operators": Part(
        "Operators, microseconds in a CUDA graph",
        (
            "operator", "precision", "ours", "torch's way", "plain torch", "floor",
            "torch's way / ours", "plain / ours",
        ),
        _operators,
    ),
    "steps": Part(
        "Training steps of encoders, AdamW",
        (
            "model", "batch", "precision", "mode", "dense ms", "ours ms", "dense / ours",
            "dense peak MiB", "our peak MiB",
        ),
        _steps,
    ),
    "layers": Part(
        "Linear layers, forward and backward, cores contracted each time",
        ("layers", "width", "tokens", "precision", "mode", "dense ms", "ours ms", "dense / ours"),
        _layers,
    ),
    "tables": Part(
        "One table: lookup, backward and step, eager",
        ("table", "indices", "precision", "dense ms", "ours ms", "dense / ours"),
        _tables,
    ),
    "memory": Part(
        "Peak memory of a training step, a process each, MiB",
        (
            "batch", "mode", "dense", "ours", "dense / ours", "dense reserved", "ours reserved",
        ),
        _memory,
    ),
    "runs": Part(
        "Training runs in bf16, seconds by the wall clock from the making of the step on",
        (
            "model", "batch", "mode", "steps", "dense s", "ours s", "dense / ours",
            "parameters dense / ours",
        ),
        _runs,
    ),
}  # fmt: skip
"""All tables, by the name of the part."""
