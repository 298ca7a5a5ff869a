"""Plots of a run as SVG text, drawn without a display and without pyplot's global figures.

matplotlib is imported by the functions that draw: it takes longer to import than everything else
here, and whoever only trains does not need it.
"""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from comera.extras import needed_by
from comera.recipes.report.history import History, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 9.0
"""Width of every figure in inches; the page scales it."""

_COLOURS = {"dense": "#c4651a"}
_MAIN_COLOUR = "#14608f"
_STAGES = {
    "early": ("early stage", "#ffffff"),
    "late": ("late stage", "#fbeed2"),
    "done": ("ranks truncated", "#e6ecef"),
}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a9299",
    "axes.labelcolor": "#33393e",
    "text.color": "#33393e",
    "xtick.color": "#5d666d",
    "ytick.color": "#5d666d",
    "axes.axisbelow": True,
    "legend.frameon": False,
    # Letters stay letters: they take the font of the page, can be searched and take little room.
    "svg.fonttype": "none",
    # The names matplotlib gives to what it draws are the same each time.
    "svg.hashsalt": "comera",
}
_MOST_COLUMNS = 400
_ROW_INCHES = 0.046
_LABEL_INCHES = 0.15


def loss_svg(models: Sequence[History]) -> str | None:
    """Draw training and evaluation loss of each model over the steps; None if none was logged."""

    def draw(figure: "Figure") -> None:
        axes = _axes(figure, "loss", models)
        for model in models:
            _curve(axes, model, "loss", "training")
            _points(axes, model, "loss")
        _legend(figure, axes)

    return _svg("loss", 3.6, draw) if _any(models, "loss", "eval/loss") else None


def figure_svg(models: Sequence[History], key: str) -> str | None:
    """Draw one figure of the evaluations, such as the accuracy, over the steps."""

    def draw(figure: "Figure") -> None:
        axes = _axes(figure, key, models)
        for model in models:
            _points(axes, model, key, join=True)
        _legend(figure, axes)

    return _svg(f"eval-{key}", 2.6, draw) if _any(models, f"eval/{key}") else None


def rate_svg(models: Sequence[History]) -> str | None:
    """Draw the learning rate of each model over the steps."""

    def draw(figure: "Figure") -> None:
        axes = _axes(figure, "learning rate", models)
        axes.yaxis.set_major_formatter("{x:g}")
        for model in models:
            steps, values = model.series("lr")
            axes.plot(steps, values, label=model.name, **_look(model, steps))
        axes.set_ylim(bottom=0)
        _legend(figure, axes)

    return _svg("rate", 2.3, draw) if _any(models, "lr") else None


def size_svg(model: History) -> str | None:
    """Draw entries in the cores over the steps, the target as a line, the stages shaded."""

    def draw(figure: "Figure") -> None:
        axes = _axes(figure, "entries in the cores", [model])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        for stage, start, end in model.stages:
            label, colour = _STAGES.get(stage, (stage, "#ffffff"))
            if end > start and colour != "#ffffff":
                axes.axvspan(start, end, color=colour, lw=0, zorder=-1, label=label)
        steps, sizes = model.series("size")
        axes.plot(steps, sizes, label="exact", **_look(model, steps))
        steps, sizes = model.series("relaxed_size")
        axes.plot(steps, sizes, color="#6a4c93", lw=1.3, ls=(0, (4, 2)), label="relaxed")
        if model.target_size is not None:
            axes.axhline(model.target_size, color="#a3122f", lw=1.2, ls=":", label="target")
        axes.set_ylim(bottom=0)
        _legend(figure, axes)

    return _svg("size", 3.4, draw) if _any([model], "size") else None


def ranks_svg(model: History) -> str | None:
    """Draw live rank over start rank: one row a bond, by layer, one column a logged step."""
    edges, rows, layers = rank_shares(model)
    if not rows.size:
        return None
    row = max(_ROW_INCHES, _LABEL_INCHES / min(bonds for _, bonds in layers))

    def draw(figure: "Figure") -> None:
        axes = _axes(figure, "", [model])
        # One picture, not a shape for each cell: there are up to a hundred thousand.
        cells = axes.pcolormesh(
            edges, np.arange(len(rows) + 1), rows, cmap="Blues", vmin=0, vmax=1, rasterized=True
        )
        bounds = np.cumsum([0] + [bonds for _, bonds in layers])
        axes.set_yticks(
            (bounds[:-1] + bounds[1:]) / 2,
            [name or "(model)" for name, _ in layers],
            parse_math=False,
            fontsize=7.5,
        )
        axes.hlines(bounds[1:-1], edges[0], edges[-1], color="white", lw=1)
        axes.invert_yaxis()
        axes.grid(False)
        axes.tick_params(axis="y", length=0)
        bar = figure.colorbar(
            cells, ax=axes, location="top", aspect=50, shrink=0.6, pad=0.01, format="{x:.0%}"
        )
        bar.set_label("live ranks as a share of those at the start")
        bar.outline.set_visible(False)  # type: ignore[operator]

    return _svg("ranks", 1.2 + row * len(rows), draw)


