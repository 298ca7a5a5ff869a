"""Time of a linear layer against its tokens, rank or width, and what the planner said before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table

from comera.bench.linear import forward_backward, make_input, make_layers
from comera.bench.numerics import compare_linear
from comera.bench.session import Session
from comera.bench.timing import Timings, milliseconds
from comera.ops.machine import machine_of
from comera.planning.planner import plan_linear

Axis = Literal["tokens", "rank", "width"]

DEFAULT_POINTS: dict[Axis, list[int]] = {
    "tokens": [1, 4, 16, 64, 256, 1024, 4096, 16384],
    "rank": [4, 8, 16, 32, 64, 128, 256, 512],
    "width": [256, 512, 1024, 2048, 4096, 8192],
}


@dataclass(frozen=True)
class Point:
    """One place on a curve.

    Attributes:
        at: Where on the axis.
        timings: Of ``"dense"`` and ``"comera"``.
        predicted: Dense over comera as the planner has it.
    """

    at: int
    timings: Timings
    predicted: float

    @property
    def winner(self) -> str:
        """The faster one, or ``"even"`` if the middle half of the rounds does not agree."""
        low, high = self.timings.quartiles("comera")
        if low <= 1 <= high:
            return "even"
        return "comera" if low > 1 else "dense"

    @property
    def named(self) -> str:
        """Whom the planner saw ahead."""
        return "comera" if self.predicted > 1 else "dense"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        return {
            "at": self.at,
            **self.timings.as_dict(),
            "winner": self.winner,
            "predicted_ratio": self.predicted,
            "predicted_winner": self.named,
        }


def curve(
    session: Session,
    axis: Axis,
    points: Sequence[int],
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
) -> tuple[str, list[Point]]:
    """Measure every point; on Ctrl-C those that are there are shown before it goes on its way.

    Returns:
        The curve in words, and its points.
    """
    title = _title(axis, shape, rank, tokens)
    done: list[Point] = []
    try:
        for at in points:
            shape = (at, at) if axis == "width" else shape
            rank = at if axis == "rank" else rank
            tokens = at if axis == "tokens" else tokens
            done.append(_measure(session, axis, at, shape, rank, tokens, dtype))
    finally:
        if done:
            _show(session, title, axis, done)
    return title, done


def _measure(
    session: Session,
    axis: Axis,
    at: int,
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
) -> Point:
    layer, dense = make_layers(session, shape, rank, dtype)
    x = make_input(session, tokens, shape[0], dtype)
    compare_linear(layer, x).verdict()
    plan = plan_linear(
        layer.shape,
        tokens,
        dtype=str(dtype).removeprefix("torch."),
        machine=machine_of(session.device),
        in_features=layer.in_features,
        out_features=layer.out_features,
    )
    runs = {"dense": forward_backward(dense, x), "comera": forward_backward(layer, x)}
    return Point(at, session.time(f"{axis} {at}", runs, "dense"), 1 / plan.time_ratio)


def hits(points: Sequence[Point]) -> str:
    """How often the planner named the winner."""
    decided = [point for point in points if point.winner != "even"]
    right = sum(point.winner == point.named for point in decided)
    even = len(points) - len(decided)
    aside = f" ({even} even left out)" if even else ""
    return f"the planner named the winner at {right} of {len(decided)} points{aside}"


def _show(session: Session, title: str, axis: Axis, points: Sequence[Point]) -> None:
    table = Table()
    for heading in (axis, "dense ms", "comera ms", "dense / comera", "quartiles", "winner"):
        table.add_column(heading, justify="right")
    table.add_column("predicted", justify="right")
    table.add_column("named it")
    for point in points:
        low, high = point.timings.quartiles("comera")
        right = "–" if point.winner == "even" else "yes" if point.winner == point.named else "no"
        table.add_row(
            f"{point.at:,}",
            milliseconds(1e3 * point.timings.median("dense")),
            milliseconds(1e3 * point.timings.median("comera")),
            f"{point.timings.ratio('comera'):.2f}",
            f"{low:.2f} – {high:.2f}",
            point.winner,
            f"{point.predicted:.2f}",
            right,
        )
    session.show_table(title, table)
    session.note(f"all {len(points)} layers agree with dense in output and gradients")
    session.note(hits(points))
    session.results.append(
        {"title": title, "axis": axis, "points": [point.as_dict() for point in points]}
    )


def _title(axis: Axis, shape: tuple[int, int], rank: int | Sequence[int], tokens: int) -> str:
    ranks = str(rank) if isinstance(rank, int) else " ".join(map(str, rank))
    fixed = {
        "width": f"linear, ranks up to {ranks}, {tokens} tokens",
        "rank": f"linear {shape[0]} -> {shape[1]}, {tokens} tokens",
        "tokens": f"linear {shape[0]} -> {shape[1]}, ranks {ranks}",
    }
    return f"{fixed[axis]}, forward + backward, by {axis}"
