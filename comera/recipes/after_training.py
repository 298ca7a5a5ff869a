"""Commands for what has been trained: ``list``, ``evaluate``, ``predict`` and ``export``."""

import io
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
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

COMMANDS = {
    "list": "Show what runs there are, or what the files of one are.",
    "evaluate": "Evaluate a trained model again, beside what its run has noted.",
    "predict": "Predict something for each line of text or row of clicks: a line of JSON each.",
    "export": "Write a trained model as a program or graph that runs without comera.",
}


def add_commands(commands: Any) -> None:
    """Add the commands to those of ``comera``."""
    parsers = {name: ArgumentParser(description=text) for name, text in COMMANDS.items()}
    parsers["list"].add_argument(
        "folder", type=str, nargs="?", default="runs", help="Folder of runs, or of one."
    )
    for name in ("evaluate", "predict", "export"):
        parsers[name].add_argument("run", type=str, help="Folder of a finished run.")
    for name in ("evaluate", "predict"):
        parsers[name].add_argument("--device", type=str, default="auto", help="As of a run.")
    parsers["evaluate"].add_argument(
        "--set",
        type=list[str],
        default=[],
        help="Where its data are now, if they have moved: --set='[nli.train=pairs.jsonl]'.",
    )
    parsers["predict"].add_argument(
        "file",
        type=str,
        nargs="?",
        help="Lines of text, or rows of clicks as JSON; without it they are read as they come.",
    )
    parsers["predict"].add_argument(
        "--tokens", type=int, default=40, help="Tokens that a causal language model adds."
    )
    parsers["export"].add_argument(
        "file", type=str, help="What to write: NAME.pt2, NAME.onnx or NAME.safetensors."
    )
    for name, parser in parsers.items():
        commands.add_subcommand(name, parser, help=COMMANDS[name])


def run_command(command: str, options: Namespace, console: Console) -> int:
    """Carry one of them out; returns the exit status."""
    with without_remarks("comera.machine"):  # that it was not measured: these are about no speed
        return _carried_out(command, options, console)


def _carried_out(command: str, options: Namespace, console: Console) -> int:
    if command == "list":
        folder = Path(options.folder).expanduser()
        console.print(files_table(folder) if is_run(folder) else runs_table(folder))
    elif command == "evaluate":
        places = changes_of(options.set)
        folder, device = Path(options.run).expanduser(), find_device(options.device)
        console.print(evaluation(folder, device, places, console))
    elif command == "predict":
        if options.tokens < 1:
            raise ValueError(f"tokens={options.tokens} must be at least 1")
        run = load_run(options.run, device=find_device(options.device))
        wrong = False
        for found in predictions(run, _lines(options.file), options.tokens):
            print(as_json(found), flush=True)
            wrong |= "error" in found
        return int(wrong)
    else:
        said = export(load_run(options.run), Path(options.file).expanduser())
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    return 0


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
