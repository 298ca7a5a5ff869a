"""Read and write the folder of a run: settings, record of the data, and result."""

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

from comera.checkpoint.archive import Archive, take
from comera.checkpoint.chain import CheckpointChain
from comera.data.click_files import CATEGORIES
from comera.extras import check_known, listed
from comera.files import write_text
from comera.planning.printing import Table
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run_config import RunConfig, TrainConfig
from comera.train.log import from_json

NAME = "data_digests.json"  # name of the record of a run's data

_SHOWN = 4  # differences that an error lists


@dataclass(frozen=True)
class DataRecord:
    """Identity of the data of a run."""

    files: Mapping[str, str]  # digests of all files that are read, by name
    prepared: str | None = None  # digest of the tokens or rows made of them, once known


def read_record(folder: Path) -> DataRecord | None:
    """Return the data record in a run's folder, or None; ``ValueError`` if it cannot be read."""
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


def changed_data(there: DataRecord, here: DataRecord) -> str | None:
    """Return how data differ, as ``2 files: a.py changed, b.py new``; None if files only moved."""
    gone = {name: digest for name, digest in there.files.items() if name not in here.files}
    new = {name: digest for name, digest in here.files.items() if name not in there.files}
    moved = {*gone.values()} & {*new.values()}
    lines = [
        *(f"{name} changed" for name, d in here.files.items() if there.files.get(name, d) != d),
        *(f"{name} new" for name, d in new.items() if d not in moved),
        *(f"{name} no longer read" for name, d in gone.items() if d not in moved),
    ]
    if lines:
        count = f"{len(lines)} file{'s' if len(lines) > 1 else ''}"
        return f"{count}: {listed(lines, _SHOWN)}"
    if None not in (there.prepared, here.prepared) and there.prepared != here.prepared:
        return (
            "the files are the same, but comera or tokenizers, in another version, reads them "
            "otherwise, or they are in another order"
        )
    return None


def _path_keys(config: RunConfig) -> list[str]:
    return [each.name for each in dataclasses.fields(config.data) if "path" in each.metadata]


def with_whole_paths(config: RunConfig) -> RunConfig:
    """Return the settings with absolute paths to the data."""

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(each) for each in value]
        if not value or value.startswith("datasets:"):
            return value
        return os.path.abspath(os.path.expanduser(value))

    paths = {key: whole(getattr(config.data, key)) for key in _path_keys(config)}
    data = dataclasses.replace(config.data, **paths)
    return dataclasses.replace(config, **{config.task: data})


def with_places(config: RunConfig, places: Mapping[str, Any]) -> RunConfig:
    """Return the settings with new paths to the data, made absolute.

    ``places`` has the new paths by dotted names of settings. Raises ``ValueError`` if a name is not
    a setting for a path of the run's data, or a value is no path.
    """
    known = [f"{config.task}.{key}" for key in _path_keys(config)]
    values = asdict(config.data)
    for word, place in places.items():
        check_known(word, known, f"{word} does not say where data of this run are")
        values[word.partition(".")[2]] = place
    data = parse_settings(type(config.data), values, f"{config.task}.")
    return with_whole_paths(dataclasses.replace(config, **{config.task: data}))


