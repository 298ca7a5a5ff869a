"""Reports that print themselves as tables, in a terminal and in a notebook; numbers with units."""

import html
import io
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from comera.extras import needed_by

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def show_count(number: float, digits: int = 3) -> str:
    """Write a count with three digits, or more, and a unit: ``94.4M``."""
    return _in_units(number, 1000, ("", "k", "M", "G", "T"), digits)


def show_bytes(number: float) -> str:
    """Write bytes with three digits and a unit: ``12.1 MiB``."""
    return _in_units(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _in_units(number: float, base: int, units: Sequence[str], digits: int = 3) -> str:
    for unit in units[:-1]:
        if abs(number) < 999.5:
            return f"{number:.{digits}g}{unit}"
        number /= base
    return f"{number:.{digits}g}{units[-1]}"


def show_seconds(number: float) -> str:
    """Write a duration with three digits and a unit: ``1.35 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number / 1e-6:.3g} us"


_LEAST = 80
"""Columns that every terminal is taken to have."""

_WORDS = (12, 24)
"""A column of words gets no narrower than the first, nor than its words up to the second."""

_WORD = re.compile(r"\S+\s*")
_NAME_PART = re.compile(r"[^\s.]*(?:\.|\s+)|[^\s.]+")
"""A word, or a part of a dotted name with its dot."""

_STANDS_FOR = "…"
_WORTH_SHARING = 6
"""Letters of a prefix of names that is left out, at least."""


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: Line above the table.
        header: Names of the columns.
        rows: Cells of each row.
        left: Numbers of the columns of words, aligned at the left and broken between words where
            room is scarce; the others are numbers, which are never broken.
        names: Number of the column of dotted names. Where room is scarce, the prefix that most of
            them share is written once, in the title.
        spare: Names of the columns to leave out where there is no room at all, the first of them
            first. A line below the table lists them.
        total: Whether a line is drawn above the last row.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    names: int | None = None
    spare: Sequence[str] = ()
    total: bool = False

    def html(self) -> str:
        """Return plain HTML for notebooks, with all columns."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def text(self) -> str:
        """Return text no wider than the terminal, or 80 columns where there is none.

        Where room is scarce, headings are broken into lines first, then names, then words.
        """
        width = max(_LEAST, shutil.get_terminal_size().columns)
        title = self.title
        columns = {
            k: _Column(
                name, [row[k] for row in self.rows], _NAME_PART if k == self.names else _WORD
            )
            for k, name in enumerate(self.header)
        }
        if _together(column.full for column in columns.values()) > width:
            for column in columns.values():
                column.broken_heading = True
        if _together(column.full for column in columns.values()) > width and self.names is not None:
            shared = _shared_prefix(columns[self.names].cells)
            columns[self.names].cells = [_shortened(c, shared) for c in columns[self.names].cells]
            title += f" ({_STANDS_FOR} is {shared})" if shared else ""
        floors = {k: each.floor if k in self.left else each.full for k, each in columns.items()}
        gone = []
        for name in self.spare:
            if _together(floors.values()) > width:
                gone.append(self.header.index(name))
                del floors[gone[-1]], columns[gone[-1]]
        widths = _widths({k: column.full for k, column in columns.items()}, floors, width)
        table = _drawn(title, columns, widths, self.left, self.total)
        if not gone:
            return table
        missing = ", ".join(self.header[k] for k in sorted(gone))
        return f"{table}\n{textwrap.fill(f'a wider terminal shows too: {missing}', width)}"


class Report:
    """Base of everything that prints itself, in a terminal and in a notebook."""

    heading: str = ""
    """Lines above the tables."""

    def tables(self) -> list[Table]:
        """Return the tables."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return lines of totals."""
        raise NotImplementedError

    def __str__(self) -> str:
        parts = [self.heading, *(table.text() for table in self.tables()), self.summary()]
        return "\n".join(filter(None, parts))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heading, summary = (
            part and f"<p>{html.escape(part)}</p>".replace("\n", "<br>")
            for part in (self.heading, self.summary())
        )
        return f"{heading}{''.join(table.html() for table in self.tables())}{summary}"


def data_frame(entries: Iterable[Any]) -> "pd.DataFrame":
    """Return a frame with a row for each dataclass, columns as its fields. Needs pandas."""
    with needed_by("to_pandas()"):
        import pandas as pd  # takes as long to import as all the rest of this package

    return pd.DataFrame([vars(entry) for entry in entries])


@dataclass
class _Column:
    """A column, whose cells are broken behind what ``part`` matches, where they have to be."""

    heading: str
    cells: list[str]
    part: re.Pattern[str]
    broken_heading: bool = False

    @property
    def full(self) -> int:
        """Width with no cell broken."""
        heading = self.heading.split() if self.broken_heading else [self.heading]
        return max(map(len, [*heading, *self.cells]))

    @property
    def floor(self) -> int:
        """Least width of a column of words."""
        least, most = _WORDS
        parts = [part for text in (self.heading, *self.cells) for part in self.part.findall(text)]
        longest = max((len(part.rstrip()) for part in parts), default=0)
        return min(self.full, most, max(least, longest))

    def broken(self, width: int) -> list[str]:
        """Return the cells in lines of that width; a part that is longer is left to be folded."""
        return [self._lines(cell, width) for cell in self.cells]

    def _lines(self, cell: str, width: int) -> str:
        lines = [""]
        for part in self.part.findall(cell):
            if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
        return "\n".join(line.rstrip() for line in lines)


def _widths(full: Mapping[int, int], floors: Mapping[int, int], width: int) -> dict[int, int]:
    """Return how wide each column is: in full, or narrower down to its floor."""
    widths = dict(full)
    while _together(widths.values()) > width:
        wide = [k for k in widths if widths[k] > floors[k]]
        if not wide:  # nothing is left to take: the terminal breaks the lines
            break
        widths[max(wide, key=lambda k: widths[k])] -= 1
    return widths


def _drawn(
    title: str,
    columns: Mapping[int, _Column],
    widths: Mapping[int, int],
    left: Collection[int],
    total: bool,
) -> str:
    from rich.console import Console  # not needed before somebody prints
    from rich.table import Table

    table = Table(title=title)
    for k, column in columns.items():
        justify: Literal["left", "right"] = "left" if k in left else "right"
        table.add_column(column.heading, justify=justify, width=widths[k], overflow="fold")
    rows = list(zip(*(column.broken(widths[k]) for k, column in columns.items()), strict=True))
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=total and number == len(rows) - 2)
    out = io.StringIO()
    width = max(len(title), _together(widths.values()))
    Console(file=out, width=width, color_system=None, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _together(widths: Iterable[int]) -> int:
    """Return what columns take with the lines between and around them."""
    return sum(width + 3 for width in widths) + 1


def _shared_prefix(names: Iterable[str]) -> str:
    """Return the prefix, up to a dot, whose omission saves most letters, or nothing."""
    beginnings: Counter[str] = Counter()
    for name in names:
        parts = name.split(" ")[0].split(".")
        beginnings.update(".".join(parts[:k]) + "." for k in range(1, len(parts)))
    saved = {
        start: len(start) * count
        for start, count in beginnings.items()
        if count > 1 and len(start) >= _WORTH_SHARING
    }
    return max(saved, key=lambda start: saved[start], default="")


def _shortened(name: str, shared: str) -> str:
    return _STANDS_FOR + name.removeprefix(shared) if shared and name.startswith(shared) else name


def empty_figure(
    columns: int = 1,
    heights: Sequence[float] = (1,),
    *,
    size: tuple[float, float] = (5.5, 3.6),
) -> tuple["Figure", Any]:
    """Return a figure and its axes, row by row. Needs matplotlib.

    Args:
        columns: Axes side by side.
        heights: Of the rows, in units of each other; axes of a column share their x.
        size: Inches of all axes of a column together, width and height.
    """
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(heights), columns, sharex="col", squeeze=False, height_ratios=heights
    )
    return figure, axes.flatten()
