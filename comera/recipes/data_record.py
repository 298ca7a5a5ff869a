"""Which data a run was begun with: by content, noted in its folder, compared when it goes on.

Where the data of a run are: whole paths, which mean the same from every folder.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comera.extras import did_you_mean
from comera.files import replacing
from comera.recipes.parse import parse_settings
from comera.recipes.run_config import RunConfig

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


_PATHS = {
    "masked_text": ("folder",),
    "causal_text": ("folder",),
    "nli": ("train", "dev", "test", "vocab"),
    "clicks": ("file",),
}
"""Settings that are paths, by section."""

PATHS = {f"{name}.{key}" for name, keys in _PATHS.items() for key in keys}
"""Their dotted names."""


def with_whole_paths(config: RunConfig) -> RunConfig:
    """Return settings whose data are where they are from here, said from the root."""
    changes = {}
    for name, keys in _PATHS.items():
        section = getattr(config, name)
        if section is not None:
            whole = {key: _whole(getattr(section, key)) for key in keys}
            changes[name] = dataclasses.replace(section, **whole)
    return dataclasses.replace(config, **changes)


def with_places(config: RunConfig, places: Mapping[str, Any]) -> RunConfig:
    """Return settings whose data are at other places, as whole paths.

    Args:
        config: The run.
        places: The new ones by the dotted names of settings.

    Raises:
        ValueError: If one is not where data of the run are, or no path.
    """
    known = [
        f"{name}.{key}"
        for name, keys in _PATHS.items()
        if getattr(config, name) is not None
        for key in keys
    ]
    changes: dict[str, dict[str, Any]] = {}
    for word, place in places.items():
        if word not in known:
            raise ValueError(
                f"{word} does not say where data of this run are{did_you_mean(word, known)}"
            )
        name, _, key = word.partition(".")
        changes.setdefault(name, asdict(getattr(config, name)))[key] = place
    sections = {
        name: parse_settings(type(getattr(config, name)), values, f"{name}.")
        for name, values in changes.items()
    }
    return with_whole_paths(dataclasses.replace(config, **sections))


def named_data(config: RunConfig) -> str:
    """Return where the data of a run are, as its settings say it; nothing of default ones."""
    return ", ".join(f"{key}={path}" for key, path in _paths(config))


def missing_data(config: RunConfig) -> dict[str, str]:
    """Return the first path that is not there of each setting that names one, by its key."""
    found: dict[str, str] = {}
    for key, path in _paths(config):
        if not Path(path).exists():
            found.setdefault(key, path)
    return found


def data_within(config: RunConfig, folder: Path) -> str | None:
    """Return the first data of a run that are a folder or in it, as ``key=path``; None if none."""
    outer = folder.resolve()
    inside = (
        f"{key}={path}"
        for key, path in _paths(config)
        if Path(path).resolve().is_relative_to(outer)
    )
    return next(inside, None)


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield each path to data of a run with the dotted name of its setting."""
    for name, keys in _PATHS.items():
        for key in keys:
            for path in _each(getattr(config, name), key):
                yield f"{name}.{key}", path


def _each(section: Any, key: str) -> Iterator[str]:
    value = getattr(section, key, None)
    for path in value if isinstance(value, list) else [value]:
        if path and not path.startswith("datasets:"):
            yield os.path.expanduser(path)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if not value or value.startswith("datasets:"):
        return value
    return os.path.abspath(os.path.expanduser(value))


def has_moved(old: Any, new: Any) -> bool:
    """Return whether these are other paths, and the old ones are gone."""
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(old, new, strict=True)
        return len(old) == len(new) and all(a == b or has_moved(a, b) for a, b in pairs)
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return not os.path.exists(old)
