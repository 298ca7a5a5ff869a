"""Measure the peak memory of a training step.

Each is measured in a process of its own: ``python -m benchmarks.memory JOB``. The base is the
resident size after all imports and one step of an 8 x 8 layer. The peak is the largest resident
size from then on, while the model and its optimizer are built and two steps are taken. On a GPU it
is what torch had allocated there at most. Beside dense layers stand compressed ones; beside a table
the plain way to read it, which gathers a slice of every core for every index.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.checks import RowByRow
from benchmarks.embedding import draw
from benchmarks.encoders import Encoders, add_encoders, encoders_of, learned_ranks, train_step
from benchmarks.session import (
    Session,
    add_several,
    add_sizes,
    count,
    in_new_process,
    rank_of,
)
from comera.allocator import reuse_freed_memory
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.train.capture import WARM_UP

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # man 5 proc_pid_clear_refs
_STEPS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_several(parser, "--batch", [1, 8, 32], "Numbers of sequences in a batch.")
    add_encoders(parser)
    parser.add_argument(
        "--layer", action="store_true", help="Weigh a linear layer instead of the encoders."
    )
    parser.add_argument(
        "--table", action="store_true", help="Weigh lookups in a table of --shape ROWS WIDTH."
    )
    parser.add_argument(
        "--shape", nargs=2, type=int, default=[768, 3072], metavar=("IN", "OUT"),
        help="Input and output width of the layer.",
    )  # fmt: skip
    parser.add_argument(
        "--zipf", type=float, default=1.05, help="Exponent of the distribution of the indices."
    )
    add_sizes(parser, {"tokens": (4096, "Number of rows of the layer, or of indices.")})


def run(session: Session, options: argparse.Namespace) -> None:
    """Weigh a step of the model at every batch size, or of one layer or table."""
    if session.device.type == "cpu":
        resident_peak()  # raises before anything starts where it cannot be read
    (a, b), tokens, rank = options.shape, options.tokens, rank_of(options.rank)
    theirs = "dense"
    if options.table:
        theirs = "plain"
        table = {"rows": a, "width": b, "rank": rank if isinstance(rank, int) else max(rank)}
        title = f"embedding {a} x {b}, its rows and gradient included"
        jobs = {f"{tokens} indices": {"table": table, "tokens": tokens, "zipf": options.zipf}}
    elif options.layer:
        layer = {"in_features": a, "out_features": b, "rank": rank}
        title = f"linear {a} -> {b}, {tokens} tokens, its input included"
        jobs = {f"{tokens} tokens": {"layer": layer, "tokens": tokens}}
    else:
        encoders = encoders_of(options)
        title = f"{encoders}, sequences of {encoders.length} tokens, AdamW"
        jobs = {
            f"batch {size}": {"encoders": asdict(encoders), "batch": size} for size in options.batch
        }

    def rows() -> Iterator[tuple[Any, ...]]:
        for name, job in jobs.items():
            found = [_measure(session, name, kind, job) for kind in (theirs, "comera")]
            known = all(found)
            yield name, *found, found[0] / found[1] if known else None  # type: ignore[operator]

    columns = {"": "", theirs: ",.1f", "comera": ",.1f", f"{theirs} / comera": ".2f"}
    session.table(f"peak memory of {title}, MiB", columns, rows())


def _measure(session: Session, name: str, kind: str, job: dict[str, Any]) -> float | None:
    """Return MiB; None, and a note, if the process did not come to its end."""
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

    Args:
        job: ``kind`` (``dense``, ``plain`` or ``comera``), ``device``, ``threads`` and ``keep``,
            whether freed memory is; and what is trained: ``encoders`` at a ``batch``, ``captured``
            or not, or a ``layer`` or a ``table`` at so many ``tokens``.
    """
    torch.set_num_threads(job["threads"])
    if job["keep"]:
        reuse_freed_memory()
    device = torch.device(job["device"])
    read = peak_reader(device)
    train = next(_TRAIN[name] for name in _TRAIN if name in job)
    found = {"parameters": train(job, device), "peak": read()}
    if device.type == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found


def peak_reader(device: torch.device) -> Callable[[], int]:
    """Begin to watch after a step of a tiny layer; the result returns bytes above the base.

    Raises:
        ValueError: Where the system does not say.
    """
    layer = nn.Linear(8, 8).to(device)
    layer(torch.ones(8, 8, device=device)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    if device.type == "cpu":
        return resident_peak()
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device) - base


def resident_peak() -> Callable[[], int]:
    """Begin to watch; the result returns by how many bytes the resident size rose at most.

    Raises:
        ValueError: Where the system does not say.
    """
    try:
        base = _status("VmRSS")
        _CLEAR.write_text(_FORGET_PEAK)
    except OSError as problem:
        raise ValueError(
            f"device='cpu' needs Linux, where peak memory is read from {_STATUS.parent}; "
            f"here, on {sys.platform}: {problem}"
        ) from None
    return lambda: _status("VmHWM") - base


def _status(entry: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(entry))
    return int(line.split()[1]) * 1024


def _train_model(job: dict[str, Any], device: torch.device) -> int:
    encoders, captured = Encoders(**job["encoders"]), job.get("captured", False)
    model = encoders.model(job["kind"], device)
    ranks = learned_ranks(model) if job["kind"] == "comera" else None
    step = train_step(model, ranks, graph=None if captured else False)
    for _ in range(WARM_UP + _STEPS if captured else _STEPS):
        step(encoders.batch(job["batch"], device))
    return count(model)


def _train_layer(job: dict[str, Any], device: torch.device) -> int:
    """Train a layer without an optimizer; the input and its gradient are included."""
    sizes = dict(job["layer"])
    if job["kind"] == "dense":
        del sizes["rank"]
    layer = (nn.Linear if job["kind"] == "dense" else TTLinear)(**sizes).to(device)
    x = torch.randn(job["tokens"], sizes["in_features"], device=device, requires_grad=True)
    for _ in range(_STEPS):
        x.grad = None
        layer.zero_grad()
        layer(x).sum().backward()
    return count(layer)


def _train_table(job: dict[str, Any], device: torch.device) -> int:
    """Train a table without an optimizer; rows that are read and their gradient are included."""
    sizes, tokens = job["table"], job["tokens"]
    table = TTEmbedding(sizes["rows"], sizes["width"], rank=sizes["rank"], device=device)
    layer: nn.Module = RowByRow(table) if job["kind"] == "plain" else table
    indices = draw(sizes["rows"], tokens, job["zipf"]).to(device)
    grad = torch.randn(tokens, sizes["width"], device=device)
    for _ in range(_STEPS):
        layer.zero_grad()
        layer(indices).backward(grad)
    return count(layer)


_TRAIN = {"encoders": _train_model, "layer": _train_layer, "table": _train_table}


if __name__ == "__main__":
    print(json.dumps(peak(json.loads(sys.argv[1]))))
