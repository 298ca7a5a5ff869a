"""A curve as a picture, drawn without a display and without pyplot's global figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comera.bench.curve import Point
from comera.files import replacing

KINDS = ("png", "svg", "pdf")
_LOOK: dict[str, dict[str, Any]] = {
    "dense": {"color": "#c4651a", "ls": (0, (5, 1.5)), "marker": "o"},
    "comera": {"color": "#14608f", "marker": "o"},
}


def check_plot(path: Path) -> None:
    """Before anything is measured.

    Raises:
        ValueError: If the name does not end in a kind of picture.
    """
    if path.suffix.removeprefix(".") not in KINDS:
        raise ValueError(f"plot={str(path)!r} must end in .{', .'.join(KINDS)}")


def plot_curve(points: Sequence[Point], axis: str, title: str, path: Path) -> None:
    """Milliseconds above, dense over comera below, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
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
