"""Pages from the templates beside this file, with all text escaped, and the charts in them.

Charts are plain data, which the template ``parts.html`` draws.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera.extras import needed_by
from comera.files import replacing
from comera.planning.printing import show_count


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        header: Names of the columns.
        rows: What is in them; the first cell names the row.
        text_columns: How many columns, from the left, hold text; the others hold numbers.
        total: A last row set apart, or none.
    """

    header: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    total: list[str] | None = None


def write_page(path: Path, template: str, content: Any) -> None:
    """Fill a template and write the file, whole or not at all.

    Args:
        path: The file to write; it needs nothing beside it and no network.
        template: Name of a file in the folder ``templates``.
        content: What the template knows as ``report``.
    """
    with needed_by("a report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(report=content)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


SIDE = 1000
"""Width and height of what is drawn in; the page stretches it to the room there is."""

_MOST_DIGITS = 15
"""Digits of a float that are not from rounding."""


@dataclass(frozen=True)
class Axis:
    """A range of values and its name; ``log`` needs values above 0."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> int:
        """Return where a value lies, from 0 at ``low`` to ``SIDE`` at ``high``."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(SIDE * (at - low) / (high - low))

    @property
    def ticks(self) -> list[tuple[int, str]]:
        """Return places of round values, and those values as text, no two of them alike."""
        with needed_by("a report"):
            from matplotlib.ticker import LogLocator, MaxNLocator

        decades = math.log10(self.high / self.low) if self.log else 0
        steps = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
        plain = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])
        locator = LogLocator(subs=steps) if decades > 0.7 else plain
        inside = [v for v in locator.tick_values(self.low, self.high) if self.low <= v <= self.high]
        for digits in range(3, _MOST_DIGITS + 1):
            texts = [show_count(value, digits) for value in inside]
            if len(set(texts)) == len(texts):
                break
        return [(self.place(value), text) for value, text in zip(inside, texts, strict=True)]


@dataclass(frozen=True)
class Point:
    """One value of a line.

    Attributes:
        x: Where it lies along the horizontal axis.
        y: Where it lies along the vertical one.
        text: What is shown when it is pointed at.
        name: What always stands beside it.
        error: Half the length of the bar through it.
    """

    x: float
    y: float
    text: str
    name: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Line:
    """Points that belong together.

    Attributes:
        name: What the legend says.
        look: Class of the style sheet that colours it.
        points: In the order in which they are joined.
        joined: Whether a line goes through the points.
        dots: Whether each point is drawn; else only the one that is pointed at.
    """

    name: str
    look: str
    points: Sequence[Point]
    joined: bool = True
    dots: bool = False


@dataclass(frozen=True)
class Band:
    """A part of the horizontal axis that is shaded."""

    name: str
    look: str
    start: float
    end: float


@dataclass(frozen=True)
class Chart:
    """Lines over common axes.

    Attributes:
        title: Heading, which also stands for the picture where it cannot be seen.
        caption: What one needs to know to read it.
        x: The horizontal axis.
        y: The vertical one.
        lines: Those drawn later lie above.
        bands: Parts of the horizontal axis that are shaded.
    """

    title: str
    caption: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    bands: Sequence[Band] = ()


def axis_around(
    label: str, values: Iterable[float], log: bool = False, zero: bool = False, room: float = 0.05
) -> Axis:
    """Return an axis for all ``values``.

    Args:
        label: Name of the axis.
        values: At least one, all finite.
        log: Whether the axis is logarithmic; it is not where a value is 0 or below.
        zero: Whether it begins at 0, if no value is below.
        room: What is left free at either end, as a share of the range.
    """
    every = list(values)
    low, high = min(every), max(every)
    if log and low > 0:
        wider = (high / low) ** room if high > low else 2.0
        return Axis(label, low / wider, high * wider, log=True)
    wider = room * (high - low) or abs(high) or 1.0
    return Axis(label, 0.0 if zero and low >= 0 else low - wider, high + wider)
