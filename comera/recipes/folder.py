"""The folder of a run: its settings, the record of its data, and its result.

:func:`begun_run` compares a run that was begun there with the settings of one that is to go on,
:func:`claim` makes the folder its own, :func:`lock` keeps other processes away.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from rich.table import Table

from comera.checkpoint.archive import Archive, take
from comera.data.click_files import CATEGORIES
from comera.extras import did_you_mean
from comera.files import replacing
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run_config import RunConfig, marked
from comera.train.log import from_json, read_metrics, to_json

NAME = "data_digests.json"
"""Name of the record of a run's data."""

_SHOWN = 4
"""Differences that an error lists."""


@dataclass(frozen=True)
class DataRecord:
    """Identity of the data of a run.

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
    """Write the record of a run's data into its folder."""
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


@dataclass
class Outcome:
    """One trained model in figures.

    Attributes:
        name: ``compressed`` or ``dense``.
        metrics: The last evaluation.
        params: Parameters of the whole model.
        layer_params: Parameters of its tensor-train layers, or of the dense layers in their place.
        layer_dense_params: Entries of the dense weights those layers stand for.
        bytes: Size of ``model.safetensors``.
        seconds: Time in training steps.
        steps: Optimizer steps.
        ranks: What rank learning reported, if it ran.
        test: The same figures as ``metrics`` of data by which nothing was chosen, if there are any.
        checkpoint_bytes: Size of a checkpoint, the mean of those kept, as a lossy one needs what it
            links to. None without checkpoints.
    """

    name: str
    metrics: dict[str, float]
    params: int
    layer_params: int
    layer_dense_params: int
    bytes: int
    seconds: float
    steps: int
    ranks: dict[str, Any] | None = None
    test: dict[str, float] = dataclasses.field(default_factory=dict)
    checkpoint_bytes: float | None = None


def read_outcome(folder: Path) -> Outcome:
    """Return what came of a finished model, from its folder; raises what reading it does."""
    facts = read_result(folder)
    names = {field.name for field in dataclasses.fields(Outcome)}
    return Outcome(**{name: value for name, value in facts.items() if name in names})


def outcome_cells(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of finished models, given as in ``result.json``.

    Where there are two, a last column has the ratio of the second to the first.
    """
    two = len(results) == 2
    rows: list[list[str]] = []

    def row(label: str, values: Sequence[float | None], form: str, ratio: bool = True) -> None:
        cells = ["–" if value is None else f"{value:{form}}" for value in values]
        if two:
            first, second = values
            cells.append(f"{second / first:,.2f}" if ratio and first and second is not None else "")
        rows.append([label, *cells])

    for part, data in (("metrics", "evaluation"), ("test", "test")):
        for key in dict.fromkeys(key for facts in results for key in facts.get(part, {})):
            row(f"{data} {key}", [facts.get(part, {}).get(key) for facts in results], ",.4f")
    for label, key, form in (
        ("parameters", "params", ","),
        ("parameters of the tensorised layers", "layer_params", ","),
        ("bytes of model.safetensors", "bytes", ","),
        ("seconds in training steps", "seconds", ",.1f"),
    ):
        row(label, [facts[key] for facts in results], form)
    row("seconds a step", [facts["seconds"] / facts["steps"] for facts in results], ".3g")
    row("steps", [facts["steps"] for facts in results], ",", ratio=False)
    names = [facts["name"] for facts in results]
    return ["", *names, *(["dense / compressed"] if two else [])], rows


def outcome_table(outcomes: list[Outcome]) -> Table:
    """Set figures of the models side by side."""
    header, rows = outcome_cells([vars(outcome) for outcome in outcomes])
    table = Table(title="after training")
    for name in header:
        table.add_column(name, justify="right" if name else "left")
    for cells in rows:
        table.add_row(*cells)
    return table


_WRITTEN_BY_A_RUN = (
    CATEGORIES, "checkpoints", "comera.json", "dense", NAME, "metrics.jsonl",
    "model.safetensors", "report.html", "result.json", "tensorboard", "tokenizer.json",
)  # fmt: skip

_LET_IT_END = (
    ": it was interrupted in the late stage of rank learning, whose length follows from that "
    "number; let it end with the old one, and give it more afterwards"
)

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
    """Return whether there is a file, or a folder with anything in it but a lock."""
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