def data_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the paths to data that a run names, with the dotted names of their settings."""
    for key in _path_keys(config):
        value = getattr(config.data, key)
        for path in value if isinstance(value, list) else [value]:
            if path and not path.startswith("datasets:"):
                yield f"{config.task}.{key}", os.path.expanduser(path)


def missing_data(config: RunConfig) -> dict[str, str]:
    """Return, by dotted name, the first missing path of each setting that names paths."""
    found: dict[str, str] = {}
    for key, path in data_paths(config):
        if not Path(path).exists():
            found.setdefault(key, path)
    return found


def place_of_moved(problem: FileNotFoundError, config: RunConfig, option: str) -> FileNotFoundError:
    """Return the error for data of a started run that are gone, with the option for their place."""
    key = next(iter(missing_data(config)), None)
    if key is None:
        return problem
    return FileNotFoundError(
        f"{problem}; the run in {config.out} was begun with that: if it is elsewhere now, give its "
        f"new place, {option.format(key)}"
    )


def read_result(folder: Path) -> dict[str, Any]:
    """Return the figures of a trained model, from its folder.

    Raises ``FileNotFoundError`` if the model is not finished, and ``ValueError`` if the file is
    damaged, with a command to write it again.
    """
    path = folder / "result.json"
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
    """One trained model in figures."""

    name: str  # compressed or dense
    metrics: dict[str, float]  # the last evaluation
    params: int  # of the whole model
    layer_params: int  # of its tensor-train layers, or of the dense layers in their place
    layer_dense_params: int  # entries of the dense weights of those layers
    bytes: int  # of model.safetensors
    seconds: float  # in training steps
    steps: int
    ranks: dict[str, Any] | None = None  # report of rank learning, if it ran
    test: dict[str, float] = field(default_factory=dict)  # as metrics, on test data
    checkpoint_bytes: float | None = None  # mean of the checkpoints that are kept
    processor_seconds: float | None = None  # of all processors, in training steps
    peak_memory: int | None = None  # bytes of training above those before the model was made
    state_bytes: int | None = None  # of the optimizer's state at the start
    forward_seconds: float | None = None  # of a pass over a batch in evaluation mode
    ran: dict[str, Any] = field(default_factory=dict)  # date, machine and versions


def outcome_cells(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of models; two models also get their ratios."""
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


def outcome_text(outcomes: list[Outcome]) -> str:
    return Table("after training", *outcome_cells([vars(each) for each in outcomes])).text()


WRITTEN_BY_A_RUN = {
    "config.yaml": "all settings; comera train takes it",
    NAME: "digests of the data that it was begun with",
    "metrics.jsonl": "what was logged, a line each",
    "tensorboard": "what was logged, as curves of TensorBoard",
    "checkpoints": "states to go on from; comera checkpoint looks into them",
    "result.json": "figures of the trained model",
    "model.safetensors": "its weights; comera.load_run(folder) makes the model",
    "comera.json": "what its layers are",
    "tokenizer.json": "its vocabulary, for the package tokenizers",
    CATEGORIES: "the rows of its tables by the categories of the log",
    "dense": "the same of the dense twin",
    "report.html": "pictures, written by comera report",
}
"""What each file or folder of a run is, by its name."""

_LET_IT_END = (
    ": it was interrupted in the late stage of rank learning, whose length follows from that "
    "number; let it end with the old one, and give it more afterwards"
)

_IN_EVERY_CONFIG = {"seed", "device", "train", "optimizer", "twin"}


@dataclass(frozen=True)
class Begun:
    """Differences between the run started in a folder and new settings, ``key: there -> here``."""

    others: list[str] = field(default_factory=list)  # those that make it another run
    rhythm: list[str] = field(default_factory=list)  # those without effect on the trained model
    longer: bool = False  # the new settings have more steps or epochs
    why_not_longer: str = ""  # why the started run cannot have another length
    moved: bool = False  # the data are at another place now

    @property
    def difference(self) -> str | None:
        """Text on the first settings that make it another run; None if there are none."""
        return listed(self.others, _SHOWN) + self.why_not_longer or None

    def is_finished(self, folder: Path) -> bool:
        """Return whether the folder holds the result of a run with these settings."""
        # Only digests show whether data at another place are the same.
        if self.others or self.longer or self.moved:
            return False
        try:
            read_result(folder)
        except (OSError, ValueError):  # the run writes a damaged one again
            return False
        return True


@contextlib.contextmanager
def lock(folder: Path, what: str = "run") -> Iterator[None]:
    """Make and lock the folder of a run or sweep; raise ``FolderInUseError`` if it is locked."""
    file = FileLock(folder / ".lock", timeout=0)
    take(file, folder, f": let that {what} end, or choose another --out")
    try:
        yield
    finally:
        file.release()


