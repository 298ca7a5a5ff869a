"""Time lookup, backward and optimizer step of an embedding table; or a curve of them.

Beside dense tables, fused and sparse, stand comera, the same cores read row by row, and
tensorly-torch. A curve is of comera alone, for indices that are drawn evenly.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, SparseAdam

from benchmarks import peers
from benchmarks.checks import RowByRow, check_table
from benchmarks.session import (
    DTYPES,
    Session,
    add_peers,
    add_rank,
    add_repeats,
    add_several,
    add_sizes,
    count,
    rank_of,
)
from benchmarks.timing import milliseconds
from comera.nn.embedding import TTEmbedding

POINTS = {
    "indices": [256, 1024, 4096, 16384, 65536, 262144],
    "rows": [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000],
}
_CHECKED = 4096  # indices of a curve whose rows and gradients are checked
_LEARNING_RATE = 1e-4
_COPIES = {"dense, fused AdamW": 4, "dense, AdamW": 4, "sparse, SparseAdam": 3}
"""Weight, gradient unless it is sparse, and two moments, each as large as the table."""
_TRAINED, _PLAIN = "comera, fused AdamW", "the same cores row by row, fused AdamW"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_sizes(
        parser,
        {
            "rows": (30522, "Number of rows of the table."),
            "width": (768, "Width of a row of the table."),
            "indices": (4096, "Number of indices in a batch."),
        },
    )
    parser.add_argument("--curve", choices=list(POINTS), help="Show times against this quantity.")
    add_several(parser, "--points", [], "Values of it; by default steps of four or ten.")
    add_rank(parser, [32])
    parser.add_argument(
        "--zipf", type=float, default=1.05,
        help="Exponent of the Zipf distribution of the indices; 0 draws them uniformly.",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="Type of all numbers.")
    parser.add_argument(
        "--dense_limit", type=float, default=4.0,
        help="GiB that a dense table may take, its gradient and moments included.",
    )  # fmt: skip
    add_peers(parser)
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Time one table, or a curve; raises ``ValueError`` for options that contradict."""
    rank = rank_of(options.rank)
    sizes = options.rows, options.width, options.indices, rank
    if options.curve is not None:
        _curve(session, options.curve, options.points or POINTS[options.curve], *sizes)
        return
    if options.points:
        raise ValueError(f"points={options.points} needs --curve, one of {', '.join(POINTS)}")
    _one_table(session, options, *sizes)


def _one_table(
    session: Session,
    options: argparse.Namespace,
    rows: int,
    width: int,
    indices: int,
    rank: int | Sequence[int],
) -> None:
    """Time dense, sparse, comera and tensorly-torch side by side."""
    torch.manual_seed(0)
    zipf, dtype = options.zipf, getattr(torch, options.dtype)
    picked = draw(rows, indices, zipf).to(session.device)
    layer = TTEmbedding(rows, width, rank=rank, dtype=dtype).to(session.device)
    session.print(check_table(layer, picked))

    layers: dict[str, nn.Module] = {}
    for name, copies in _COPIES.items():
        needed = copies * rows * width * dtype.itemsize / 2**30
        if needed <= options.dense_limit:
            sparse = name.startswith("sparse")
            layers[name] = nn.Embedding(rows, width, sparse=sparse, dtype=dtype)
        else:
            session.note(
                f"{name} is left out: {copies} copies of the table take {needed:.1f} GiB, more "
                f"than --dense_limit={options.dense_limit:g}"
            )
    layers |= {_TRAINED: layer, _PLAIN: RowByRow(copy.deepcopy(layer))}  # both will be trained
    baseline = next(iter(layers))  # the first dense table that fits in memory
    grad = torch.randn(picked.shape[0], width).to(session.device, dtype)
    runs = {
        name: table_step(table.to(session.device), picked, grad, fused="fused" in name)
        for name, table in layers.items()
    }
    parameters = {name: count(table) for name, table in layers.items()}
    name = f"tensorly-torch, rank {max(layer.ranks)}, fused AdamW"

    def peer() -> Callable[[], object]:
        table = peers.tensorly_embedding(layer)
        parameters[name] = count(table)
        # It keeps the columns that round the width up.
        padded = nn.functional.pad(grad, (0, layer.shape.num_cols - width))
        return table_step(table, picked, padded, fused=True)

    with peers.tensorly_on_torch():
        if options.peers == "all":
            session.add_peer(runs, name, peer)
        law = f"Zipf {zipf:g}" if zipf else "uniform"
        title = (
            f"embedding {rows} x {width}, modes {layer.shape.describe_modes()}, ranks "
            f"{' '.join(map(str, layer.ranks))}, {indices} indices, {law}, "
            f"{picked.unique().numel()} distinct, lookup + backward + step"
        )
        session.measure(title, runs, baseline, {name: parameters[name] for name in runs})


def draw(rows: int, count: int, zipf: float) -> Tensor:
    """Draw indices; the probability of row ``i`` is proportional to ``(i + 1)^-zipf``."""
    if not zipf:
        return torch.randint(0, rows, (count,))
    weights = torch.arange(1, rows + 1, dtype=torch.double) ** -zipf
    edges = weights.cumsum(0)
    return torch.searchsorted(edges, torch.rand(count, dtype=torch.double) * edges[-1])


def table_step(
    table: nn.Module, indices: Tensor, grad: Tensor, fused: bool
) -> Callable[[], object]:
    optimizer: Optimizer
    if getattr(table, "sparse", False):
        optimizer = SparseAdam(table.parameters(), lr=_LEARNING_RATE)
    else:
        optimizer = AdamW(table.parameters(), lr=_LEARNING_RATE, fused=fused or None)

    def run() -> None:
        optimizer.zero_grad()
        table(indices).backward(grad)
        optimizer.step()

    return run


def _curve(
    session: Session,
    axis: str,
    points: Sequence[int],
    rows: int,
    width: int,
    indices: int,
    rank: int | Sequence[int],
) -> None:
    """Time lookup, backward and step at every point."""

    def row(at: int, rows: int, indices: int) -> tuple[Any, ...]:
        torch.manual_seed(0)
        layer = TTEmbedding(rows, width, rank=rank).to(session.device)
        picked = draw(rows, indices, 0).to(session.device)
        check_table(layer, picked[:_CHECKED])
        grad = torch.randn(indices, width, device=session.device)
        runs = {_TRAINED: table_step(layer, picked, grad, fused=True)}
        timings = session.time(f"{axis} {at}", runs, _TRAINED)
        ms = [1e3 * seconds for seconds in sorted(timings.seconds[_TRAINED])]
        middle = 1e3 * timings.median(_TRAINED)
        spread = f"{milliseconds(ms[0])} – {milliseconds(ms[-1])}"
        distinct = picked.unique().numel()
        return at, count(layer), distinct, middle, spread, 1e3 * middle / indices

    def measured() -> Iterator[tuple[Any, ...]]:
        for at in points:
            yield row(at, rows, at) if axis == "indices" else row(at, at, indices)

    fixed = f"{rows} x {width}" if axis == "indices" else f"width {width}, {indices} indices"
    columns = {
        axis: ",", "parameters": ",", "distinct": ",", "ms": "ms", "min – max": ">",
        "µs an index": ".3f",
    }  # fmt: skip
    title = f"embedding {fixed}, uniform, lookup + backward + step, by {axis}"
    session.table(title, columns, measured())
