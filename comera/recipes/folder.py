"""The folder of a run: which settings it belongs to, and whether it is finished."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from comera.checkpoint.archive import Archive
from comera.files import replacing
from comera.recipes.config import RunConfig
from comera.recipes.parse import parse_settings

_WRITTEN_BY_A_RUN = (
    "checkpoints", "dense", "metrics.jsonl", "model.safetensors", "report.html", "result.json",
    "tensorboard",
)  # fmt: skip


def claim(config: RunConfig) -> None:
    """Make the folder of a run its own, or make sure that it is.

    Raises:
        ValueError: If it holds a run with other settings, and ``overwrite`` is not set.
    """
    folder = Path(config.out)
    if not config.overwrite:
        difference = other_settings(config)
        if difference is not None:
            raise ValueError(
                f"{folder} holds a run with other settings ({difference}); "
                "choose another --out, or start again with --overwrite=true"
            )
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            _write(config)  # how checkpoints are kept may have changed
            return
    for name in _WRITTEN_BY_A_RUN:  # nothing else that may lie there
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    _write(config)


def _write(config: RunConfig) -> None:
    with replacing(Path(config.out) / "config.yaml") as temporary:
        text = yaml.safe_dump(_settings(config), sort_keys=False)
        temporary.write_text(text, encoding="utf-8")


def other_settings(config: RunConfig) -> str | None:
    """How the run that was begun in the folder differs, as ``key: there -> here``.

    None if it does not, or if no run was begun there. How checkpoints are kept makes no other run.
    """
    folder = Path(config.out)
    file = folder / "config.yaml"
    begun = Archive(folder / "checkpoints").steps() or (folder / "result.json").exists()
    if not begun or not file.is_file():
        return None
    there, here = yaml.safe_load(file.read_text(encoding="utf-8")), _settings(config)
    with contextlib.suppress(ValueError):  # of an earlier version: keys it had no need of
        there = _settings(parse_settings(RunConfig, there))
    for settings in (there, here):
        settings.pop("checkpoints", None)
    return None if there == here else _difference(there, here)


def is_finished(config: RunConfig) -> bool:
    """Whether the folder holds the result of just this run."""
    folder = Path(config.out)
    if not all((folder / name).is_file() for name in ("config.yaml", "result.json")):
        return False
    return other_settings(config) is None


def _settings(config: RunConfig) -> dict[str, Any]:
    settings = config.settings()
    for where in ("overwrite", "out"):  # not part of what is trained: a folder may be moved
        settings.pop(where)
    # tuples become lists, as they are after a round trip through the file
    return json.loads(json.dumps(settings))


def _difference(there: Any, here: Any) -> str:
    """The first few settings that differ, as ``key: old -> new``."""
    found: list[str] = []

    def walk(old: Any, new: Any, path: str) -> None:
        if isinstance(old, dict) and isinstance(new, dict):
            for key in [*old, *(k for k in new if k not in old)]:
                walk(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
        elif old != new:
            found.append(f"{path}: {old} -> {new}")

    walk(there, here, "")
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
