"""The command ``comera``: from words to what carries them out, and to one line where it cannot."""

import contextlib
import io
import logging
import os
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

import torch
from jsonargparse import ArgumentParser, set_parsing_settings
from rich.console import Console

from comera import __version__
from comera._command import imports_are_done
from comera.allocator import reuse_freed_memory
from comera.checkpoint.archive import FolderInUseError
from comera.extras import MissingPackageError, did_you_mean
from comera.recipes.after_training import COMMANDS, add_commands, run_command
from comera.recipes.chains import add_checkpoint, run_checkpoint
from comera.recipes.doctor import examine
from comera.recipes.jobs import INTERRUPTED
from comera.recipes.list_runs import holds_runs
from comera.recipes.parse import described, file_of, parser_of, wanted
from comera.recipes.report.run_report import write_report
from comera.recipes.report.sweep_report import write_sweep_report
from comera.recipes.run_commands import (
    RUN_COMMANDS,
    add_run_commands,
    asks_for_help,
    run_run_command,
    run_settings,
    with_underscores,
)
from comera.recipes.run_config import RunConfig
from comera.recipes.sweep_commands import SWEEP_COMMANDS, add_sweep_commands, run_sweep_command
from comera.train.processes import OtherProcessError, count_started, rank_started
from comera.train.step import NonFiniteLossError

_FILE_WIDTH = 120
"""Characters of a line where no terminal says how many."""

