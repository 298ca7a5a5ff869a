"""The command ``comera``.

Each command is a function: its parameters are the arguments and options, its docstring is the help.
``train`` and ``plan`` take every setting of a run instead. An error is printed in one line.
"""

import argparse
import inspect
import logging
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NoReturn

from docstring_parser import parse
from rich.console import Console

from comera import __version__
from comera._command import INTERRUPTED, imports_are_done
from comera.checkpoint.archive import FolderInUseError
from comera.extras import MissingPackageError, did_you_mean, needed_by
from comera.recipes import run_commands
from comera.recipes.parse import converted, described, file_of, wanted
from comera.train.processes import OtherProcessError, count_started, rank_started
from comera.train.step import NonFiniteLossError

COMMANDS = {
    "train": "",
    "plan": "",
    "sweep": "comera.recipes.sweep:sweep",
    "reproduce": "comera.recipes.reproduce:reproduce",
    "init": "comera.recipes.cli:init",
    "report": "comera.recipes.cli:report",
    "list": "comera.recipes.after_training:list_runs",
    "evaluate": "comera.recipes.after_training:evaluate",
    "predict": "comera.recipes.after_training:predict",
    "export": "comera.recipes.after_training:export_run",
    "checkpoint inspect": "comera.recipes.chains:inspect",
    "checkpoint verify": "comera.recipes.chains:verify",
    "checkpoint export": "comera.recipes.chains:export",
    "checkpoint evaluate": "comera.recipes.chains:evaluate",
    "checkpoint compress": "comera.recipes.chains:compress",
    "calibrate": "comera.recipes.cli:calibrate",
    "doctor": "comera.recipes.doctor:examine",
}
"""The function of each command; ``train`` and ``plan`` are those of :mod:`run_commands`."""

_FILE_WIDTH = 120  # characters of a line outside of a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; of several processes only the first prints."""
    imports_are_done()
    words = list(sys.argv[1:] if arguments is None else arguments)
    count, rank = count_started(os.environ), rank_started(os.environ)
    speaks = count == 1 or rank == 0
    logging.basicConfig(format="%(message)s", level=logging.INFO if speaks else logging.ERROR)
    console, errors = Console(), Console(stderr=True)
    for each in (console, errors):
        if not each.is_terminal:
            each.width = _FILE_WIDTH
    begun = False
    try:
        if count > 1 and words[:1] not in (["train"], []):
            raise ValueError(
                f"started as {count} processes (WORLD_SIZE={count}), which only comera train makes "
                f"use of: start comera {words[0]} once, without torchrun (or unset WORLD_SIZE)"
            )
        call = _call(words, console, count)
        begun = True
        return call()
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
        # Before the command runs all processes have the same error, which the first one prints.
        if speaks or (begun and not isinstance(problem, NonFiniteLossError | OtherProcessError)):
            text = str(problem)
            if isinstance(problem, OSError) and problem.strerror is not None:  # without its number
                text = ": ".join(filter(None, (str(problem.filename or ""), problem.strerror)))
            errors.print("[bold red]error:[/]", end=" ")
            text = text if speaks else f"in process {rank}: {text}"
            errors.print(text, highlight=False, soft_wrap=True, markup=False)
        return 1


