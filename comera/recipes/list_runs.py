"""What there is in a folder of runs, and in the folder of one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from comera.checkpoint.archive import Archive
from comera.recipes.jobs import LOG, last_session, why_failed
from comera.recipes.outcome import read_result
from comera.recipes.parse import read_yaml
from comera.recipes.run_config import METRICS
from comera.train.log import last_logged

_FILES = {
    "config.yaml": "all settings; comera train takes it",
    "data_digests.json": "digests of the data that it was begun with",
    "metrics.jsonl": "what was logged, a line each",
    "tensorboard": "the same for TensorBoard",
    "checkpoints": "states to go on from; comera checkpoint looks into them",
    "result.json": "figures of the trained model",
    "model.safetensors": "its weights; comera.load_run(folder) makes the model",
    "comera.json": "what its layers are",
    "tokenizer.json": "its vocabulary, for the package tokenizers",
    "categories.safetensors": "the rows of its tables by the categories of the log",
    "dense": "the same of the dense twin",
    LOG: "what it printed, as a run of a sweep",
    "report.html": "pictures, written by comera report",
    "results.json": "figures of all runs of a sweep",
    "results.md": "the same as a table",
}
_MB = 1e6


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run."""
    return (folder / "config.yaml").is_file() and bool(_settings(folder).get("train"))


def holds_runs(folder: Path) -> bool:
    """Tell whether there are runs in a folder, or below, that is that of none itself."""
    return folder.is_dir() and not is_run(folder) and any(_runs(folder))


def runs_table(folder: Path) -> Table:
    """List the runs in a folder and below, the last one to be written to first.

    Raises:
        FileNotFoundError: If there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    runs = sorted(_runs(folder), key=lambda run: -_written(run))
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run of comera train")
    table = Table(title=f"runs in {folder}")
    for name in ("run", "task", "steps", "", "parameters", "last evaluation", "MB"):
        table.add_column(name, justify="left" if name in ("run", "task", "") else "right")
    for run in runs:
        table.add_row(str(run.relative_to(folder)), *_row(run))
    return table


def files_table(folder: Path) -> Table:
    """Say of each file in the folder of a run what it is, and how large."""
    table = Table(title=f"the run in {folder}")
    for name in ("file", "what it is", "MB"):
        table.add_column(name, justify="right" if name == "MB" else "left")
    for path in sorted(folder.iterdir(), key=lambda path: (path.name not in _FILES, path.name)):
        if path.name != ".lock":
            what = _FILES.get(path.name, "not written by comera train")
            table.add_row(path.name, what, f"{_size(path) / _MB:.2f}")
    return table


def _runs(folder: Path) -> Iterator[Path]:
    """Yield folders of runs; what is inside of one, such as its twin, is part of it."""
    if is_run(folder) or _has_only_a_log(folder):
        yield folder
        return
    for below in sorted(folder.iterdir()):
        if below.is_dir() and not below.is_symlink():
            yield from _runs(below)


def _has_only_a_log(folder: Path) -> bool:
    """Tell whether a run of a sweep was started here and has not come to write its settings."""
    return not (folder / "config.yaml").exists() and last_session(folder) is not None


def _row(run: Path) -> tuple[str, ...]:
    if not (run / "config.yaml").exists():
        return "", "0", _started(run), "", "", f"{_size(run) / _MB:.1f}"
    settings, result = _settings(run), _result(run)
    task = next((name for name in METRICS if settings.get(name)), "")
    train = settings["train"]
    logged = last_logged(run, "loss")
    done = result.get("steps") or (logged[0] if logged else 0)
    of = train.get("steps") or result.get("steps")
    state = "finished" if result else _begun(run)
    if result and _has_twin(settings) and not _result(run / "dense"):
        state += f", its dense twin {_begun(run / 'dense')}"
    metrics = result.get("metrics") or {}
    first = next(iter(metrics), None)
    shown = f"{first} {metrics[first]:.4f}" if first else _last_evaluation(run)
    params = f"{result['params']:,}" if "params" in result else ""
    return (
        task, f"{done:,} of {of:,}" if of else f"{done:,}", state, params, shown,
        f"{_size(run) / _MB:.1f}",
    )  # fmt: skip


def _has_twin(settings: dict[str, Any]) -> bool:
    """Tell whether a run trains a second model; of a dense one there is no twin."""
    return bool(settings.get("twin") and settings.get("tensorize"))


def _begun(folder: Path) -> str:
    if (folder / "result.json").is_file():
        return "result.json is damaged"
    if failed := last_logged(folder, "failed"):
        return f"failed: {str(failed[1]).split(',')[0]}"
    saved = Archive(folder / "checkpoints").steps()
    return "begun" if saved or last_logged(folder, "loss") else "not begun"


def _started(run: Path) -> str:
    """Return the state of a run that has nothing but a log."""
    error = why_failed(last_session(run) or "")
    return f"failed: {escape(error)}" if error else "not begun"


def _last_evaluation(run: Path) -> str:
    found = last_logged(run, "eval/loss")
    return f"loss {found[1]:.4f}" if found else ""


def _settings(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        return read_yaml(folder / "config.yaml")
    return {}


def _result(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        return read_result(folder)
    return {}


def _written(run: Path) -> float:
    times = [path.stat().st_mtime for path in run.iterdir() if path.is_file()]
    return max(times, default=0.0)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
