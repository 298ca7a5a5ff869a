"""Draw models by what they cost and how good they are, still or to zoom into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from comera.extras import needed_by
from comera.planning import printing


@dataclass(frozen=True)
class Dot:
    """A model in a panel; ``hover`` are lines to show under the pointer, in HTML."""

    x: float
    y: float
    name: str = ""  # shown where there is room
    hover: tuple[str, ...] = ()
    error: float | None = None  # half the length of the bar through it


@dataclass(frozen=True)
class Panel:
    """One cost: dots by kind, and lines through the best of them."""

    x_label: str
    y_label: str
    dots: Mapping[str, Sequence[Dot]]
    lines: Mapping[str, Sequence[tuple[float, float]]]
    unit: str = ""  # of the cost, such as s; B is written in powers of 1,024
    better: str = ""  # which end of the quality is better, in words
    log: bool = False  # the axis of the cost
    log_y: bool = False  # that of the quality
    steps: bool = False  # lines fall where a better dot is, and are flat in between


COLORS = ("#2a6f97", "#d1495b", "#66a182", "#edae49", "#8d6a9f", "#5c677d", "#bc6c25")
_LINE = "#8a9299"
_SIDES = {"dense": "#b4530e", "compressed": "#14608f"}  # as on the pages of runs


def _colors(panel: Panel) -> dict[str, str]:
    kinds = zip(panel.dots, COLORS * len(panel.dots), strict=False)
    return {kind: _SIDES.get(kind, color) for kind, color in kinds}


def draw(panels: Sequence[Panel], library: Literal["matplotlib", "plotly"] = "matplotlib") -> Any:
    """Return a figure of the library; raise ``ValueError`` if it is neither of the two.

    Panels stand side by side in a still picture; in plotly a menu chooses one.
    """
    if library not in ("matplotlib", "plotly"):
        raise ValueError(f"library={library!r} must be 'matplotlib' or 'plotly'")
    return _in_plotly(panels) if library == "plotly" else _in_matplotlib(panels)


def _in_matplotlib(panels: Sequence[Panel]) -> Any:
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, _ = printing.empty_figure(columns, (4.4 if rows == 1 else 3.4 * rows))
    figure.clear()
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    grid = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):
        colors = _colors(panel)
        for kind, dots in panel.dots.items():
            x, y = [dot.x for dot in dots], [dot.y for dot in dots]
            axes.plot(x, y, "o", ms=4, c=colors[kind], label=kind)
            if any(bars := [dot.error or 0.0 for dot in dots]):
                axes.errorbar(x, y, bars, fmt="none", c=colors[kind], lw=1)
        for name, line in panel.lines.items():
            how: Any = {"drawstyle": "steps-post"} if panel.steps else {}
            color = colors.get(name, _LINE)
            label = None if name in colors else name
            axes.plot(*zip(*line, strict=True), c=color, lw=0.8, zorder=0, label=label, **how)
        axes.margins(0.1)
        if panel.log:
            axes.set_xscale("log")
            axes.minorticks_off()
            _few_ticks(axes, panel)
        else:
            axes.locator_params("x", nbins=6)
        axes.set(xlabel=panel.x_label, ylabel=_with_better(panel))
        if panel.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _, u=panel.unit: shown(x, u)))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.draw_without_rendering()  # puts the axes where they stay
    for axes, panel in zip(figure.axes, panels, strict=False):
        _write_names(axes, panel)
    return figure


def _with_better(panel: Panel) -> str:
    return f"{panel.y_label} ({panel.better})" if panel.better else panel.y_label


def _few_ticks(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    low, high = axes.get_xlim()
    base = 2 if panel.unit == "B" else 10
    subs = (1,) if base == 2 or high > 100 * low else (1, 3) if high > 10 * low else (1, 2, 5)
    axes.xaxis.set_major_locator(LogLocator(base=base, subs=subs, numticks=6))


def shown(cost: float | None, unit: str) -> str:
    """Return a cost with its unit: ``1.2M``, ``3.4 MiB``, ``5.6 ms``; of None, nothing."""
    if cost is None:
        return ""
    if unit == "B":
        return printing.show_bytes(cost)
    return printing.show_seconds(cost) if unit == "s" else printing.show_count(cost)


def _write_names(axes: Any, panel: Panel) -> None:
    """Write names beside dots as long as none covers another, the given model's first."""
    on_lines = {point for line in panel.lines.values() for point in line}
    every = [dot for dots in panel.dots.values() for dot in dots if dot.name]
    taken: list[Any] = []
    for dot in sorted(every, key=lambda dot: (dot.name != "given", (dot.x, dot.y) not in on_lines)):
        text = axes.annotate(
            dot.name, (dot.x, dot.y), (5, 5), textcoords="offset points", fontsize="x-small",
            in_layout=False,
        )  # fmt: skip
        if text.get_window_extent().x1 > axes.bbox.x1:  # then to the left of its dot
            text.set(position=(-5, 5), horizontalalignment="right")
        box = text.get_window_extent()
        if box.count_overlaps(taken):  # no room for a name
            text.remove()
        else:
            taken.append(box)


def _in_plotly(panels: Sequence[Panel]) -> Any:
    with needed_by("a picture to zoom into"):
        import plotly.graph_objects as plotly
    figure, shares = plotly.Figure(), list[int]()
    for number, panel in enumerate(panels):
        before = len(figure.data)
        colors = _colors(panel)
        for name, line in panel.lines.items():
            x, y = zip(*line, strict=True)
            figure.add_scatter(
                x=x, y=y, mode="lines", name=name, hoverinfo="skip", visible=not number,
                showlegend=name not in colors,
                line={
                    "color": colors.get(name, _LINE), "width": 1,
                    "shape": "hv" if panel.steps else "linear",
                },
            )  # fmt: skip
        for kind, dots in panel.dots.items():
            figure.add_scatter(
                x=[dot.x for dot in dots], y=[dot.y for dot in dots], mode="markers", name=kind,
                text=["<br>".join(dot.hover) for dot in dots], visible=not number,
                hovertemplate="%{text}<extra></extra>", marker={"color": colors[kind]},
                error_y={"type": "data", "array": [dot.error or 0.0 for dot in dots]},
            )  # fmt: skip
        shares.append(len(figure.data) - before)
    axis = {"type": "log" if panels[0].log else "linear"}
    figure.update_layout(
        xaxis={"title": panels[0].x_label, **axis},
        yaxis={"title": _with_better(panels[0]), "type": "log" if panels[0].log_y else "linear"},
        template="plotly_white", width=760, height=460,
    )  # fmt: skip
    if len(panels) > 1:
        owners = [number for number, share in enumerate(shares) for _ in range(share)]
        buttons = [
            {
                "label": panel.x_label, "method": "update",
                "args": [
                    {"visible": [owner == number for owner in owners]},
                    {"xaxis.title.text": panel.x_label},
                ],
            }
            for number, panel in enumerate(panels)
        ]  # fmt: skip
        figure.update_layout(updatemenus=[{"buttons": buttons, "x": 1.0, "y": 1.15}])
    return figure
