"""Numbers with their units, and tables as HTML, for whatever prints itself.

Tables as text that fit the terminal: headings are broken first, then names, then words.

Empty figures of matplotlib, drawn without a window.
"""

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


def table_html(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", note: str = ""
) -> str:
    """Write a plain HTML table for notebooks; text is escaped, line breaks of the note kept."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    caption = caption and f"<caption>{html.escape(caption)}</caption>"
    note = note and f"<p>{html.escape(note)}</p>".replace("\n", "<br>")
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


_LEAST = 80
"""Columns that every terminal is taken to have."""

_WORDS = (12, 24)
"""A column of words gets no narrower than the first, nor than its words up to the second."""

_WORD = re.compile(r"\S+\s*")
_NAME_PART = re.compile(r"[^\s.]*(?:\.|\s+)|[^\s.]+")
"""A word, or a part of a dotted name with its dot."""

_STANDS_FOR = "…"
_WORTH_SAYING = 6
"""Letters of a beginning of names that is left out."""


def text_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    names: int | None = None,
    spare: Sequence[int] = (),
    total: bool = False,
) -> str:
    """Lay out a table as text, no wider than the terminal, or 80 columns where there is none.

    Args:
        title: Line above the table.
        header: Names of the columns; they are broken into lines where room is scarce.
        rows: Cells of each row.
        left: Numbers of the columns of words, aligned at the left and broken between words where
            room is scarce; the others are numbers, which are never broken.
        names: Number of the column of dotted names. Where room is scarce, the beginning that most
            of them share is said once, in the title.
        spare: Numbers of the columns that are left out where there is no room at all, the first of
            them first. A line below the table says which.
        total: Whether a line is drawn above the last row.
    """
    width = max(_LEAST, shutil.get_terminal_size().columns)
    cells = [list(row) for row in rows]
    columns = {
        k: _Column(name, [row[k] for row in cells], _NAME_PART if k == names else _WORD)
        for k, name in enumerate(header)
    }
    if _together(column.full for column in columns.values()) > width:
        for column in columns.values():
            column.broken_heading = True
    if _together(column.full for column in columns.values()) > width and names is not None:
        shared = _shared_beginning(columns[names].cells)
        columns[names].cells = [_shortened(cell, shared) for cell in columns[names].cells]
        title += f" ({_STANDS_FOR} is {shared})" if shared else ""
    floors = {k: column.floor if k in left else column.full for k, column in columns.items()}
    gone = []
    for k in spare:
        if _together(floors.values()) > width:
            gone.append(k)
            del floors[k], columns[k]
    widths = _widths({k: column.full for k, column in columns.items()}, floors, width)
    table = _drawn(title, columns, widths, left, total)
    if not gone:
        return table
    missing = ", ".join(header[k] for k in sorted(gone))
    return f"{table}\n{textwrap.fill(f'a wider terminal shows too: {missing}', width)}"


@dataclass
class _Column:
    """A column, whose cells are broken behind what ``part`` matches, where they have to be."""

    heading: str
    cells: list[str]
    part: re.Pattern[str]
    broken_heading: bool = False

    @property
    def full(self) -> int:
        """How wide it is with no cell broken."""
        heading = self.heading.split() if self.broken_heading else [self.heading]
        return max(map(len, [*heading, *self.cells]))

    @property
    def floor(self) -> int:
        """How narrow it may become, if it holds words."""
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


def _shared_beginning(names: Iterable[str]) -> str:
    """Return the beginning, up to a dot, that is worth saying once: which saves most letters."""
    beginnings: Counter[str] = Counter()
    for name in names:
        parts = name.split(" ")[0].split(".")
        beginnings.update(".".join(parts[:k]) + "." for k in range(1, len(parts)))
    saved = {
        start: len(start) * count
        for start, count in beginnings.items()
        if count > 1 and len(start) >= _WORTH_SAYING
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
