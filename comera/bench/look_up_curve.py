"""Time of a look-up in a tensor-train table against the batch, or the rows of the table."""

from collections.abc import Sequence
from typing import Literal

import torch
from rich.table import Table

from comera.bench.embedding import TRAINED, draw, train_step
from comera.bench.numerics import compare_table
from comera.bench.session import Session
from comera.bench.timing import milliseconds
from comera.nn.embedding import TTEmbedding

Axis = Literal["indices", "rows"]

POINTS: dict[Axis, list[int]] = {
    "indices": [256, 1024, 4096, 16384, 65536, 262144],
    "rows": [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000],
}


def look_up_curve(
    session: Session,
    axis: Axis,
    points: Sequence[int],
    rows: int,
    width: int,
    indices: int,
    rank: int | Sequence[int],
) -> None:
    """Look-up, backward and step at every point; on Ctrl-C those that are there are shown.

    Indices are drawn evenly: skewed ones repeat themselves more, the larger the batch.
    """
    fixed = f"{rows} x {width}" if axis == "indices" else f"width {width}, {indices} indices"
    title = f"embedding {fixed}, uniform, look-up + backward + step, by {axis}"
    table = Table()
    for heading in (axis, "parameters", "distinct", "ms", "min – max", "µs an index"):
        table.add_column(heading, justify="right")
    done = []
    try:
        for at in points:
            rows, indices = (rows, at) if axis == "indices" else (at, indices)
            torch.manual_seed(0)
            layer = TTEmbedding(rows, width, rank=rank).to(session.device)
            picked = draw(rows, indices, 0).to(session.device)
            compare_table(layer, picked[:_CHECKED]).verdict()
            grad = torch.randn(indices, width, device=session.device)
            runs = {TRAINED: train_step(layer, picked, grad, fused=True)}
            timings = session.time(f"{axis} {at}", runs, TRAINED)
            seconds, spread = timings.median(TRAINED), sorted(timings.seconds[TRAINED])
            entries = sum(param.numel() for param in layer.parameters())
            distinct = picked.unique().numel()
            table.add_row(
                f"{at:,}",
                f"{entries:,}",
                f"{distinct:,}",
                milliseconds(1e3 * seconds),
                f"{milliseconds(1e3 * spread[0])} – {milliseconds(1e3 * spread[-1])}",
                f"{1e6 * seconds / indices:.3f}",
            )
            done.append({"at": at, "distinct": distinct, **timings.as_dict()})
    finally:
        if done:
            session.show_table(title, table)
            session.results.append({"title": title, "axis": axis, "points": done})


_CHECKED = 4096
"""Indices of which rows and gradients are compared with the cores', core by core."""