_ONE_PROCESS = (
    "started as {count} processes (WORLD_SIZE={count}), which only comera train makes use of: "
    "start comera {command} once, without torchrun (or unset WORLD_SIZE)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Of several processes that torchrun has started, the first one speaks for all.
    """
    imports_are_done()
    words = list(sys.argv[1:] if arguments is None else arguments)
    count, rank = count_started(os.environ), rank_started(os.environ)
    speaks = count == 1 or rank == 0
    logging.basicConfig(format="%(message)s", level=logging.INFO if speaks else logging.ERROR)
    console, errors = Console(), Console(stderr=True)
    for each in (console, errors):
        if not each.is_terminal:
            each.width = _FILE_WIDTH
    if count > 1 and words[:1] not in (["train"], []):
        # All of them would do the same; the first alone says so.
        if speaks:
            _print_error(_ONE_PROCESS.format(count=count, command=words[0]), errors)
        return 1
    try:
        chosen = _understood(words, speaks)
    except (ValueError, OSError) as problem:
        if speaks:
            _print_error(_said(problem), errors)
        return 1
    try:
        if isinstance(chosen, RunConfig):
            return run_run_command(words[0], chosen, console, count)
        return _carried_out(chosen, console)
    except KeyboardInterrupt:  # where there is nothing to save
        if speaks:
            console.print("interrupted")
        return INTERRUPTED
    except (
        ValueError,
        OSError,
        NonFiniteLossError,
        FolderInUseError,
        MissingPackageError,
        OtherProcessError,
    ) as problem:
        # What the processes have found together the first one says; else each its own.
        if speaks or not isinstance(problem, NonFiniteLossError | OtherProcessError):
            said = _said(problem)
            _print_error(said if speaks else f"in process {rank}: {said}", errors)
        return 1


def _said(problem: Exception) -> str:
    """Return what a problem says, without the number that the system has for it."""
    if not isinstance(problem, OSError) or problem.strerror is None:
        return str(problem)
    return ": ".join(str(part) for part in (problem.filename, problem.strerror) if part)


def _print_error(text: str, console: Console) -> None:
    console.print("[bold red]error:[/]", end=" ")
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _understood(words: Sequence[str], speaks: bool) -> RunConfig | Namespace:
    """Return the settings of ``train`` or ``plan``, or the options of another command."""
    if words and words[0] in RUN_COMMANDS and not asks_for_help(words):
        return run_settings(words[1:])
    parser = make_parser(_wanted(words))
    words = _respelled(parser, words)
    with contextlib.nullcontext() if speaks else contextlib.redirect_stderr(io.StringIO()):
        return parser.parse_args(words)


def _respelled(parser: Any, words: Sequence[str]) -> list[str]:
    """Return words with options as they are called, hyphens being as good as underscores.

    Raises:
        ValueError: If there is no command or option of such a name, with a guess what was meant,
            which argparse has not, or an option takes other values.
    """
    command, before, rest = "comera", list[str](), list(words)
    while (below := getattr(parser, "_subcommands_action", None)) is not None:
        known = below._name_parser_map
        if not rest:
            raise ValueError(f"{command} needs a command; there are {', '.join(known)}")
        if rest[0].startswith("-"):
            return list(words)
        if rest[0] not in known:
            raise ValueError(f"{command} has no command {rest[0]}{did_you_mean(rest[0], known)}")
        before.append(rest.pop(0))
        command, parser = f"{command} {before[-1]}", known[before[-1]]
    options = [option for action in parser._actions for option in action.option_strings]
    rest = [with_underscores(word, options.__contains__) for word in rest]
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        short = parser.allow_abbrev and any(name.startswith(option) for name in options)
        if option not in options and not short:
            raise ValueError(f"{command} has no option {option}{did_you_mean(option, options)}")
    for place, word in enumerate(rest):
        name, equals, text = word.partition("=")
        hint = next((_hint(each) for each in parser._actions if name in each.option_strings), None)
        if hint is not None and (equals or rest[place + 1 :]):
            _check_value(name, text if equals else rest[place + 1], hint)
    return [*before, *rest]


def _hint(action: Any) -> Any:
    """Return the type that an option takes; None of one that a parser has by itself."""
    return Literal[tuple(action.choices)] if action.choices else getattr(action, "_typehint", None)


def _check_value(name: str, text: str, hint: Any) -> None:
    """Raise ``ValueError`` for a value of another type, which the parser says in its own words."""
    if hint is str:
        return
    try:
        parser_of(hint).parse_args([f"--value={text}"])
    except ArgumentError:
        example = f": {name}='[{text}]'" if get_origin(hint) is list else ""
        raise ValueError(f"{name}={text} must be {wanted(hint)}{example}") from None


def _wanted(words: Sequence[str]) -> str | None:
    """Return the command whose options are needed; None if it may be any, as to complete them."""
    return None if any("completion" in word for word in words[:1]) else "".join(words[:1])


def make_parser(chosen: str | None = None) -> ArgumentParser:
    """Make the parser of the ``comera`` command.

    Args:
        chosen: The command that is typed: of others that take long only the names are there. None
            for all of all.
    """
    set_parsing_settings(add_print_completion_argument=True)  # comera --print_completion SHELL
    parser = ArgumentParser(
        prog="comera",
        description="Train models in compressed form.",
        version=__version__,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(dest="command")
    add_run_commands(commands, chosen is None or chosen in RUN_COMMANDS)
    add_sweep_commands(commands)
    init = ArgumentParser(
        description="Print a configuration to begin with: comera init NAME > mine.yaml"
    )
    init.add_argument(
        "name", type=str, nargs="?", help="Name of a configuration; without it all are listed."
    )
    commands.add_subcommand("init", init, help="Print a configuration to begin with, or list all.")
    text = "Write one HTML file about a run or a sweep."
    report = ArgumentParser(description=text)
    report.add_argument("folder", type=str, help="Folder of the run or the sweep.")
    commands.add_subcommand("report", report, help=text)
    add_commands(commands)
    add_checkpoint(commands)
    measure = ArgumentParser(description="Time this machine and save what was found.")
    measure.add_argument(
        "--device", type=Literal["cpu", "cuda"], default="cpu", help="Device to measure."
    )
    measure.add_argument(
        "--threads",
        type=int,
        help="Number of CPU threads to measure with (default: what torch chooses).",
    )
    commands.add_subcommand("calibrate", measure, help="Measure this machine for the planner.")
    text = "Show what was found for CUDA kernels, and which way each operator goes."
    commands.add_subcommand("doctor", ArgumentParser(description=text), help=text)
    return parser


def _carried_out(chosen: Namespace, console: Console) -> int:
    """Carry out a command of one process; returns the exit status."""
    command, options = chosen.command, getattr(chosen, chosen.command)
    if command in SWEEP_COMMANDS:
        return run_sweep_command(command, options, console)
    if command in COMMANDS:
        return run_command(command, options, console)
    if command == "checkpoint":
        return run_checkpoint(options, console)
    if command == "init":
        _show_configuration(options.name)
    elif command == "report":
        _write_report(Path(options.folder).expanduser(), console)
    elif command == "doctor":
        examine(console)
    elif command == "calibrate":
        from comera.calibrate.machine import calibrate

        reuse_freed_memory()
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"threads={options.threads} must be at least 1")
            torch.set_num_threads(options.threads)
        calibrate(options.device, console.print)
    return 0


def _show_configuration(name: str | None) -> None:
    """Print as a file, not as to a terminal: no line may be broken."""
    if name is not None:
        print(file_of(name).read_text(encoding="utf-8"), end="")
        return
    listed = described()
    width = max(len(each) for each, _ in listed)
    for each, text in listed:
        print(f"{each:{width}}  {text}")


def _write_report(folder: Path, console: Console) -> None:
    def say(text: str) -> None:
        console.print(f"in {folder}, {text}", markup=False, highlight=False, soft_wrap=True)

    of_a_sweep = (folder / "results.json").is_file()
    if not of_a_sweep and not (folder / "metrics.jsonl").is_file() and holds_runs(folder):
        raise FileNotFoundError(
            f"{folder} is not a run but holds some: give one of those that comera list {folder} "
            "shows"
        )
    written = write_sweep_report(folder) if of_a_sweep else write_report(folder, say)
    console.print(f"wrote {written}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