def begun(folder: Path) -> bool:
    """Return whether a folder has a run to resume, or its result."""
    return bool(Archive(folder / "checkpoints").steps()) or (folder / "result.json").exists()


def begun_run(config: RunConfig) -> Begun | None:
    """Compare the run started in the folder with these settings; None if there is none.

    Fields of the dataclasses mark settings that may change in a run. More steps make another run
    only in the late stage of rank learning, whose pace depends on them, and where checkpoints of a
    trained model are gone. A new path of moved data does not make another run.
    """
    folder = Path(config.out)
    if not begun(folder) or not (folder / "config.yaml").is_file():
        return None
    try:
        there = read_yaml(folder / "config.yaml")
    except ValueError as problem:
        return Begun([str(problem)])
    marks = {
        within + each.name: each.metadata.get("identity")
        for kind, within in ((RunConfig, ""), (TrainConfig, "train."))
        for each in dataclasses.fields(kind)
    }
    found = dict(differences(there, settings_of(config)))
    shown = {
        key: f"{key}: " + " -> ".join("{...}" if isinstance(v, dict) else str(v) for v in pair)
        for key, pair in found.items()
    }
    restarts = config.checkpoints.restart or any(found.get("checkpoints.restart", ()))
    told = ("checkpoints", "train.save_every") if restarts else ()  # then the model depends on them
    no_identity = [f"{k}." for k, mark in marks.items() if mark is False and k not in told]
    rhythm = {key for key in found if any(f"{key}.".startswith(no) for no in no_identity)}
    paths = {f"{config.task}.{key}" for key in _path_keys(config)}
    moved = {key for key, (old, new) in found.items() if key in paths and _has_moved(old, new)}
    lengths = {key for key in found if marks.get(key) == "length"}
    longer = any(old and new and new > old for old, new in (found[key] for key in lengths))
    why_not = _why_not_longer(folder) if longer else ""
    same = rhythm | moved | (lengths if longer and not why_not else set())
    others = [shown[key] for key in shown if key not in same]
    harmless = [shown[key] for key in shown if key in rhythm]
    return Begun(others, harmless, longer, why_not, bool(moved))


def _has_moved(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(old, new, strict=True)
        return len(old) == len(new) and all(a == b or _has_moved(a, b) for a, b in pairs)
    return isinstance(old, str) and isinstance(new, str) and not os.path.exists(old)


def other_data(folder: Path, record: DataRecord) -> str | None:
    """Return how data differ from the data recorded in a run's folder, or None."""
    recorded = read_record(folder) if begun(folder) else None
    return None if recorded is None else changed_data(recorded, record)


def check_folder(config: RunConfig, found: Begun | None) -> None:
    """Raise ``ValueError`` if a run may not use its folder; nothing is written or deleted.

    Reasons are another run in it, without ``overwrite``, other files of the names that a run
    writes, and the run's data in it.
    """
    folder = Path(config.out)
    ours = _written_by_a_run(folder)
    foreign = sorted(name for name in WRITTEN_BY_A_RUN.keys() - ours if _holds(folder / name))
    if ours and not config.twin:  # nothing will be written there
        foreign = [name for name in foreign if name != "dense"]
    if foreign:
        raise ValueError(
            f"{folder} holds {', '.join(foreign)} that no run here has written: "
            "choose another --out, or move that away"
        )
    if config.overwrite or not begun(folder):
        for key, path in data_paths(config):
            if Path(path).resolve().is_relative_to(folder.resolve()):
                raise ValueError(
                    f"{folder} holds what the run is to read ({key}={path}): choose another --out, "
                    "where there are no data"
                )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"out={config.out}: {there} is a file, choose a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(
            f"{folder} cannot be written: {there} may only be read; choose another --out"
        )
    if found is not None and found.others and not config.overwrite:
        raise ValueError(
            f"{folder} holds a run with other settings ({found.difference}); "
            "choose another --out, or start again with --overwrite=true"
        )