def rank_shares(model: History) -> tuple[np.ndarray, np.ndarray, list[tuple[str, int]]]:
    """Return live rank over start rank of every bond at every logged step.

    Of a long log, evenly spaced lines are taken.

    Returns:
        Edges of the columns in steps, each column reaching back to the one before it; the shares,
        one row a bond, one column a logged step; names of the layers, with their bonds counted.
    """
    logged, start = model.live_ranks, model.start_ranks
    layers = [(name, len(ranks)) for name, ranks in start.items() if ranks]
    if not logged or not layers:
        return np.zeros(1), np.zeros((0, 0)), []
    every = np.array(list(logged))
    chosen = np.linspace(0, len(every) - 1, min(len(every), _MOST_COLUMNS)).round().astype(int)
    steps = every[chosen].tolist()
    rows = [
        [logged[step].get(name, ranks)[bond] / max(1, ranks[bond]) for step in steps]
        for name, ranks in start.items()
        for bond in range(len(ranks))
    ]
    return np.array([0, *steps]), np.array(rows), layers


def _axes(figure: "Figure", label: str, models: Sequence[History]) -> "Axes":
    """Add axes over all steps from 0, so that plots of a page can be read one below the other."""
    axes = figure.add_subplot()
    axes.set_xlim(0, max(1, *(model.last_step for model in models)))
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label, parse_math=False)
    axes.grid(axis="y", color="#dfe4e8", lw=0.7)
    return axes


def _curve(axes: "Axes", model: History, key: str, what: str) -> None:
    """Draw a line; many points are drawn faintly, under their running mean."""
    steps, values = model.series(key)
    if not steps:
        return
    look, window = _look(model, steps), len(steps) // 50
    if window > 3:
        axes.plot(steps, values, color=look["color"], lw=0.6, alpha=0.35)
        steps, values = _running_mean((steps, values), window)
    axes.plot(steps, values, label=f"{model.name}, {what}", **look)


def _points(axes: "Axes", model: History, key: str, join: bool = False) -> None:
    """Draw evaluations as rings; a lone one keeps its colour where it lies on a curve."""
    steps, values = model.series(f"eval/{key}")
    if steps:
        line = _look(model, steps)["ls"] if join else "none"
        axes.plot(
            steps, values, color=_colour(model), ls=line, lw=1.3, marker="o", ms=5.5, mfc="white",
            mew=1.5, zorder=3, clip_on=False, label=f"{model.name}, evaluation",
        )  # fmt: skip


def _running_mean(series: Series, window: int) -> Series:
    """Return means of ``window`` values, half before and half after each step."""
    steps, values = series
    mean = np.convolve(values, np.full(window, 1 / window), mode="valid")
    first = window // 2
    return steps[first : first + len(mean)], mean.tolist()


def _look(model: History, steps: list[int]) -> dict[str, Any]:
    """Return how a model's lines look; the twin's are dashed, for print and colour-blind."""
    return {
        "color": _colour(model),
        "ls": (0, (5, 1.5)) if model.name in _COLOURS else "-",
        "lw": 1.6,
        "marker": "o" if len(steps) == 1 else None,
    }


def _colour(model: History) -> str:
    return _COLOURS.get(model.name, _MAIN_COLOUR)


def _legend(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)))


def _any(models: Sequence[History], *keys: str) -> bool:
    return any(model.series(key)[0] for model in models for key in keys)


def _svg(prefix: str, height: float, draw: Any) -> str:
    """Return what ``draw`` puts on a figure of ``height`` inches, as one ``<svg>`` element.

    ``prefix`` goes before every identifier inside, so that several can stand on one page.
    """
    with needed_by("a plot"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

    out = io.StringIO()
    with matplotlib.rc_context():
        # A notebook may have set a style of its own, which would show on this page.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing, transparent=True, dpi=200)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", text, count=2)
    prefix = re.sub(r"\W", "-", prefix)
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
