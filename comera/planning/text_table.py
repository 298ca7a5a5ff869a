"""Tables as text that fit the terminal: headings are broken first, then names, then words."""

import io
import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

_LEAST = 80
"""Columns that every terminal is taken to have."""

_WORDS = (12, 24)
"""A column of words gets no narrower than the first, nor than its words up to the second."""

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
    columns = {k: [name, *(row[k] for row in cells)] for k, name in enumerate(header)}
    if _unbroken(columns) > width:
        for k, (name, *under) in columns.items():
            columns[k][0] = _broken(name, max(_longest(under), _longest_word(name)))
    if _unbroken(columns) > width and names is not None:
        shared = _shared_beginning(columns[names][1:])
        columns[names][1:] = [_shortened(cell, shared) for cell in columns[names][1:]]
        title += f" ({_STANDS_FOR} is {shared})" if shared else ""
    floors = {k: _floor(column) if k in left else _longest(column) for k, column in columns.items()}
    gone = []
    for k in spare:
        if _together(floors.values()) > width:
            gone.append(k)
            del floors[k], columns[k]
    table = _drawn(title, columns, _widths(columns, floors, width), left, total)
    missing = ", ".join(header[k] for k in sorted(gone))
    if not missing:
        return table
    return f"{table}\n{textwrap.fill(f'a wider terminal shows too: {missing}', width)}"


def _widths(
    columns: Mapping[int, Sequence[str]], floors: Mapping[int, int], width: int
) -> dict[int, int]:
    """Return how wide each column is: as its cells, or narrower down to its floor."""
    widths = {k: _longest(column) for k, column in columns.items()}
    while _together(widths.values()) > width:
        wide = [k for k in widths if widths[k] > floors[k]]
        if not wide:  # nothing is left to take: the terminal breaks the lines
            break
        widths[max(wide, key=lambda k: widths[k])] -= 1
    return widths


def _drawn(
    title: str,
    columns: Mapping[int, Sequence[str]],
    widths: Mapping[int, int],
    left: Collection[int],
    total: bool,
) -> str:
    from rich.console import Console  # not needed before somebody prints
    from rich.table import Table

    table = Table(title=title)
    for k, (name, *_) in columns.items():
        table.add_column(
            name, justify="left" if k in left else "right", width=widths[k], overflow="fold"
        )
    rows = list(zip(*(cells for _, *cells in columns.values()), strict=True))
    for k, row in enumerate(rows):
        table.add_row(*row, end_section=total and k == len(rows) - 2)
    out = io.StringIO()
    width = max(len(title), _together(widths.values()))
    Console(file=out, width=width, color_system=None, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _together(widths: Iterable[int]) -> int:
    """Return what columns take with the lines between and around them."""
    return sum(width + 3 for width in widths) + 1


def _unbroken(columns: Mapping[int, Sequence[str]]) -> int:
    return _together(map(_longest, columns.values()))


def _longest(cells: Iterable[str]) -> int:
    return max((len(line) for cell in cells for line in cell.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _floor(cells: Sequence[str]) -> int:
    """Return how narrow a column of words may become."""
    least, most = _WORDS
    words = max(least, *map(_longest_word, cells))
    return min(_longest(cells), most, words)


def _broken(heading: str, width: int) -> str:
    return "\n".join(textwrap.wrap(heading, max(1, width)))


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
