"""Commands for what has been trained: ``list``, ``evaluate``, ``predict`` and ``export``."""

import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from comera.recipes.build import find_device, without_remarks
from comera.recipes.data_record import DataRecord, missing_data, named_data, with_places
from comera.recipes.folder import other_data
from comera.recipes.list_runs import files_table, is_run, runs_table
from comera.recipes.run_commands import changes_of
from comera.recipes.tasks.task import Task
from comera.recipes.tasks.task_kinds import kind_of, prepare_task
from comera.recipes.trained import TrainedRun, as_json, export, load_run, predictions

# The remark that the machine was not measured is muted: these commands are about no speed.
_quiet = without_remarks("comera.machine")


@_quiet
def list_runs(folder: str = "runs", /, *, console: Console) -> None:
    """Show what runs there are, or what the files of one are.

    Args:
        folder: Folder of runs, or of one.
    """
    path = Path(folder).expanduser()
    console.print(files_table(path) if is_run(path) else runs_table(path))


@_quiet
def evaluate(
    run: str,
    /,
    *,
    device: str = "auto",
    set: list[str] = [],  # noqa: B006
    console: Console,
) -> None:
    """Evaluate a trained model again, beside what its run has noted.

    Args:
        run: Folder of a finished run.
        device: As of a run.
        set: Where its data are now, if they have moved: --set='[nli.train=pairs.jsonl]'.
    """
    places = changes_of(set)
    console.print(evaluation(Path(run).expanduser(), find_device(device), places, console))


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
    """Predict something for each line of text or row of clicks: a line of JSON each.

    Args:
        run: Folder of a finished run.
        file: Lines of text, or rows of clicks as JSON; without it they are read as they come.
        device: As of a run.
        tokens: Tokens that a causal language model adds.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    trained = load_run(run, device=find_device(device))
    wrong = False
    for found in predictions(trained, _lines(file), tokens):
        print(as_json(found), flush=True)
        wrong |= "error" in found
    return int(wrong)


@_quiet
def export_run(run: str, file: str, /, *, console: Console) -> None:
    """Write a trained model as a program or graph that runs without comera.

    Args:
        run: Folder of a finished run.
        file: What to write: NAME.pt2, NAME.onnx or NAME.safetensors.
    """
    said = export(load_run(run), Path(file).expanduser())
    console.print(said, markup=False, highlight=False, soft_wrap=True)


def evaluation(
    folder: Path, device: torch.device, places: Mapping[str, Any], console: Console
) -> Table:
    """Evaluate the models of a run on its data, and set that beside what it has noted.

    Args:
        folder: Folder of the run.
        device: The device that the models are evaluated on.
        places: New paths of data that have moved, by the dotted names of settings.
        console: The console that names the data which are read.

    Raises:
        FileNotFoundError: If the data are not there.
        ValueError: If they are no longer those of the run.
    """
    run = load_run(folder, device=device)
    runs = {("compressed" if run.config.tensorize else "dense"): run}
    if (folder / "dense" / "result.json").is_file():
        runs["dense"] = load_run(folder, twin=True, device=device)
    config = with_places(run.config, places)
    data = named_data(config)
    try:
        digests = kind_of(config).data_digests(config)
    except FileNotFoundError as problem:
        key = next(iter(missing_data(config)), None)
        if key is None:
            raise
        raise FileNotFoundError(
            f"{problem}; the run in {folder} was trained on that: if it is elsewhere now, give its "
            f"new place, --set='[{key}=...]'"
        ) from None
    difference = other_data(folder, DataRecord(digests))
    if difference is not None:
        raise ValueError(
            f"the data {data or 'there are'} are not those that {folder} was trained on "
            f"({difference})"
        )
    if data:
        console.print(f"data: {data}", markup=False, highlight=False, soft_wrap=True)
    task = prepare_task(config, device, digests)
    table = Table(title=f"evaluation of {folder}")
    table.add_column("")
    columns: list[dict[str, float]] = []
    for name, trained in runs.items():
        for column in (name, "as noted"):
            table.add_column(column, justify="right")
        columns += [_figures(task, trained), _noted(trained)]
    for key in columns[0]:
        cells = [f"{column[key]:.4f}" if key in column else "" for column in columns]
        table.add_row(key, *cells)
    return table


def _figures(task: Task, run: TrainedRun) -> dict[str, float]:
    with torch.no_grad():
        found = {f"evaluation {key}": value for key, value in task.evaluate(run.model).items()}
        if task.test is not None:
            found |= {f"test {key}": value for key, value in task.test(run.model).items()}
    return found


def _noted(run: TrainedRun) -> dict[str, float]:
    parts = {"evaluation": run.result.get("metrics"), "test": run.result.get("test")}
    return {
        f"{name} {key}": value
        for name, part in parts.items()
        for key, value in (part or {}).items()
    }


def _lines(file: str | None) -> Iterator[str]:
    """Read lines; bytes that are no text come through as surrogates, which name their line."""
    if file is None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        yield from sys.stdin
        return
    path = Path(file).expanduser()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, and a file of lines is needed")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        yield from lines
