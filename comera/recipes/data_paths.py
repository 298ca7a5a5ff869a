"""Where the data of a run are: whole paths, which mean the same from every folder."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comera.recipes.run_config import RunConfig

_PATHS = {
    "masked_text": ("folder",),
    "causal_text": ("folder",),
    "nli": ("train", "dev", "test", "vocab"),
    "clicks": ("file",),
}
"""Settings that are paths, by section."""


def with_whole_paths(config: RunConfig) -> RunConfig:
    """Return settings whose data are where they are from here, said from the root."""
    changes = {}
    for name, keys in _PATHS.items():
        section = getattr(config, name)
        if section is not None:
            whole = {key: _whole(getattr(section, key)) for key in keys}
            changes[name] = dataclasses.replace(section, **whole)
    return dataclasses.replace(config, **changes)


def follow_moved(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Put new places of data into the settings of a run that was begun, where the old are gone.

    Whether they are the same data is for their digests to tell.
    """
    for name, keys in _PATHS.items():
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            old |= {key: new.get(key) for key in keys if _has_moved(old.get(key), new.get(key))}


def missing_data(config: RunConfig) -> dict[str, str]:
    """Return the first path that is not there of each setting that names one, by its key."""
    found = {}
    for name, keys in _PATHS.items():
        for key in keys:
            gone = (path for path in _each(getattr(config, name), key) if not Path(path).exists())
            if path := next(gone, None):
                found[f"{name}.{key}"] = path
    return found


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


def _has_moved(old: Any, new: Any) -> bool:
    """Tell whether these are other paths, and the old ones are gone."""
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(old, new, strict=True)
        return len(old) == len(new) and all(a == b or _has_moved(a, b) for a, b in pairs)
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return not os.path.exists(old)
