"""Time layers over tokens, ranks and widths, and show where dense or tensor train wins."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from benchmarks.embedding import TRAINED, draw, train_step
from benchmarks.linear import forward_backward, make_input, make_layers
from benchmarks.numerics import compare_linear, compare_table
from benchmarks.session import Session
from benchmarks.timing import Timings, milliseconds
from comera.calibrate.in_turn import in_turn
from comera.files import replacing
from comera.nn.embedding import TTEmbedding
from comera.ops.context import static_shapes
from comera.planning.planner import plan_linear
from comera.planning.printing import empty_figure

Axis = Literal["tokens", "rank", "width"]
Mode = Literal["eager", "captured"]

DEFAULT_POINTS: dict[Axis, list[int]] = {
    "tokens": [1, 4, 16, 64, 256, 1024, 4096, 16384],
    "rank": [4, 8, 16, 32, 64, 128, 256, 512],
    "width": [256, 512, 1024, 2048, 4096, 8192],
}


@dataclass(frozen=True)
class Point:
    """One place on a curve.

    Attributes:
        at: Number on the axis.
        timings: Timings of ``"dense"`` and ``"comera"``.
        predicted: Dense over comera as the planner has it.
        mode: ``"eager"``, or ``"captured"`` in a CUDA graph.
    """

    at: int
    timings: Timings
    predicted: float
    mode: Mode = "eager"

    @property
    def winner(self) -> str:
        """Return the faster one, or ``"even"`` if the middle half of the rounds does not agree."""
        low, high = self.timings.quartiles("comera")
        if low <= 1 <= high:
            return "even"
        return "comera" if low > 1 else "dense"

    @property
    def named(self) -> str:
        """Return whom the planner saw ahead."""
        return "comera" if self.predicted > 1 else "dense"

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for a JSON file."""
        return {
            "at": self.at,
            "mode": self.mode,
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

    On a GPU each is measured as the host starts it and in a CUDA graph.

    Returns:
        The curve in words, and its points; on a GPU those in graphs.
    """
    title = _title(axis, shape, rank, tokens)
    done: list[Point] = []
    try:
        for at in points:
            shape = (at, at) if axis == "width" else shape
            rank = at if axis == "rank" else rank
            tokens = at if axis == "tokens" else tokens
            done += _measure(session, axis, at, shape, rank, tokens, dtype)
    finally:
        if done:
            _show(session, title, axis, done)
    return title, [point for point in done if point.mode == _modes(session.device)[-1]]


def _modes(device: torch.device) -> tuple[Mode, ...]:
    return ("eager", "captured") if device.type == "cuda" else ("eager",)


def _measure(
    session: Session,
    axis: Axis,
    at: int,
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
) -> list[Point]:
    layer, dense = make_layers(session, shape, rank, dtype)
    x = make_input(session, tokens, shape[0], dtype)
    compare_linear(layer, x).verdict()
    plan = plan_linear(layer.at(tokens), **layer.planner_setting())
    points = []
    for mode in _modes(session.device):
        with static_shapes() if mode == "captured" else contextlib.nullcontext():
            runs = {"dense": forward_backward(dense, x), "comera": forward_backward(layer, x)}
            if mode == "captured":
                runs = {name: in_turn([run], session.device) for name, run in runs.items()}
            timings = session.time(f"{axis} {at}, {mode}", runs, "dense")
        here = plan.eager if mode == "eager" and plan.eager is not None else plan
        points.append(Point(at, timings, 1 / here.time_ratio, mode))
    return points


def hits(points: Sequence[Point]) -> str:
    """Say how often the planner named the winner."""
    decided = [point for point in points if point.winner != "even"]
    right = sum(point.winner == point.named for point in decided)
    even = len(points) - len(decided)
    aside = f" ({even} even left out)" if even else ""
    return f"the planner named the winner at {right} of {len(decided)} points{aside}"


def _show(session: Session, title: str, axis: Axis, points: Sequence[Point]) -> None:
    table = Table()
    for heading in (axis, "mode", "dense ms", "comera ms", "dense / comera", "quartiles", "winner"):
        table.add_column(heading, justify="right")
    table.add_column("predicted", justify="right")
    table.add_column("named it")
    for point in points:
        low, high = point.timings.quartiles("comera")
        right = "–" if point.winner == "even" else "yes" if point.winner == point.named else "no"
        table.add_row(
            f"{point.at:,}",
            point.mode,
            milliseconds(1e3 * point.timings.median("dense")),
            milliseconds(1e3 * point.timings.median("comera")),
            f"{point.timings.ratio('comera'):.2f}",
            f"{low:.2f} – {high:.2f}",
            point.winner,
            f"{point.predicted:.2f}",
            right,
        )
    session.show_table(title, table)
    layers = len({point.at for point in points})
    session.note(f"all {layers} layers agree with dense in output and gradients")
    for mode in dict.fromkeys(point.mode for point in points):
        where = f"{mode}: " if len(_modes(session.device)) > 1 else ""
        session.note(where + hits([point for point in points if point.mode == mode]))
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


LookupAxis = Literal["indices", "rows"]

POINTS: dict[LookupAxis, list[int]] = {
    "indices": [256, 1024, 4096, 16384, 65536, 262144],
    "rows": [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000],
}


def lookup_curve(
    session: Session,
    axis: LookupAxis,
    points: Sequence[int],
    rows: int,
    width: int,
    indices: int,
    rank: int | Sequence[int],
) -> None:
    """Time lookup, backward and step at every point; on Ctrl-C those that are there are shown.

    Indices are drawn evenly: skewed ones repeat themselves more, the larger the batch.
    """
    fixed = f"{rows} x {width}" if axis == "indices" else f"width {width}, {indices} indices"
    title = f"embedding {fixed}, uniform, lookup + backward + step, by {axis}"
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


KINDS = ("png", "svg", "pdf")
_LOOK: dict[str, dict[str, Any]] = {
    "dense": {"color": "#c4651a", "ls": (0, (5, 1.5)), "marker": "o"},
    "comera": {"color": "#14608f", "marker": "o"},
}


def check_plot(path: Path) -> None:
    """Check the name of a picture before anything is measured.

    Raises:
        ValueError: If the name does not end in a kind of picture.
    """
    if path.suffix.removeprefix(".") not in KINDS:
        raise ValueError(f"plot={str(path)!r} must end in .{', .'.join(KINDS)}")


def plot_curve(points: Sequence[Point], axis: str, title: str, path: Path) -> None:
    """Draw milliseconds above, dense over comera below, both axes logarithmic."""
    figure, (times, ratios) = empty_figure(heights=(3, 2), size=(7, 6))
    at = [point.at for point in points]
    for name, look in _LOOK.items():
        times.plot(at, [1e3 * p.timings.median(name) for p in points], label=name, **look)
    times.set(xscale="log", yscale="log", ylabel="ms, median")
    times.set_title(title, fontsize=9, parse_math=False)
    times.legend(frameon=False)
    bounds = [point.timings.quartiles("comera") for point in points]
    ratios.fill_between(at, *zip(*bounds, strict=True), color=_LOOK["comera"]["color"], alpha=0.2)
    measured = [point.timings.ratio("comera") for point in points]
    ratios.plot(at, measured, label="measured", **_LOOK["comera"])
    ratios.plot(at, [p.predicted for p in points], "k:", lw=1, label="predicted")
    ratios.axhline(1, color="#8a9299", lw=0.8)
    ratios.set(xscale="log", yscale="log", xlabel=axis, ylabel="dense / comera")
    ratios.legend(frameon=False)
    for axes in (times, ratios):
        axes.grid(color="#dfe4e8", lw=0.6)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=150)
