"""Measure the peak memory of a training step.

Each is measured in a process of its own, ``python -m benchmarks.memory JOB``, while the model and
its optimizer are built and two steps are taken. On a CPU once as the bytes of all tensors (weights,
gradients, optimizer state, activations), which torch's profiler sees; and once as the largest
resident size, which has free memory between tensors too, without pages of files such as the code of
libraries, above that after all imports and one step of an 8 x 8 layer. On a GPU the memory that
torch allocated. Beside dense layers stand compressed ones; beside a table its lookup by a slice of
every core for every index.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.checks import RowByRow
from benchmarks.embedding import draw
from benchmarks.encoders import Encoders, add_encoders, encoders_of, learned_ranks, train_step
from benchmarks.session import Session, add_several, add_sizes, count, in_new_process
from comera.allocator import reuse_freed_memory
from comera.nn.embedding import TTEmbedding
from comera.train.capture import WARM_UP
from comera.train.log import MemoryWatch

_STEPS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_several(parser, "--batch", [1, 8, 32], "Numbers of sequences in a batch.")
    add_encoders(parser)
    parser.add_argument(
        "--table", action="store_true", help="Weigh lookups in a table of --shape ROWS WIDTH."
    )
    parser.add_argument("--shape", nargs=2, type=int, metavar="N", help="Of the table.")
    parser.add_argument(
        "--zipf", type=float, default=1.05, help="Exponent of the distribution of the indices."
    )
    add_sizes(parser, {"tokens": (4096, "Number of indices.")})


def run(session: Session, options: argparse.Namespace) -> None:
    """Measure a step of the model at every batch size, or of one table."""
    peak_reader(session.device)  # raises before anything starts
    tokens = options.tokens
    theirs = "dense"
    if options.table:
        theirs = "plain"
        if options.shape is None:
            raise ValueError("--table needs --shape, its rows and width")
        rows, width = options.shape
        table = {"rows": rows, "width": width, "rank": max(options.rank)}
        title = f"embedding {rows} x {width}, its rows and gradient included"
        jobs = {f"{tokens} indices": {"table": table, "tokens": tokens, "zipf": options.zipf}}
    else:
        encoders = encoders_of(options)
        title = f"{encoders}, sequences of {encoders.length} tokens, AdamW"
        jobs = {
            f"batch {size}": {"encoders": asdict(encoders), "batch": size} for size in options.batch
        }

    ways = ["allocated"] if session.device.type == "cuda" else ["tensors", "resident"]

    def measured() -> Iterator[tuple[Any, ...]]:
        for name, job in jobs.items():
            for way in ways:
                wanted = {**job, "tensors": way == "tensors"}
                found = [_measure(session, name, kind, wanted) for kind in (theirs, "comera")]
                ratio = found[0] / found[1] if all(found) else None  # type: ignore[operator]
                yield name, way, *found, ratio

    columns = {"": "", "of": "", theirs: ",.1f", "comera": ",.1f", f"{theirs} / comera": ".2f"}
    session.table(f"peak memory of {title}, MiB", columns, measured())


def _measure(session: Session, name: str, kind: str, job: dict[str, Any]) -> float | None:
    """Return MiB; None, and a note, if the process failed."""
    blank = {"kind": kind, "device": str(session.device), "threads": torch.get_num_threads()}
    try:
        found = in_new_process("benchmarks.memory", {**blank, "keep": session.kept, **job})
    except RuntimeError as problem:
        session.note(f"{name}, {kind}: {problem}")
        session.failed = True
        return None
    return found["peak"] / 2**20


def peak(job: dict[str, Any]) -> dict[str, int]:
    """Return bytes at the peak above the base, on a GPU those reserved, and the parameters.

    A job has ``kind`` (``dense``, ``plain`` or ``comera``), ``device``, ``threads``, ``keep`` of
    freed memory, and ``encoders`` at a ``batch``, maybe ``captured``, or a ``table`` at ``tokens``;
    with ``tensors`` the peak is that of all tensors, as torch's profiler sees them on a CPU.
    """
    torch.set_num_threads(job["threads"])
    if job["keep"]:
        reuse_freed_memory()
    device = torch.device(job["device"])
    train = _train_table if "table" in job else _train_model
    if job.get("tensors"):
        with profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # torch 2.11 warns without, of several cycles
        ) as seen:
            parameters = train(job, device)
        events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        return {"parameters": parameters, "peak": max(accumulate(n for _, n in changes))}
    read = peak_reader(device)
    found = {"parameters": train(job, device), "peak": read()}
    if device.type == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found


def peak_reader(device: torch.device) -> Callable[[], int]:
    """Begin to watch after a step of a tiny layer; the result returns bytes above the base.

    Raises:
        ValueError: Where the system does not say.
    """
    try:
        return MemoryWatch(device).peak
    except OSError as problem:
        raise ValueError(
            "device='cpu' needs Linux, where peak memory is read from /proc/self; "
            f"here, on {sys.platform}: {problem}"
        ) from None


def _train_model(job: dict[str, Any], device: torch.device) -> int:
    encoders, captured = Encoders(**job["encoders"]), job.get("captured", False)
    model = encoders.model(job["kind"], device)
    ranks = learned_ranks(model) if job["kind"] == "comera" else None
    step = train_step(model, ranks, graph=None if captured else False)
    for _ in range(WARM_UP + _STEPS if captured else _STEPS):
        step(encoders.batch(job["batch"], device))
    return count(model)


def _train_table(job: dict[str, Any], device: torch.device) -> int:
    """Train a table without an optimizer; its output and the gradient are included."""
    sizes, tokens = job["table"], job["tokens"]
    table = TTEmbedding(sizes["rows"], sizes["width"], rank=sizes["rank"], device=device)
    layer: nn.Module = RowByRow(table) if job["kind"] == "plain" else table
    indices = draw(sizes["rows"], tokens, job["zipf"]).to(device)
    grad = torch.randn(tokens, sizes["width"], device=device)
    for _ in range(_STEPS):
        layer.zero_grad()
        layer(indices).backward(grad)
    return count(layer)


if __name__ == "__main__":
    print(json.dumps(peak(json.loads(sys.argv[1]))))
