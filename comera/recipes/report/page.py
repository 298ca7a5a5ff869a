"""Write HTML pages from the templates beside this file; draw charts; write figures in words."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera.extras import needed_by
from comera.files import write_text
from comera.planning.printing import show_count
from comera.report.frontier import COSTS, Front
from comera.report.pictures import Panel


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table in Markdown; columns after the first ``text_columns`` hold numbers."""
    line = [*["---"] * text_columns, *["---:"] * (len(header) - text_columns)]
    cells = [[cell.replace("|", r"\|") for cell in row] for row in (header, line, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def write_page(path: Path, template: str, content: Any) -> Path:
    """Write a page from a template, in which ``content`` is ``report``; return the path."""
    with needed_by("a report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    write_text(path, environment.get_template(template).render(report=content))
    return path


SIDE = 1000  # width and height of a picture, which the page stretches


@dataclass(frozen=True)
class Axis:
    """An axis of a chart: a range of values with a label; ``log`` needs values above 0."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> int:
        """Return the position of a value on the axis: 0 at ``low``, ``SIDE`` at ``high``."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(SIDE * (at - low) / (high - low))

    @property
    def ticks(self) -> list[tuple[int, str]]:
        """Return positions of round values, each with the value as text; no two texts are equal."""
        with needed_by("a report"):
            from matplotlib.ticker import LogLocator, MaxNLocator
        decades = math.log10(self.high / self.low) if self.log else 0
        steps = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
        plain = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])
        locator = LogLocator(subs=steps) if decades > 0.7 else plain
        inside = [v for v in locator.tick_values(self.low, self.high) if self.low <= v <= self.high]
        for digits in range(3, 16):  # more are from rounding
            texts = [show_count(value, digits) for value in inside]
            if len(set(texts)) == len(texts):
                break
        return [(self.place(value), text) for value, text in zip(inside, texts, strict=True)]


@dataclass(frozen=True)
class Point:
    """A point of a line in a chart."""

    x: float
    y: float
    text: str  # shown when it is pointed at
    name: str = ""  # always shown
    error: float = 0.0  # half the length of the bar through it


@dataclass(frozen=True)
class Line:
    """A line, or a set of dots, in a chart."""

    name: str
    look: str  # class of the style sheet
    points: Sequence[Point]
    joined: bool = True  # by a line
    dots: bool = False  # draw each point; else only the one that is pointed at


@dataclass(frozen=True)
class Band:
    """A shaded range of the horizontal axis of a chart."""

    name: str
    look: str
    start: float
    end: float


@dataclass(frozen=True)
class Chart:
    """A chart of lines over common axes; later lines are drawn above earlier ones."""

    title: str
    caption: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    bands: Sequence[Band] = ()


def axis_around(
    label: str, values: Iterable[float], log: bool = False, zero: bool = False, room: float = 0.05
) -> Axis:
    """Return an axis for all ``values``, at least one, all finite.

    ``log`` takes effect if all values are above 0. ``zero`` starts the axis at 0 if no value is
    below. ``room`` is the share of the range left free at either end.
    """
    every = list(values)
    low, high = min(every), max(every)
    if log and low > 0:
        wider = (high / low) ** room if high > low else 2.0
        return Axis(label, low / wider, high * wider, log=True)
    wider = room * (high - low) or abs(high) or 1.0
    return Axis(label, 0.0 if zero and low >= 0 else low - wider, high + wider)


def gather_front(title: str, found: Front) -> dict[str, Any]:
    """Return what the pages of a front and of a sweep begin with."""
    charts = [chart_of(found.panel(cost)) for cost in COSTS if found.pareto(cost)]
    return {"title": title, "answer": found.answer(), "charts": charts}


def chart_of(panel: Panel) -> Chart:
    """Return a panel of a front as a chart of a page."""
    lines: list[Line] = []
    for side, dots in panel.dots.items():
        ends = panel.lines[side]
        steps = [Point(*ends[0], "")]
        for right, best in ends[1:]:  # flat up to where a better one is
            steps += [Point(right, steps[-1].y, ""), Point(right, best, "")]
        points = [
            Point(
                dot.x, dot.y, re.sub(r"</?b>", "", "\n".join(dot.hover)),
                dot.name if (dot.x, dot.y) in ends or dot.name == "given" else "",
                dot.error or 0.0,
            )
            for dot in sorted(dots, key=lambda dot: dot.x)
        ]  # fmt: skip
        lines.append(Line(f"best {side} up to a cost", side, steps))
        lines.append(Line(side, side, points, joined=False, dots=True))
    every = [point for line in lines for point in line.points]
    unit = {"B": ", in bytes", "s": ", in seconds"}.get(panel.unit, "")
    caption = f"Further left costs less{unit}; {panel.better}."
    if any(point.error for point in every):
        caption += " Bars are standard errors."
    heights = [end for point in every for end in (point.y - point.error, point.y + point.error)]
    x = axis_around(panel.x_label, [point.x for point in every], log=True, room=0.1)
    y = axis_around(panel.y_label, heights, log=panel.log_y, room=0.1)
    return Chart(f"{panel.y_label.capitalize()} over {panel.x_label}", caption, x, y, lines)


_UNITS = {"accuracy": (100, 2, " %", " points"), "perplexity": (1, 2, "", "")}


def show_metric(metric: str, value: float) -> str:
    """Return a metric as text, such as an accuracy in percent."""
    scale, digits, unit, _ = _UNITS.get(metric, (1, 4, "", ""))
    return f"{scale * value:,.{digits}f}{unit}"


def show_change(metric: str, value: float, error: float | None = None, sign: str = "+") -> str:
    """Return a difference of a metric as text, with sign and, if known, standard error."""
    scale, digits, _, unit = _UNITS.get(metric, (1, 4, "", ""))
    spread = "" if error is None else f" ± {scale * error:,.{digits}f}"
    return f"{scale * value:{sign},.{digits}f}{spread}{unit}"


def show_difference(metric: str, value: float, other: float) -> str:
    """Return how a metric differs from that of another model: ``11 % higher than``.

    Perplexities are compared by ratio, accuracies in percentage points, others as they are.
    """
    if value == other:
        return "the same as"
    size = show_change(metric, abs(value - other), sign="")
    if metric == "perplexity":
        percent = 100 * abs(value / other - 1)
        size = f"{percent:,.0f} %" if percent >= 10 else f"{percent:.1f} %"
    return f"{size} {'higher' if value > other else 'lower'} than"


def show_times(value: float, other: float, more: str, less: str) -> str:
    """Return a ratio of values in words, ``more`` or ``less``, such as ``2.10 times faster``."""
    ratio, word = (value / other, more) if value >= other else (other / value, less)
    return f"{ratio:,.2f} times {word}" if ratio < 10 else f"{ratio:,.1f} times {word}"
