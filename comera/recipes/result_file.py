"""``result.json`` in the folder of a run: what came of a model."""

from pathlib import Path
from typing import Any

from comera.files import replacing
from comera.train.json_figures import from_json, to_json

_NAME = "result.json"


def write_result(folder: Path, facts: dict[str, Any]) -> None:
    """Write what came of a model into its folder."""
    with replacing(folder / _NAME) as temporary:
        temporary.write_text(to_json(facts, indent=2), encoding="utf-8")


def read_result(folder: Path) -> dict[str, Any]:
    """Return what came of a model, from its folder.

    Raises:
        FileNotFoundError: If it is not finished.
        ValueError: If the file is damaged; names it and what writes it again.
    """
    path = folder / _NAME
    try:
        found = from_json(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {str(found)[:40]!r}")
    except ValueError as problem:
        run = folder if (folder / "config.yaml").is_file() else folder.parent  # of a twin
        raise ValueError(
            f"{path} is damaged ({problem}): comera train {run} writes it again, from the last "
            "checkpoint"
        ) from None
    return found