def _call(words: Sequence[str], console: Console, count: int) -> Callable[[], int]:
    """Return a call of the command that was typed; raises ``ValueError`` for unknown words."""
    if words[:1] and words[0].startswith("-"):
        _options_of_all(words)
    command, rest = _command(words)
    if command in run_commands.RUN_COMMANDS:
        if text := run_commands.help_of(command, rest):
            print(text)
            sys.exit(0)
        settings = run_commands.typed_settings(rest)
        return lambda: run_commands.run_run_command(command, settings, console, count)
    function = _function(command)
    options = _options(command, function, rest)
    places = [p.name for p in _parameters(function) if p.kind is p.POSITIONAL_ONLY]
    first = [options.pop(name) for name in places]
    return lambda: function(*first, **options, console=console) or 0


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command, of one word or two, and the words after it."""
    found, rest = "", list(words)
    while found not in COMMANDS:
        start = f"{found} " if found else ""
        known = dict.fromkeys(
            name.removeprefix(start).split()[0] for name in COMMANDS if name.startswith(start)
        )
        if not rest:
            raise ValueError(f"comera {start}needs a command; there are {', '.join(known)}")
        word = rest.pop(0)
        if found and word in ("-h", "--help"):
            print(_help_of_commands(start))
            sys.exit(0)
        if word not in known:
            raise ValueError(f"comera {start}has no command {word}{did_you_mean(word, known)}")
        found = start + word
    return found, rest


def _function(command: str) -> Callable[..., int | None]:
    with needed_by("the command comera"):
        return resolve_name(COMMANDS[command])


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    known = inspect.signature(function).parameters.values()
    return [each for each in known if each.name != "console"]


class _Parser(argparse.ArgumentParser):
    """A parser that raises ``ValueError`` where argparse prints the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def _fill(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add a function's parameters; those without default or before ``/`` are positional."""
    texts = {p.arg_name: p.description or "" for p in parse(function.__doc__ or "").params}
    for each in _parameters(function):
        text = " ".join(texts[each.name].split()).replace("``", "").replace("%", "%%")
        if each.default is each.empty:
            parser.add_argument(each.name, help=text)
        elif each.kind is each.POSITIONAL_ONLY:
            parser.add_argument(each.name, nargs="?", default=each.default, help=text)
        else:
            shown = "" if each.default in (None, []) else f" [{each.default}]"
            parser.add_argument(f"--{each.name}", default=each.default, help=text + shown)


def _options(command: str, function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command's function; options may have hyphens for underscores."""
    text = parse(function.__doc__ or "").short_description
    parser = _Parser(prog=f"comera {command}", description=text, allow_abbrev=False)
    _fill(parser, function)
    found, unknown = parser.parse_known_args(
        [
            run_commands.with_underscores(word, parser._option_string_actions.__contains__)
            for word in words
        ]
    )
    hints = typing.get_type_hints(function)
    for word in unknown:
        name = word.partition("=")[0]
        known = [f"--{each.name}" for each in _parameters(function)]
        if name.startswith("-"):
            raise ValueError(f"comera {command} has no option {name}{did_you_mean(name, known)}")
        raise ValueError(f"comera {command} takes no more words: {word}")
    for name, given in vars(found).items():
        if isinstance(given, str):
            hint = hints[name]
            try:
                setattr(found, name, converted(run_commands.value_of(given, hint), hint))
            except ValueError:
                example = f": --{name}='[{given}]'" if typing.get_origin(hint) is list else ""
                raise ValueError(f"--{name}={given} must be {wanted(hint)}{example}") from None
    return vars(found)


def _options_of_all(words: Sequence[str]) -> NoReturn:
    """Print the help, the version or a completion script for shells."""
    option, _, shell = words[0].partition("=")
    if option in ("-h", "--help"):
        print(_help_of_commands(""))
    elif option == "--version":
        print(f"comera {__version__}")
    elif option == "--print_completion":
        import shtab

        shell = shell or "".join(words[1:2])
        if shell not in shtab.SUPPORTED_SHELLS:
            raise ValueError(f"{option}={shell} must be {', '.join(shtab.SUPPORTED_SHELLS)}")
        print(shtab.complete(make_parser(), shell))
    else:
        known = ("--help", "--version", "--print_completion")
        raise ValueError(f"comera has no option {option}{did_you_mean(option, known)}")
    sys.exit(0)


def _help_of_commands(start: str) -> str:
    lines = [f"usage: comera {start}COMMAND ...", "", "Train models in compressed form.", ""]
    for name in COMMANDS:
        if name.startswith(start):
            text = (
                run_commands.RUN_COMMANDS.get(name)
                or parse(_function(name).__doc__ or "").short_description
            )
            lines.append(run_commands.row(name, text or ""))
    return "\n".join([*lines, "", "`comera COMMAND --help` shows the options of a command."])


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands and options, by which shells complete them."""
    parser = argparse.ArgumentParser(prog="comera")
    commands = parser.add_subparsers()
    groups: dict[str, Any] = {}
    for name in COMMANDS:
        outer, _, inner = name.rpartition(" ")
        if outer and outer not in groups:
            groups[outer] = commands.add_parser(outer, help=outer).add_subparsers()
        command = groups.get(outer, commands).add_parser(inner, help=name)
        if name in run_commands.RUN_COMMANDS:
            for key in ("config", *run_commands.settings_by_name()):
                command.add_argument(f"--{key}")
        else:
            _fill(command, _function(name))
    return parser


def init(name: str | None = None, /, *, console: Console) -> None:
    """Print a configuration to begin with: comera init NAME > mine.yaml

    Args:
        name: Name of a configuration; without it all are listed.
    """
    # As a file and not as to a terminal: no line may be broken.
    if name is not None:
        print(file_of(name).read_text(encoding="utf-8"), end="")
        return
    listed = described()
    width = max(len(each) for each, _ in listed)
    for each, text in listed:
        print(f"{each:{width}}  {text}")


def report(folder: str, /, *, console: Console) -> None:
    """Write one HTML file about a run or a sweep.

    Args:
        folder: Folder of the run or the sweep.
    """
    from comera.recipes.after_training import holds_runs
    from comera.recipes.report.run_report import write_report
    from comera.recipes.report.sweep_report import write_sweep_report

    path = Path(folder).expanduser()

    def say(text: str) -> None:
        console.print(f"in {path}, {text}", markup=False, highlight=False, soft_wrap=True)

    of_a_sweep = (path / "results.json").is_file()
    if not of_a_sweep and not (path / "metrics.jsonl").is_file() and holds_runs(path):
        raise FileNotFoundError(
            f"{path} is not a run but holds some: give one of those that comera list {path} shows"
        )
    written = write_sweep_report(path) if of_a_sweep else write_report(path, say)
    console.print(f"wrote {written}", markup=False)


def calibrate(
    device: Literal["cpu", "cuda"] = "cpu", threads: int | None = None, *, console: Console
) -> None:
    """Measure this machine for the planner, and save what was found.

    Args:
        device: Device to measure.
        threads: Number of CPU threads to measure with (default: what torch chooses).
    """
    import torch

    from comera.allocator import reuse_freed_memory
    from comera.calibrate.machine import calibrate as measure

    reuse_freed_memory()
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    measure(device, console.print)