def check_data(config: RunConfig, record: DataRecord) -> None:
    """Raise ``ValueError`` if the folder's run has other data and ``overwrite`` is not set."""
    difference = None if config.overwrite else other_data(Path(config.out), record)
    if difference is not None:
        raise ValueError(
            f"{config.out} holds a run that was begun with other data ({difference}); restore "
            "them, choose another --out, or start again with --overwrite=true"
        )


def claim(config: RunConfig, record: DataRecord, found: Begun | None) -> None:
    """Write the settings and the data record of a run into its checked folder.

    This deletes files of an earlier run that is replaced or cannot be resumed, and no others.
    """
    folder = Path(config.out)
    if not config.overwrite and found is not None and found.longer:  # it will have another result
        for place in ("", "dense"):
            (folder / place / "result.json").unlink(missing_ok=True)
    if config.overwrite or not (folder / "checkpoints").is_dir():
        _delete(folder, _written_by_a_run(folder) - {"config.yaml"})  # which is replaced at once
    write_settings(config)  # how checkpoints are kept may be new
    write_text(folder / NAME, json.dumps(asdict(record), indent=1))


def write_settings(config: RunConfig) -> None:
    text = yaml.safe_dump(settings_of(config), sort_keys=False)
    write_text(Path(config.out) / "config.yaml", text)


def _delete(folder: Path, names: Iterable[str]) -> None:
    """Delete files of these names that a run wrote, and no other files in its folders."""
    for name in names:
        path = folder / name
        if name == "checkpoints":
            Archive(path).clear()
        elif name == "dense":
            _delete(path, WRITTEN_BY_A_RUN.keys() - {"dense", "config.yaml"})
        elif name == "tensorboard":
            for events in path.glob("events.out.tfevents.*"):
                events.unlink()
        else:
            path.unlink(missing_ok=True)
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()


def _holds(path: Path) -> bool:
    if path.is_dir():
        return any(entry.name != ".lock" for entry in path.iterdir())
    return path.exists()


def _written_by_a_run(folder: Path) -> set[str]:
    """Return the names of files that a run wrote into the folder; none if it holds no run.

    The ``config.yaml`` must have the settings that every run has; if it cannot be read, a
    checkpoint or a result counts instead.
    """
    try:
        settings = read_yaml(folder / "config.yaml")
    except FileNotFoundError:
        return set()
    except ValueError:
        settings = dict.fromkeys(_IN_EVERY_CONFIG, None) if begun(folder) else {}
    if not settings.keys() >= _IN_EVERY_CONFIG:
        return set()
    return WRITTEN_BY_A_RUN.keys() - ({"dense"} if not settings["twin"] else set())


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings as in ``config.yaml``: absolute paths, lists for tuples, no folder."""
    settings = with_whole_paths(config).settings()
    for key in ("out", "overwrite"):
        del settings[key]
    return json.loads(json.dumps(settings))


def _why_not_longer(folder: Path) -> str:
    """Return why the run started in a folder cannot have another length; empty if it can."""
    for place in (folder, folder / "dense"):
        if (place / "result.json").exists() and not Archive(place / "checkpoints").steps():
            return ": its checkpoints, from which it would go on, are gone"
    with contextlib.suppress(OSError, ValueError):  # the run says so when it reads its checkpoint
        ranks = CheckpointChain(folder / "checkpoints").load().extra.get("ranks") or {}
        if ranks.get("late_goal") is not None and ranks["forced"] is None:
            return _LET_IT_END
    return ""


def differences(there: Any, here: Any, within: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what differs in two mappings of settings, by dotted key."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*there, *here]):
            path = f"{within}.{key}" if within else str(key)
            yield from differences(there.get(key), here.get(key), path)
    elif there != here:
        yield within, (there, here)
