"""Pages from the templates beside this file. All text that goes into one is escaped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comera.extras import needed_by
from comera.files import replacing


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
