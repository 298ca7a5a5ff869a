"""Numbers with their units, and tables as HTML, for whatever prints itself."""

import html
from collections.abc import Iterable, Sequence


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
