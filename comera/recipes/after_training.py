"""Define commands for trained runs: ``list``, ``evaluate``, ``predict``, ``export``, ``report``."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from comera.checkpoint.archive import Archive
from comera.extras import without_remarks
from comera.recipes import run_folder
from comera.recipes.cli import changes_of
from comera.recipes.jobs import LOG, last_session, why_failed
from comera.recipes.parse import read_yaml
from comera.recipes.run import find_device
from comera.recipes.run_config import TASKS
from comera.recipes.tasks.task import prepare_task
from comera.recipes.trained import export, load_run, predictions
from comera.shapes import check_whole_numbers
from comera.train.log import last_logged, print_text

_quiet = without_remarks("comera.machine")
"""Mutes the remark that the machine was not measured: these commands are about no speed."""


@_quiet
def list_runs(folder: str = "runs", /, *, console: Console) -> None:
    """List runs, or the files of one run.

    Args:
        folder: Folder of runs, or of one run.
    """
    path = Path(folder).expanduser()
    if not is_run(path):
        console.print(runs_table(path))
        return
    size = Column("MB", justify="right")
    table = Table("file", "what it is", size, title=escape(f"the run in {path}"))
    for file in sorted(path.iterdir(), key=lambda file: (file.name not in _FILES, file.name)):
        if file.name != ".lock":
            what = _FILES.get(file.name, "not written by comera train")
            table.add_row(escape(file.name), what, f"{_size(file) / _MB:.2f}")
    console.print(table)


@_quiet
def evaluate(
    run: str,
    /,
    *,
    device: str = "auto",
    set: list[str] = [],  # noqa: B006
    console: Console,
) -> None:
    """Evaluate a trained model again, beside the figures of its run.

    Args:
        run: Folder of a finished run.
        device: Device, as the setting of a run.
        set: Where the run's data are now, if they have moved: --set='[nli.train=pairs.jsonl]'.
    """
    folder, where = Path(run).expanduser(), find_device(device)
    trained = load_run(folder, device=where)
    runs = {("compressed" if trained.config.tensorize else "dense"): trained}
    if (folder / "dense" / "result.json").is_file():
        runs["dense"] = load_run(folder, twin=True, device=where)
    config = run_folder.with_places(trained.config, changes_of(set))
    data = ", ".join(f"{key}={path}" for key, path in run_folder.data_paths(config))
    try:
        digests = config.data.digests()
    except FileNotFoundError as problem:
        raise run_folder.place_of_moved(problem, config, "--set='[{}=...]'") from None
    difference = run_folder.other_data(folder, run_folder.DataRecord(digests))
    if difference is not None:
        raise ValueError(
            f"the data {data or 'there are'} are not those that {folder} was trained on "
            f"({difference})"
        )
    if data:
        print_text(console, f"data: {data}")
    task = prepare_task(config, where, digests)
    table = Table("", title=escape(f"evaluation of {folder}"))
    columns: list[dict[str, float]] = []
    for name, trained in runs.items():
        for heading in (name, "as noted"):
            table.add_column(heading, justify="right")
        found = {"evaluation": task.evaluate} | ({"test": task.test} if task.test else {})
        noted = {"evaluation": trained.result["metrics"], "test": trained.result["test"]}
        with torch.no_grad():
            columns.append(_flat({part: measure(trained.model) for part, measure in found.items()}))
        columns.append(_flat(noted))
    for key in columns[0]:
        table.add_row(key, *(f"{column[key]:.4f}" if key in column else "" for column in columns))
    console.print(table)


@_quiet
def predict(
    run: str,
    file: str | None = None,
    /,
    *,
    device: str = "auto",
    tokens: int = 40,
    console: Console,
) -> int:
    """Print a prediction, a line of JSON, for each line of text or row of clicks.

    Args:
        run: Folder of a finished run.
        file: File of lines of text, or of rows of clicks as JSON (default: the standard input).
        device: Device, as the setting of a run.
        tokens: Tokens that a causal language model adds.
    """
    check_whole_numbers(1, tokens=tokens)
    trained = load_run(run, device=find_device(device))
    wrong = False
    for found in predictions(trained, _lines(file), tokens):
        print(json.dumps(found, ensure_ascii=False), flush=True)
        wrong |= "error" in found
    return int(wrong)


@_quiet
def export_run(run: str, file: str, /, *, console: Console) -> None:
    """Write a trained model as a program or graph that runs without comera.

    Args:
        run: Folder of a finished run.
        file: File to write: NAME.pt2, NAME.onnx or NAME.safetensors.
    """
    print_text(console, export(load_run(run), Path(file).expanduser()))


def _flat(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{part} {key}": value for part, found in parts.items() for key, value in found.items()}


def _lines(file: str | None) -> Iterator[str]:
    """Yield the lines of a file or of the standard input, with surrogates for invalid bytes."""
    if file is None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        yield from sys.stdin
        return
    with Path(file).expanduser().open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        yield from lines


_FILES = {
    **run_folder.WRITTEN_BY_A_RUN,
    LOG: "what it printed, as a run of a sweep",
    "results.json": "figures of all runs of a sweep",
    "results.md": "the same as a table",
}
_MB = 1e6


def is_run(folder: Path) -> bool:
    """Return whether a folder is the folder of a run."""
    return bool(_read(read_yaml, folder / "config.yaml").get("train"))


def report(folder: str, /, *, console: Console) -> None:
    """Write one HTML file about a run or a sweep.

    Args:
        folder: Folder of the run or the sweep.
    """
    from comera.recipes.report.run_report import write_report
    from comera.recipes.report.sweep_report import write_sweep_report

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    of_a_sweep, has_log = ((path / name).is_file() for name in ("results.json", "metrics.jsonl"))
    if not (of_a_sweep or has_log or is_run(path)) and any(_runs(path)):
        raise FileNotFoundError(
            f"{path} is not a run but holds some: give one of those that comera list {path} shows"
        )
    if of_a_sweep:
        written = write_sweep_report(path)
    else:
        written = write_report(path, lambda text: print_text(console, f"in {path}, {text}"))
    console.print(f"wrote {written}", markup=False)


def runs_table(folder: Path) -> Table:
    """Return a table of runs in a folder, last written first; ``FileNotFoundError`` without any."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")

    def written(run: Path) -> float:
        return max((path.stat().st_mtime for path in run.iterdir() if path.is_file()), default=0.0)

    runs = sorted(_runs(folder), key=written, reverse=True)
    if not runs:
        raise FileNotFoundError(f"{folder} holds no run of comera train")
    table = Table(title=escape(f"runs in {folder}"))
    for name in ("run", "task", "steps", "", "parameters", "last evaluation", "MB"):
        table.add_column(name, justify="left" if name in ("run", "task", "") else "right")
    for run in runs:
        table.add_row(escape(str(run.relative_to(folder))), *_row(run))
    return table


