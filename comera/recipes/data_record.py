"""Which data a run was begun with: by content, noted in its folder, compared when it goes on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from comera.files import replacing

NAME = "data_digests.json"
_SHOWN = 4


@dataclass(frozen=True)
class DataRecord:
    """What the data of a run are.

    Attributes:
        files: Digests of all that is read, by name.
        prepared: Digest of what was made of them, tokens or rows; None where it is not known yet.
    """

    files: Mapping[str, str]
    prepared: str | None = None


def read_record(folder: Path) -> DataRecord | None:
    """Return what was noted in the folder of a run; None of a run that noted nothing.

    Raises:
        ValueError: If it cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return DataRecord(dict(found["files"]), found["prepared"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(
            f"{path} is not readable ({problem}): without that file the run goes on, whatever its "
            "data are now"
        ) from None


def write_record(folder: Path, record: DataRecord) -> None:
    """Note in the folder of a run what its data are."""
    with replacing(folder / NAME) as temporary:
        facts = {"files": dict(record.files), "prepared": record.prepared}
        temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def changed_data(there: DataRecord, here: DataRecord) -> str | None:
    """Return how data differ from those noted, as ``2 files: a.py changed, b.py new``, or None.

    A file that is in another folder now is no other file.
    """
    there = DataRecord(_where_they_are(there.files, here.files), there.prepared)
    lines = [
        *(f"{name} changed" for name, d in here.files.items() if there.files.get(name, d) != d),
        *(f"{name} new" for name in here.files if name not in there.files),
        *(f"{name} no longer read" for name in there.files if name not in here.files),
    ]
    if lines:
        count = f"{len(lines)} file{'s' if len(lines) > 1 else ''}"
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        return f"{count}: {', '.join(lines[:_SHOWN])}{more}"
    if None not in (there.prepared, here.prepared) and there.prepared != here.prepared:
        return (
            "the files are the same, but comera or tokenizers, in another version, reads them "
            "otherwise, or they are in another order"
        )
    return None


def _where_they_are(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return what was noted, with the new names of files that were put into another folder."""
    new = {(Path(name).name, digest): name for name, digest in here.items() if name not in there}
    moved = {
        name: new[Path(name).name, digest]
        for name, digest in there.items()
        if name not in here and (Path(name).name, digest) in new
    }
    return {moved.get(name, name): digest for name, digest in there.items()}
