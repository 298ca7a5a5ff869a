"""``python -m benchmarks WHAT``: from the command line to a benchmark and its exit status."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from benchmarks.checkpoints import checkpoints
from benchmarks.curve import (
    DEFAULT_POINTS,
    POINTS,
    Axis,
    check_plot,
    curve,
    lookup_curve,
    plot_curve,
)
from benchmarks.embedding import embedding
from benchmarks.kernels import OPERATORS, kernels
from benchmarks.linear import linear
from benchmarks.memory import Subject, memory
from benchmarks.numerics import DisagreementError
from benchmarks.optimizers import Llama, optimizers
from benchmarks.option_values import (
    check_positive,
    encoders_of,
    numbers_of,
    rank_of,
    shape_of,
    tables_of,
    widths_of,
)
from benchmarks.options import (
    add_checkpoints,
    add_common,
    add_embedding,
    add_kernels,
    add_linear,
    add_memory,
    add_objective,
    add_optimizers,
    add_ranking,
    add_serve,
    add_step,
    add_traffic,
    add_truncation,
    add_updates,
)
from benchmarks.peak import LayerShape, TableShape
from benchmarks.ranking import ranking
from benchmarks.scaling import scaling
from benchmarks.serve import serving
from benchmarks.serve_job import ServedLlama
from benchmarks.session import Session
from benchmarks.step import objective, step, truncation
from benchmarks.traffic import traffic
from benchmarks.updates import updates
from comera.allocator import reuse_freed_memory
from comera.checkpoint.contents import Quality
from comera.extras import MissingPackageError

_INTERRUPTED = 130

_TOKENS, _WIDTH_TOKENS = 4096, 512
"""Rows of the batch of a layer where nothing is said; wide layers take fewer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    parser = ArgumentParser(
        prog="python -m benchmarks",
        description="Time and weigh compressed layers beside dense ones and other packages, in "
        "one process and in turn. Compare the ratios, not the milliseconds.",
        allow_abbrev=False,
    )
    benchmarks = parser.add_subcommands(dest="benchmark")
    for name, (text, add, _) in _BENCHMARKS.items():
        command = ArgumentParser(description=text, allow_abbrev=False)
        add(command)
        add_common(command, name)
        benchmarks.add_subcommand(name, command, help=text)
    console, errors = Console(), Console(stderr=True)
    for each in (console, errors):
        if not each.is_terminal:
            each.width = 120  # characters of a line where no terminal says how many
    try:
        return run_bench(parser.parse_args(arguments), console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return _INTERRUPTED
    except (ValueError, OSError, MissingPackageError) as problem:
        errors.print("[bold red]error:[/]", end=" ")
        errors.print(str(problem), highlight=False, soft_wrap=True, markup=False)
        return 1


def run_bench(chosen: Namespace, console: Console) -> int:
    """Run the requested benchmark; return the exit status.

    Raises:
        ValueError: If an option is out of range.
    """
    name = chosen.benchmark
    options = chosen[name]
    session = _session(options, console)
    if options.json is not None:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    session.introduce(options.get("dtype", "float32"))
    status = 0
    try:
        _BENCHMARKS[name][2](session, options)
    except DisagreementError as problem:
        console.print(f"[bold red]refused:[/] {problem}", highlight=False, soft_wrap=True)
        status = 1
    except KeyboardInterrupt:
        session.print("interrupted")
        status = _INTERRUPTED
    if options.json is not None:
        session.write(Path(options.json), name, options.as_dict())
    return status or int(session.failed)


def _session(options: Namespace, console: Console) -> Session:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs a GPU that torch can see; --device=cpu runs here")
    if options.threads is not None:
        check_positive("threads", options.threads)
        torch.set_num_threads(options.threads)
    repeats = options.get("repeats", 1)
    check_positive("repeats", repeats)
    kept = reuse_freed_memory(options.malloc == "keep")
    return Session(console, torch.device(options.device), repeats, kept)


def _run_linear(session: Session, options: Namespace) -> None:
    shape, rank = shape_of(options.shape), rank_of(options.rank)
    dtype = getattr(torch, options.dtype)
    tokens = numbers_of("tokens", options.tokens) if options.tokens else []
    points = numbers_of("points", options.points) if options.points else []
    axis: Axis | None = options.curve or ("tokens" if len(tokens) > 1 else None)
    if axis is None:
        for name in ("points", "plot"):
            if options[name]:
                axes = ", ".join(DEFAULT_POINTS)
                raise ValueError(f"{name}={options[name]!r} needs --curve, one of {axes}")
        linear(session, shape, rank, (tokens or [_TOKENS])[0], dtype, options.peers == "all")
        return
    if axis != "tokens" and len(tokens) > 1:
        raise ValueError(f"tokens={tokens} must be one number beside --curve={axis}")
    if axis == "tokens" and len(tokens) > 1:
        points = points or tokens
    if options.plot:
        check_plot(Path(options.plot))
    fixed = (tokens or [_WIDTH_TOKENS if axis == "width" else _TOKENS])[0]
    points = points or DEFAULT_POINTS[axis]
    title, measured = curve(session, axis, points, shape, rank, fixed, dtype)
    if options.plot:
        plot_curve(measured, axis, title, Path(options.plot))
        session.print(f"wrote {options.plot}")


def _run_embedding(session: Session, options: Namespace) -> None:
    for name in ("rows", "width", "indices"):
        check_positive(name, options[name])
    if options.curve is not None:
        points = numbers_of("points", options.points) if options.points else POINTS[options.curve]
        lookup_curve(
            session, options.curve, points, options.rows, options.width, options.indices,
            rank_of(options.rank),
        )  # fmt: skip
        return
    if options.points:
        raise ValueError(f"points={options.points} needs --curve, one of {', '.join(POINTS)}")
    embedding(
        session,
        options.rows,
        options.width,
        options.indices,
        options.bag,
        rank_of(options.rank),
        options.zipf,
        getattr(torch, options.dtype),
        options.dense_limit,
        options.peers == "all",
    )


def _run_step(session: Session, options: Namespace) -> None:
    batches = numbers_of("batch", options.batch)
    step(session, encoders_of(options), batches, options.peers == "all", options.compile)


def _run_memory(session: Session, options: Namespace) -> None:
    batches = numbers_of("batch", options.batch)
    subject: Subject | None = None
    if options.layer or options.table:
        check_positive("tokens", options.tokens)
        shape, rank = shape_of(options.shape), rank_of(options.rank)
        subject = LayerShape(shape, rank, options.tokens)
        if options.table:
            subject = TableShape(*shape, max(rank) if isinstance(rank, list) else rank,
                                 options.tokens, options.zipf)  # fmt: skip
    memory(session, None if subject else encoders_of(options), batches, subject)


def _run_objective(session: Session, options: Namespace) -> None:
    check_positive("batch", options.batch)
    objective(session, encoders_of(options), options.batch)


def _run_checkpoints(session: Session, options: Namespace) -> None:
    for name in ("parameters", "width"):
        check_positive(name, options[name])
    quality = Quality(options.bits, options.rate, beta=options.beta)
    checkpoints(session, options.parameters, options.width, quality)


def _run_truncation(session: Session, options: Namespace) -> None:
    check_positive("batch", options.batch)
    truncation(session, encoders_of(options), options.batch, options.keep)


def _run_traffic(session: Session, options: Namespace) -> None:
    check_positive("batch", options.batch)
    traffic(session, encoders_of(options), options.batch)
    if options.processes:
        processes = numbers_of("processes", options.processes)
        scaling(session, encoders_of(options), options.batch, processes)


def _run_optimizers(session: Session, options: Namespace) -> None:
    sizes = ("layers", "width", "ffn", "heads", "vocab", "length", "batch")
    for name in (*sizes, "rank", "gap"):
        check_positive(name, options[name])
    llama = Llama(**{name: options[name] for name in sizes})
    with_peers = options.peers == "all"
    optimizers(session, llama, options.rank, options.gap, with_peers, options.only)


def _run_kernels(session: Session, options: Namespace) -> None:
    unknown = [name for name in options.only if name not in OPERATORS]
    if unknown:
        raise ValueError(f"only={unknown[0]!r} must be some of {', '.join(OPERATORS)}")
    for name in ("rank", "layers"):
        check_positive(name, options[name])
    rows, width = options.table
    check_positive("table", min(rows, width))
    kernels(
        session,
        options.only,
        numbers_of("tokens", options.tokens),
        numbers_of("indices", options.indices),
        widths_of(options.widths),
        options.rank,
        options.layers,
        (rows, width),
        getattr(torch, options.dtype),
        None if options.markdown is None else Path(options.markdown),
    )


def _run_ranking(session: Session, options: Namespace) -> None:
    ranks = numbers_of("rank", options.rank)
    ranking(session, widths_of(options.widths), ranks, numbers_of("tokens", options.tokens))


def _run_serve(session: Session, options: Namespace) -> None:
    sizes = ("layers", "width", "ffn", "heads", "vocab", "prompt", "tokens")
    for name in (*sizes, "rank"):
        check_positive(name, options[name])
    if options.width % (2 * options.heads):
        raise ValueError(
            f"width={options.width} must be a multiple of 2 * heads={2 * options.heads}"
        )
    if options.tokens < 2:
        raise ValueError(f"tokens={options.tokens} must be at least 2: a first one and others")
    serving(session, ServedLlama(**{name: options[name] for name in sizes}), options.rank)


def _run_updates(session: Session, options: Namespace) -> None:
    if not options.lr > 0:
        raise ValueError(f"lr={options.lr} must be above 0")
    updates(
        session,
        widths_of(options.widths),
        numbers_of("order", options.order),
        numbers_of("rank", options.rank),
        options.optimizer,
        options.lr,
        tables_of(options.hot_rows),
    )


_BENCHMARKS: Mapping[
    str,
    tuple[str, Callable[[ArgumentParser], None], Callable[[Session, Namespace], Any]],
] = {
    "linear": (
        "Time one linear layer, forward and backward; or a curve of them.",
        add_linear,
        _run_linear,
    ),
    "embedding": (
        "Time lookup, backward and optimizer step of an embedding table.",
        add_embedding,
        _run_embedding,
    ),
    "step": ("Time a training step of a transformer.", add_step, _run_step),
    "memory": ("Measure the peak memory of a training step.", add_memory, _run_memory),
    "objective": (
        "Time what the rank objective adds to a training step.",
        add_objective,
        _run_objective,
    ),
    "checkpoints": (
        "Time checkpoints that are copied, compressed and read.",
        add_checkpoints,
        _run_checkpoints,
    ),
    "truncation": (
        "Time a training step before and after truncation of its ranks.",
        add_truncation,
        _run_truncation,
    ),
    "traffic": (
        "Count the bytes that several processes exchange in a training step, and time it.",
        add_traffic,
        _run_traffic,
    ),
    "optimizers": (
        "Time the updates of optimizers on a dense language model.",
        add_optimizers,
        _run_optimizers,
    ),
    "kernels": (
        "Time operators that have CUDA kernels beside plain torch and beside their floors.",
        add_kernels,
        _run_kernels,
    ),
    "ranking": (
        "Measure all ways to compute a layer, and whether the planner's order is right.",
        add_ranking,
        _run_ranking,
    ),
    "serve": (
        "Measure a language model as it is served: file, loading, tokens and memory.",
        add_serve,
        _run_serve,
    ),
    "updates": (
        "Measure how far a step of an optimizer moves the weight of a layer.",
        add_updates,
        _run_updates,
    ),
}
