"""The folder of a run: whether a run was begun there, and whether it may go on as another asks."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from comera.checkpoint.archive import Archive, take
from comera.data.click_files import CATEGORIES
from comera.files import replacing
from comera.recipes.data_record import (
    NAME,
    PATHS,
    DataRecord,
    changed_data,
    data_within,
    has_moved,
    read_record,
    with_whole_paths,
    write_record,
)
from comera.recipes.outcome import read_result
from comera.recipes.parse import read_yaml
from comera.recipes.run_config import RunConfig, marked
from comera.train.log import read_metrics

_WRITTEN_BY_A_RUN = (
    CATEGORIES, "checkpoints", "comera.json", "dense", NAME, "metrics.jsonl",
    "model.safetensors", "report.html", "result.json", "tensorboard", "tokenizer.json",
)  # fmt: skip

_LET_IT_END = (
    ": it was interrupted in the late stage of rank learning, whose length follows from that "
    "number; let it end with the old one, and give it more afterwards"
)

_SHOWN = 4
_IN_EVERY_CONFIG = {"seed", "device", "train", "optimizer", "twin"}


@dataclass(frozen=True)
class Begun:
    """A run that was begun in a folder, beside the settings of the one that is to go on there.

    Attributes:
        others: Settings that make it another run, as ``key: there -> here``.
        rhythm: Settings that differ and do not change the trained model.
        longer: Whether there are to be more steps, or epochs, than it was begun with.
        late: Whether that is in its late stage, which may not become longer.
        moved: Whether its data are at another place now.
    """

    others: list[str] = field(default_factory=list)
    rhythm: list[str] = field(default_factory=list)
    longer: bool = False
    late: bool = False
    moved: bool = False

    @property
    def difference(self) -> str | None:
        """The first settings that make it another run; None if it is the same one."""
        more = f" and {len(self.others) - _SHOWN} more" if len(self.others) > _SHOWN else ""
        text = ", ".join(self.others[:_SHOWN]) + more + (_LET_IT_END if self.late else "")
        return text or None


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


def begun(folder: Path) -> bool:
    """Return whether there is something of a run to resume from, or its result."""
    return bool(Archive(folder / "checkpoints").steps()) or (folder / "result.json").exists()


def begun_run(config: RunConfig) -> Begun | None:
    """Compare the run that was begun in the folder with these settings; None if none was.

    Fields of the settings are marked that do not belong to a run's identity. More steps make no
    other run, but for the late stage of rank learning: how much it cuts at a time follows from
    them. Nor does another place of data that are no longer at the old one.
    """
    folder = Path(config.out)
    if not begun(folder) or not (folder / "config.yaml").is_file():
        return None
    try:
        there = read_yaml(folder / "config.yaml")
    except ValueError as problem:
        return Begun([str(problem)])
    found = dict(_differences(there, settings_of(config)))
    shown = {key: f"{key}: {old} -> {new}" for key, (old, new) in found.items()}
    rhythm = {key for key in found if any(f"{key}.".startswith(f"{no}.") for no in marked(False))}
    moved = {key for key, (old, new) in found.items() if key in PATHS and has_moved(old, new)}
    length = [found[key] for key in marked("length") if key in found]
    longer = any(old and new and new > old for old, new in length)
    late = longer and _in_late_stage(folder)
    same = rhythm | moved | {key for key in marked("length") if longer and not late}
    return Begun(
        [shown[key] for key in shown if key not in same],
        [shown[key] for key in shown if key in rhythm],
        longer,
        late,
        bool(moved),
    )


def other_settings(config: RunConfig) -> str | None:
    """Return how the run that was begun in the folder is another one; None if it is not."""
    found = begun_run(config)
    return None if found is None else found.difference


def other_data(folder: Path, record: DataRecord) -> str | None:
    """Return how data differ from those of the run that was begun in the folder.

    None if they do not, if no run was begun there, or it has no record of its data.
    """
    noted = read_record(folder) if begun(folder) else None
    return None if noted is None else changed_data(noted, record)


def is_finished(config: RunConfig, found: Begun | None = None) -> bool:
    """Return whether the folder holds the result of just this run.

    Args:
        config: The run.
        found: What :func:`begun_run` returned, if it was asked already.
    """
    found = found or begun_run(config)
    # Of data at another place only their digests show whether the result is that of these.
    if found is None or found.others or found.longer or found.moved:
        return False
    try:
        read_result(Path(config.out))
    except (OSError, ValueError):  # one that is damaged the run writes again
        return False
    return True


def check_folder(config: RunConfig, found: Begun | None) -> None:
    """Raise ``ValueError`` if a run may not have its folder; nothing is written or deleted.

    That is so if it holds another run, and ``overwrite`` is not set, files that no run wrote would
    be in the way, or the run is to read what is there.
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
    if found is not None and found.others and not config.overwrite:
        raise ValueError(
            f"{folder} holds a run with other settings ({found.difference}); "
            "choose another --out, or start again with --overwrite=true"
        )


def check_data(config: RunConfig, record: DataRecord) -> None:
    """Raise ``ValueError`` if a run was begun with other data, and ``overwrite`` is not set."""
    difference = None if config.overwrite else other_data(Path(config.out), record)
    if difference is not None:
        raise ValueError(
            f"{config.out} holds a run that was begun with other data ({difference}); restore "
            "them, choose another --out, or start again with --overwrite=true"
        )


def claim(config: RunConfig, record: DataRecord, found: Begun | None) -> None:
    """Write settings and data of a run into its folder, once that and the data were checked.

    Files of an earlier run that is replaced, or has nothing to resume from, are deleted, and no
    others.
    """
    folder = Path(config.out)
    if not config.overwrite and found is not None and found.longer:  # it will have another result
        for place in ("", "dense"):
            (folder / place / "result.json").unlink(missing_ok=True)
    if config.overwrite or not (folder / "checkpoints").is_dir():
        _delete(folder, _written_by_a_run(folder) - {"config.yaml"})  # which is replaced at once
    with replacing(folder / "config.yaml") as temporary:  # how checkpoints are kept may be new
        text = yaml.safe_dump(settings_of(config), sort_keys=False)
        temporary.write_text(text, encoding="utf-8")
    write_record(folder, record)


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


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings as ``config.yaml`` has them: whole paths, and lists for tuples.

    The folder itself is not among them, so that it can be moved.
    """
    settings = with_whole_paths(config).settings()
    for key in ("out", "overwrite"):
        del settings[key]
    return json.loads(json.dumps(settings))


def _in_late_stage(folder: Path) -> bool:
    """Return whether a run was interrupted while it gave up ranks for its target.

    That is as its log has it, which may be behind by the few steps that make a line of it.
    """
    saved = max(Archive(folder / "checkpoints").steps(), default=0)
    lines = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    stages = [line["stage"] for line in lines if line["step"] <= saved and "stage" in line]
    return stages[-1:] == ["late"]


def _differences(there: Any, here: Any, within: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the settings that differ by their dotted names, each with its old and new value."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*there, *here]):
            path = f"{within}.{key}" if within else str(key)
            yield from _differences(there.get(key), here.get(key), path)
    elif there != here:
        yield within, (there, here)
