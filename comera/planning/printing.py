"""Print reports as tables in terminals and notebooks, and numbers with units."""

import html
import io
import math
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from comera.extras import needed_by

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def show_count(number: float, digits: int = 3) -> str:
    """Write a count with a unit, to ``digits`` significant digits: ``94.4M``."""
    return _in_units(number, 1000, ("", "k", "M", "G", "T"), digits)


def show_bytes(number: float) -> str:
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


def show_column(values: Sequence[float | None], digits: int = 3) -> list[str]:
    """Write numbers with one precision, at which the smallest has ``digits``; None is empty."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    form = f".{max(0, digits - 1 - math.floor(math.log10(least)))}f"
    if most > 100 * least:
        form = f".{digits - 1}e"
    return ["" if value is None else f"{value:{form}}" for value in values]


_Item = TypeVar("_Item")
_LEAST_WIDTH = 80
_WORDS = (12, 24)
"""A column of words gets no narrower than the first, nor than its words up to the second."""
_WORD = re.compile(r"\S+\s*")
_NAME_PART = re.compile(r"[^\s.]*(?:\.|\s+)|[^\s.]+")
"""A word, or a part of a dotted name with its dot."""
_STANDS_FOR = "…"
_WORTH_SHARING = 6
"""Least length of a shared prefix of names that is left out."""


@dataclass(frozen=True)
class Table:
    """A table of text.

    ``left`` are indices of the columns of words, which are aligned at the left and broken between
    words if room is scarce; all other columns are numbers, which are never broken. ``names`` is the
    column of dotted names, whose common prefix is then written once, in the title. Columns in
    ``spare`` are left out in order, and listed in a line below. ``total`` draws a line above the
    last row.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)
    names: int | None = None
    spare: Sequence[str] = ()
    total: bool = False

    def html(self) -> str:
        """Return the table as plain HTML for notebooks, with all columns, ``spare`` ones last."""
        order = sorted(range(len(self.header)), key=lambda k: self.header[k] in self.spare)

        def tr(tag: str, cells: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cells[k])}</{tag}>' for k in order)}</tr>"

        top = f"<caption>{html.escape(self.title)}</caption><thead>{tr('th', self.header)}</thead>"
        return f"<table>{top}<tbody>{''.join(tr('td', row) for row in self.rows)}</tbody></table>"

    def text(self) -> str:
        """Return text no wider than the terminal; headings break first, then names, then words.

        There is no limit in a file or a pipe, unless ``COLUMNS`` in the environment says one.
        """
        without_terminal = _LEAST_WIDTH if "ipykernel" in sys.modules else sys.maxsize
        limit = max(_LEAST_WIDTH, shutil.get_terminal_size((without_terminal, 0)).columns)
        title = self.title
        cells = {k: [row[k] for row in self.rows] for k in range(len(self.header))}
        headings = {k: [name] for k, name in enumerate(self.header)}

        def full() -> dict[int, int]:
            return {k: max(map(len, [*headings[k], *cells[k]])) for k in cells}

        if _together(full().values()) > limit:
            headings = {k: name.split() for k, name in enumerate(self.header)}
        if _together(full().values()) > limit and self.names is not None:
            shared = _shared_prefix(cells[self.names])
            if shared:
                title += f" ({_STANDS_FOR} is {shared})"
                cells[self.names] = [
                    _STANDS_FOR + name.removeprefix(shared) if name.startswith(shared) else name
                    for name in cells[self.names]
                ]
        widths = full()
        floors = widths.copy()
        for k in {*self.left} & {*cells}:
            part = _NAME_PART if k == self.names else _WORD
            words = [word for text in (self.header[k], *cells[k]) for word in part.findall(text)]
            longest = max((len(word.rstrip()) for word in words), default=0)
            floors[k] = min(widths[k], _WORDS[1], max(_WORDS[0], longest))
        gone = []
        for name in self.spare:
            if _together(floors.values()) > limit:
                gone.append(self.header.index(name))
                del floors[gone[-1]], widths[gone[-1]]
        while _together(widths.values()) > limit:
            wide = [k for k in widths if widths[k] > floors[k]]
            if not wide:  # the terminal breaks the lines
                break
            widths[max(wide, key=lambda k: widths[k])] -= 1
        if self.names in widths:
            cells[self.names] = [_broken(name, widths[self.names]) for name in cells[self.names]]
        table = self._drawn(title, cells, widths)
        if not gone:
            return table
        missing = ", ".join(self.header[k] for k in sorted(gone))
        return f"{table}\n{textwrap.fill(f'a wider terminal shows too: {missing}', limit)}"

    def _drawn(self, title: str, cells: dict[int, list[str]], widths: dict[int, int]) -> str:
        from rich import console, table  # not needed before somebody prints

        drawn = table.Table(title=title)
        for k, width in widths.items():
            justify: Any = "left" if k in self.left else "right"
            drawn.add_column(self.header[k], justify=justify, width=width, overflow="fold")
        for number in range(len(self.rows)):
            last = self.total and number == len(self.rows) - 2
            drawn.add_row(*(cells[k][number] for k in widths), end_section=last)
        out = io.StringIO()
        options: Any = {"width": max(len(title), _together(widths.values())), "color_system": None}
        console.Console(file=out, markup=False, force_jupyter=False, **options).print(drawn)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def table_of(
    title: str, columns: Mapping[str, Callable[[_Item], str]], items: Iterable[_Item], **how: Any
) -> Table:
    """Return a table with a row for each item; ``columns`` are what to write of it, by heading."""
    rows = [[show(item) for show in columns.values()] for item in items]
    return Table(title, [*columns], rows, **how)


def _together(widths: Iterable[int]) -> int:
    return sum(width + 3 for width in widths) + 1


def _broken(name: str, width: int) -> str:
    lines = [""]
    for part in _NAME_PART.findall(name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _shared_prefix(names: Iterable[str]) -> str:
    """Return the prefix of names, up to a dot, whose omission saves most letters, or ``""``."""
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


class Report:
    """Base of results that print as tables in a terminal and in a notebook."""

    heading: str = ""
    """Lines above the tables."""

    def tables(self) -> list[Table]:
        """Return the report's tables, which are printed below the heading."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return the lines to print below the tables, such as totals."""
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


def data_frame(rows: Iterable[Mapping[str, Any]], what: str = "to_pandas()") -> "pd.DataFrame":
    """Return a frame of rows by column. Needs pandas; errors name ``what`` needs it."""
    with needed_by(what):
        import pandas as pd  # takes as long to import as all the rest of this package
    return pd.DataFrame(rows)


def empty_figure(
    columns: int = 1, height: float = 3.6, margin: float = 0.0
) -> tuple["Figure", Any]:
    """Return an empty figure with axes side by side, and these axes. Needs matplotlib.

    A notebook shows it whether matplotlib's own display is set up there or not.
    """
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    figure = Picture(figsize=(5.5 * columns + margin, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False).flatten()


def with_bar(
    items: Iterable[_Item], title: str, show: bool, total: float | None = None, done: int = 0
) -> Iterable[_Item]:
    """Return the items; if ``show``, iterating over them draws a progress bar from ``done``."""
    if not show:
        return items
    from rich.progress import track  # not needed without a bar

    return track(items, title, total, completed=done)
