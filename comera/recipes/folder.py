"""The folder of a run: which settings it belongs to, and whether it is finished."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from comera.checkpoint.archive import Archive, take
from comera.data.click_files import CATEGORIES
from comera.files import replacing
from comera.recipes.data_record import (
    NAME,
    DataRecord,
    changed_data,
    data_within,
    follow_moved,
    read_record,
    with_whole_paths,
    write_record,
)
from comera.recipes.outcome import read_result
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run_config import RunConfig
from comera.train.log import read_metrics

_WRITTEN_BY_A_RUN = (
    CATEGORIES, "checkpoints", "comera.json", "dense", NAME, "metrics.jsonl",
    "model.safetensors", "report.html", "result.json", "tensorboard", "tokenizer.json",
)  # fmt: skip


_LENGTH = ("steps", "epochs")
"""Settings in the section ``train`` of which one says how long a run is."""

_OF_NO_RESULT = ("log_every", "save_every")
"""Settings in the section ``train`` with which a run ends the same, whatever they are."""

_LET_IT_END = (
    ": it was interrupted in the late stage of rank learning, whose length follows from that "
    "number; let it end with the old one, and give it more afterwards"
)

_IN_EVERY_CONFIG = {"seed", "device", "train", "optimizer", "twin"}


@contextlib.contextmanager
def lock(folder: Path, what: str = "run") -> Iterator[None]:
    """Make this the one process that writes to the folder of a run, or of a sweep.

    Args:
        folder: The folder, which is made if it is not there.
        what: What errors call the one that writes already.

    Raises:
        FolderInUseError: If another one does.
    """
    file = FileLock(folder / ".lock", timeout=0)
    take(file, folder, f": let that {what} end, or choose another --out")
    try:
        yield
    finally:
        file.release()


def check_folder(config: RunConfig) -> None:
    """Make sure that a run may have its folder; nothing is written or deleted.

    Raises:
        ValueError: If it holds a run with other settings, and ``overwrite`` is not set, what no run
            wrote would be in the way, or the run is to read what is there.
    """
    folder = Path(config.out)
    ours = _written_by_a_run(folder)
    foreign = [
        name
        for name in ("config.yaml", *_WRITTEN_BY_A_RUN)
        if name not in ours and _holds(folder / name)
    ]
    if ours and not config.twin:  # nothing will be written there
        foreign = [name for name in foreign if name != "dense"]
    if foreign:
        raise ValueError(
            f"{folder} holds {', '.join(foreign)} that no run here has written: "
            "choose another --out, or move that away"
        )
    data = data_within(config, folder) if config.overwrite or not begun(folder) else None
    if data is not None:
        raise ValueError(
            f"{folder} holds what the run is to read ({data}): choose another --out, where there "
            "are no data"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.is_dir() and not os.access(there, os.W_OK):
        raise ValueError(
            f"{folder} cannot be written: {there} may only be read; choose another --out"
        )
    difference = None if config.overwrite else other_settings(config)
    if difference is not None:
        raise ValueError(
            f"{folder} holds a run with other settings ({difference}); "
            "choose another --out, or start again with --overwrite=true"
        )


def check_data(config: RunConfig, record: DataRecord) -> None:
    """Make sure that a run goes on with the data that it was begun with.

    Raises:
        ValueError: If what was noted in its folder is not what is there now, and ``overwrite`` is
            not set. Of a run with other settings nothing is said here.
    """
    if config.overwrite or other_settings(config) is not None:
        return
    difference = other_data(Path(config.out), record)
    if difference is not None:
        raise ValueError(
            f"{config.out} holds a run that was begun with other data ({difference}); restore "
            "them, choose another --out, or start again with --overwrite=true"
        )


def other_data(folder: Path, record: DataRecord) -> str | None:
    """Say how data differ from those that the run in the folder was begun with.

    None if they do not, if no run was begun there, or it has not noted them.
    """
    noted = read_record(folder) if begun(folder) else None
    return None if noted is None else changed_data(noted, record)


def claim(config: RunConfig, record: DataRecord) -> bool:
    """Make the folder of a run its own, after :func:`check_folder` and :func:`check_data`.

    Returns whether it is known that the run was begun with these data: not so of one that has noted
    none, as earlier versions did not. It has noted these then.

    What an earlier run with other settings, or none to go on from, has left there is deleted, and
    nothing else.
    """
    folder = Path(config.out)
    if not config.overwrite and trains_on(config):  # it will have another result
        for place in ("", "dense"):
            (folder / place / "result.json").unlink(missing_ok=True)
    if config.overwrite or not (folder / "checkpoints").is_dir():
        _delete(folder, _written_by_a_run(folder) - {"config.yaml"})  # which is replaced at once
    known = not begun(folder) or read_record(folder) is not None
    with replacing(folder / "config.yaml") as temporary:  # how checkpoints are kept may be new
        text = yaml.safe_dump(_settings(config), sort_keys=False)
        temporary.write_text(text, encoding="utf-8")
    write_record(folder, record)
    return known


def _delete(folder: Path, names: Iterable[str]) -> None:
    """Delete what a run has written under these names; in its folders others may have files."""
    for name in names:
        path = folder / name
        if name == "checkpoints":
            Archive(path).clear()
        elif name == "dense":
            _delete(path, set(_WRITTEN_BY_A_RUN) - {"dense"})
        elif name == "tensorboard":
            for events in path.glob("events.out.tfevents.*"):
                events.unlink()
        else:
            path.unlink(missing_ok=True)
        if path.is_dir():
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


def _holds(path: Path) -> bool:
    """Tell whether there is a file, or a folder with anything in it but a lock."""
    if path.is_dir():
        return any(entry.name != ".lock" for entry in path.iterdir())
    return path.exists()


def _written_by_a_run(folder: Path) -> set[str]:
    """Name what in the folder is a run's: all or none, by what ``config.yaml`` says.

    That is a common name: one that lacks what every run writes into it belongs to somebody else.
    One that cannot be read is taken for a run's where there is something else of a run.
    """
    try:
        settings = read_yaml(folder / "config.yaml")
    except FileNotFoundError:
        return set()
    except ValueError:
        settings = dict.fromkeys(_IN_EVERY_CONFIG, None) if begun(folder) else {}
    if not settings.keys() >= _IN_EVERY_CONFIG:
        return set()
    names = {"config.yaml", *_WRITTEN_BY_A_RUN}
    return names if settings["twin"] else names - {"dense"}


def begun(folder: Path) -> bool:
    """Tell whether there is something of a run to go on from, or its result."""
    return bool(Archive(folder / "checkpoints").steps()) or (folder / "result.json").exists()


def other_settings(config: RunConfig, data_may_move: bool = True) -> str | None:
    """Say how the run that was begun in the folder differs, as ``key: there -> here``.

    None if it does not, or if no run was begun there. How checkpoints are kept, how often they are
    and a line of the log is written, how many processes train it, and more steps make no other run,
    but for the latter in the late stage of rank learning: how much it cuts at a time follows from
    them. Nor does another place of data that are no longer at the old one, unless ``data_may_move``
    is False.
    """
    folder = Path(config.out)
    if not begun(folder) or not (folder / "config.yaml").is_file():
        return None
    try:
        there, here = _settings_there(folder), _settings(config)
    except ValueError as problem:
        return str(problem)
    longer = trains_on(config)
    way_out = _LET_IT_END if longer and _in_late_stage(folder) else ""
    if longer and not way_out:
        there["train"] |= {key: here["train"][key] for key in _LENGTH}
    if data_may_move:
        follow_moved(there, here)
    if isinstance(there.get("train"), dict):
        there["train"] |= {key: here["train"][key] for key in _OF_NO_RESULT}
    for settings in (there, here):
        for key in ("checkpoints", "parallel"):
            settings.pop(key, None)
    return None if there == here else _difference(there, here) + way_out


def other_rhythm(config: RunConfig) -> str | None:
    """Say what an interrupted run does at other steps from now on, as ``key: there -> here``."""
    folder = Path(config.out)
    if not begun(folder) or not (folder / "config.yaml").is_file():
        return None
    there, here = _settings_there(folder), asdict(config)
    both = (
        {"train": {key: each["train"].get(key) for key in _OF_NO_RESULT}} for each in (there, here)
    )
    return _difference(*both) or None


def trains_on(config: RunConfig) -> bool:
    """Tell whether a run is to be trained for more steps, or epochs, than it was begun with."""
    folder = Path(config.out)
    if not begun(folder) or not (folder / "config.yaml").is_file():
        return False
    try:
        there = _settings_there(folder).get("train") or {}
    except ValueError:
        return False
    here = {key: getattr(config.train, key) for key in _LENGTH}
    return any(here[key] and there.get(key) and here[key] > there[key] for key in _LENGTH)


def _in_late_stage(folder: Path) -> bool:
    """Tell whether a run was interrupted while it gave up ranks for its target.

    That is as its log has it, which may be behind by the few steps that make a line of it.
    """
    saved = max(Archive(folder / "checkpoints").steps(), default=0)
    lines = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    stages = [line["stage"] for line in lines if line["step"] <= saved and "stage" in line]
    return stages[-1:] == ["late"]


def _settings_there(folder: Path) -> dict[str, Any]:
    settings = read_yaml(folder / "config.yaml")
    with contextlib.suppress(ValueError):  # of an earlier version: keys it had no need of
        settings = _settings(parse_settings(RunConfig, settings))
    return settings


def is_finished(config: RunConfig) -> bool:
    """Tell whether the folder holds the result of just this run."""
    folder = Path(config.out)
    try:
        read_result(folder)
    except (OSError, ValueError):  # one that is damaged the run writes again
        return False
    if not (folder / "config.yaml").is_file():
        return False
    # Of data at another place only their digests tell whether the result is that of these.
    return other_settings(config, data_may_move=False) is None and not trains_on(config)


def _settings(config: RunConfig) -> dict[str, Any]:
    return _kept(with_whole_paths(config).settings())


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they are kept in the file: tuples are lists there."""
    where = ("overwrite", "out")  # not part of what is trained: a folder may be moved
    kept = {key: value for key, value in settings.items() if key not in where}
    return json.loads(json.dumps(kept))


def _difference(there: Any, here: Any) -> str:
    """Name the first few settings that differ, as ``key: old -> new``."""
    found: list[str] = []

    def walk(old: Any, new: Any, path: str) -> None:
        if isinstance(old, dict) and isinstance(new, dict):
            for key in [*old, *(k for k in new if k not in old)]:
                walk(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
        elif old != new:
            found.append(f"{path}: {old} -> {new}")

    walk(there, here, "")
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
