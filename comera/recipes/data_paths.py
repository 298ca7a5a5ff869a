"""Where the data of a run are: whole paths, which mean the same from every folder."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comera.misspelt import did_you_mean
from comera.recipes.parse import parse_settings
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


def _has_moved(old: Any, new: Any) -> bool:
    """Tell whether these are other paths, and the old ones are gone."""
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(old, new, strict=True)
        return len(old) == len(new) and all(a == b or _has_moved(a, b) for a, b in pairs)
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return not os.path.exists(old)