def _runs(folder: Path) -> Iterator[Path]:
    """Yield folders of runs, but none inside another run, such as its twin."""
    if is_run(folder) or _has_only_a_log(folder):
        yield folder
        return
    for below in sorted(folder.iterdir()):
        if below.is_dir() and not below.is_symlink():
            yield from _runs(below)


def _has_only_a_log(folder: Path) -> bool:
    return not (folder / "config.yaml").exists() and last_session(folder) is not None


def _row(run: Path) -> tuple[str, ...]:
    size = f"{_size(run) / _MB:.1f}"
    if _has_only_a_log(run):
        error = why_failed(last_session(run) or "")
        return "", "0", f"failed: {escape(error)}" if error else "not begun", "", "", size
    settings, result = _read(read_yaml, run / "config.yaml"), _read(run_folder.read_result, run)
    logged, evaluated = last_logged(run, "loss"), last_logged(run, "eval/loss")
    done = result.get("steps") or (logged[0] if logged else 0)
    of = settings["train"].get("steps") or result.get("steps")
    state = "finished" if result else _begun(run)
    has_twin = settings.get("twin") and settings.get("tensorize")
    if result and has_twin and not _read(run_folder.read_result, run / "dense"):
        state += f", its dense twin {_begun(run / 'dense')}"
    metrics = result.get("metrics") or ({"loss": evaluated[1]} if evaluated else {})
    return (
        next((name for name in TASKS if settings.get(name)), ""),
        f"{done:,} of {of:,}" if of else f"{done:,}",
        state,
        f"{result['params']:,}" if "params" in result else "",
        next((f"{name} {value:.4f}" for name, value in metrics.items()), ""),
        size,
    )


def _begun(folder: Path) -> str:
    if (folder / "result.json").is_file():
        return "result.json is damaged"
    if failed := last_logged(folder, "failed"):
        return f"failed: {str(failed[1]).split(',')[0]}"
    saved = Archive(folder / "checkpoints").steps()
    return "begun" if saved or last_logged(folder, "loss") else "not begun"


def _read(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        return read(path)
    return {}


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
