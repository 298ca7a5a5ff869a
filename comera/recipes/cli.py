"""Run the command ``comera``.

Each command is a function: its parameters are the arguments and options, its docstring is the help.
``train`` and ``plan`` take every setting of a run instead, as an option by its dotted name:
``--help`` prints the settings that one changes first, ``--help_all`` all settings. An error is
printed in one line.
"""

import argparse
import difflib
import functools
import inspect
import logging
import os
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import docstring_parser
import torch
import yaml
from rich.console import Console

from comera import __version__
from comera._command import INTERRUPTED
from comera.allocator import reuse_by_default
from comera.checkpoint.archive import FolderInUseError
from comera.extras import MissingPackageError, check_known, did_you_mean, error_prefix, needed_by
from comera.recipes import parse
from comera.recipes.run_config import RunConfig
from comera.train import processes
from comera.train.processes import OtherProcessError
from comera.train.step import NonFiniteLossError

COMMANDS = {
    "train": "",
    "plan": "",
    "front": "comera.recipes.front:front",
    "sweep": "comera.recipes.sweep:sweep",
    "init": "comera.recipes.parse:init",
    "report": "comera.recipes.after_training:report",
    "list": "comera.recipes.after_training:list_runs",
    "evaluate": "comera.recipes.after_training:evaluate",
    "predict": "comera.recipes.after_training:predict",
    "export": "comera.recipes.after_training:export_run",
    "checkpoint inspect": "comera.recipes.chains:inspect",
    "checkpoint verify": "comera.recipes.chains:verify",
    "checkpoint export": "comera.recipes.chains:export",
    "checkpoint evaluate": "comera.recipes.chains:evaluate",
    "checkpoint compress": "comera.recipes.chains:compress",
    "calibrate": "comera.recipes.doctor:calibrate",
    "doctor": "comera.recipes.doctor:examine",
}
"""The function of each command; ``train`` and ``plan`` are :func:`train_or_plan`."""

RUN_COMMANDS = {
    "train": "Train a run, or resume it.",
    "plan": "Show what a run would train, and what it would be compressed to.",
}

FIRST = (
    "out", "train.steps", "train.epochs", "train.batch_size", "train.precision", "optimizer.name",
    "optimizer.lr", "tensorize.rank", "two_stage.target", "seed", "device", "twin", "overwrite",
)  # fmt: skip
"""Settings that ``--help`` shows."""

_MINUTES = 60.0  # how long a process waits for the others, as while one reads the data
_COLUMN, _WIDEST = 26, 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; of several processes only the first prints."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    count, rank, speaks = processes.count_started(os.environ), 0, True
    console, errors = Console(), Console(stderr=True)
    for each in (console, errors):
        if not each.is_terminal and not os.environ.get("COLUMNS"):
            each.width = 120
    begun = False
    try:
        rank = processes.rank_started(os.environ)
        speaks = count == 1 or rank == 0
        logging.basicConfig(format="%(message)s", level=logging.INFO if speaks else logging.ERROR)
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
        ValueError, OSError, NonFiniteLossError, FolderInUseError, MissingPackageError,
        OtherProcessError,
    ) as problem:  # fmt: skip
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
    """Return a function that runs the typed command; ``ValueError`` for what it does not take."""
    if words[:1] and words[0].startswith("-"):
        _options_of_all(words)
    command, rest = _command(words)
    if command in RUN_COMMANDS:
        if text := help_of(command, rest):
            print(text)
            sys.exit(0)
        settings = typed_settings(rest)
        return lambda: train_or_plan(command, settings, console, count)
    function = _function(command)
    options = _options(command, function, rest)
    places = [p.name for p in _parameters(function) if p.kind is p.POSITIONAL_ONLY]
    first = [options.pop(name) for name in places]
    return lambda: function(*first, **options, console=console) or 0


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command, which has one word or two, and the words after the command."""
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
        check_known(word, known, f"comera {start}has no command {word}")
        found = start + word
    return found, rest


def _function(command: str) -> Callable[..., int | None]:
    with needed_by("the command comera"):
        return resolve_name(COMMANDS[command])


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    known = inspect.signature(function).parameters
    return [each for name, each in known.items() if name != "console"]


class _Parser(argparse.ArgumentParser):
    """A parser that raises ``ValueError`` instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def _summary(function: Callable[..., Any]) -> str:
    return docstring_parser.parse(function.__doc__ or "").short_description or ""


def _texts(*holders: Any) -> dict[str, str]:
    """Return what docstrings say of each parameter; the last one that names it counts."""
    params = [each for of in holders for each in docstring_parser.parse(of.__doc__ or "").params]
    return {p.arg_name: " ".join((p.description or "").replace("``", "").split()) for p in params}


def _fill(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add parameters of a function to a parser, as words without a default or before ``/``."""
    texts = _texts(function)
    for each in _parameters(function):
        text = texts[each.name].replace("%", "%%")
        if each.default is each.empty:
            parser.add_argument(each.name, help=text)
        elif each.kind is each.POSITIONAL_ONLY:
            parser.add_argument(each.name, nargs="?", default=each.default, help=text)
        else:
            shown = "" if each.default in (None, []) else f" [{each.default}]"
            flag: dict[str, Any] = {"nargs": "?", "const": True} if each.default is False else {}
            parser.add_argument(f"--{each.name}", default=each.default, help=text + shown, **flag)


def _options(command: str, function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command's function; options may have hyphens for underscores."""
    parser = _Parser(prog=f"comera {command}", description=_summary(function), allow_abbrev=False)
    _fill(parser, function)
    found, unknown = parser.parse_known_args(
        [with_underscores(word, parser._option_string_actions.__contains__) for word in words]
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
                setattr(found, name, parse.converted(value_of(given, hint), hint))
            except ValueError:
                example = f": --{name}='[{given}]'" if typing.get_origin(hint) is list else ""
                kind = parse.wanted(hint)
                raise ValueError(f"--{name}={given} must be {kind}{example}") from None
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
    lines = [f"usage: comera {start}COMMAND ...", ""]
    promise = "How small a model can be: compressed training, and its simple rivals."
    lines += [] if start else [promise, ""]
    names = (name for name in COMMANDS if name.startswith(start))
    lines += [row(name, RUN_COMMANDS.get(name) or _summary(_function(name))) for name in names]
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
        if name in RUN_COMMANDS:
            for key in settings_by_name():
                command.add_argument(f"--{key}")
        else:
            _fill(command, _function(name))
    return parser


def train_or_plan(command: str, settings: RunConfig, console: Console, count: int) -> int:
    """Run ``train`` or ``plan`` in one of ``count`` processes; return the exit status."""
    from comera.recipes.run import print_plan, run

    if command == "plan":
        print_plan(settings, console)
        return 0
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        settings.overwrite = False  # torchrun has started the processes again: they resume
    processes.stop_with_parent()
    reuse_by_default(silent=True)
    if count == 1:
        return 0 if run(settings, console) else INTERRUPTED
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    with processes.joined(cuda, _MINUTES) as together:
        shown = console if together.is_first else Console(quiet=True)
        return 0 if run(settings, shown, processes=together) else INTERRUPTED


def typed_settings(words: Sequence[str]) -> RunConfig:
    """Return the settings given by the words after ``comera train`` or ``comera plan``.

    One word may be a YAML file, the name of a configuration of the package, or the folder of a
    run. The other words are ``--KEY=VALUE`` or ``--KEY VALUE``, which override the file. Raises
    ``FileNotFoundError`` if there is no such file, and ``ValueError``, with what would be right,
    for any other word, or for a setting that is unknown or does not fit.
    """
    file, pairs, rest = None, [], list(words)
    while rest:
        word = with_underscores(rest.pop(0), _is_option)
        key, equals, text = word.partition("=")
        if not key.startswith("-"):
            if equals and _hint_of(key) is not None:
                raise ValueError(f"{word} is no file: if it is a setting, type --{word}")
            if file is not None:
                raise ValueError(f"{word} cannot stand beside {file}: a run is one file")
            file = word
            continue
        if not _is_option(key):
            raise ValueError(f"{word} is not a setting{_near(key)}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{word} needs a value: {word}=...")
            text = rest.pop(0)
        if not text:
            raise ValueError(f"{key}= is empty: give a value, or leave it out")
        pairs.append((key.removeprefix("--"), text))
    path, of_file = (file, {}) if file is None else _of_file(file)
    settings = of_file
    for key, text in pairs:
        settings = parse.merged(settings, parse.nested(_setting(key, text)))
    try:
        return parse.parse_settings(RunConfig, settings)
    except ValueError:
        with error_prefix(f"{path}: "):
            parse.parse_settings(RunConfig, of_file)
        raise


def _near(key: str) -> str:
    """Return a hint on an unknown option: the one that it resembles, or those of its section."""
    known, key = settings_by_name(), key.removeprefix("--")
    outer, _, name = key.rpartition(".")
    if outer not in known:
        near = difflib.get_close_matches(key, known, n=1)
        return f": did you mean --{near[0]}?" if near else "; `comera train --help_all` lists them"
    beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == outer]
    near = difflib.get_close_matches(name, beside, n=1)
    return f": did you mean --{outer}.{near[0]}?" if near else f"; {outer} has {', '.join(beside)}"


def changes_of(words: Sequence[str]) -> dict[str, Any]:
    """Parse words ``KEY=VALUE`` to settings by dotted names; ``ValueError`` for other words."""
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set={word} must be KEY=VALUE, such as nli.train=pairs.jsonl")
        changes = parse.merged(changes, _setting(key, text))
    return changes


def _setting(key: str, text: str) -> dict[str, Any]:
    """Return a typed setting by its dotted name; a key inside a mapping, with its dots, is one."""
    outer, value = key, value_of(text, hint := _hint_of(key))
    while hint is Any and outer not in settings_by_name():
        outer = outer.rpartition(".")[0]
    return {outer: value if outer == key else {key.removeprefix(f"{outer}."): value}}


def with_underscores(word: str, is_option: Callable[[str], bool]) -> str:
    """Return ``--dry-run=true`` as ``--dry_run=true``, if only the latter is an option.

    Keys inside a mapping stay as they are, such as ``user-id`` in ``--dlrm.table-sizes.user-id=3``.
    """
    name, equals, value = word.partition("=")
    parts = name[2:].split(".")
    for count in range(len(parts) + 1) if name.startswith("--") else ():
        outer = [part.replace("-", "_") for part in parts[:count]]
        other = f"--{'.'.join([*outer, *parts[count:]])}"
        if is_option(other):
            return f"{other}{equals}{value}"
    return word


def _is_option(word: str) -> bool:
    return word.startswith("--") and _hint_of(word[2:]) is not None


def _of_file(word: str) -> tuple[Path, dict[str, Any]]:
    path = Path(word).expanduser() / "config.yaml"
    is_folder = path.is_file()
    path = path if is_folder else parse.file_of(word)
    settings = parse.read_yaml(path)
    if {"base", "variants"} & settings.keys():
        raise ValueError(f"{path} is no run but a sweep: comera sweep trains it")
    with error_prefix(f"{path}: "):
        settings = parse.nested(settings)
    of_a_run = path.name == "config.yaml" and (path.parent / "metrics.jsonl").is_file()
    # A run does not write where it is, so that its folder can be moved.
    return path, {"out": str(path.parent), **settings} if is_folder or of_a_run else settings


def value_of(text: str, hint: Any) -> Any:
    """Parse a word as YAML, unless the type allows only a text."""
    if hint is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    holds_text = str in typing.get_args(hint) and typing.get_origin(hint) is not dict
    return text if holds_text and not isinstance(value, list | None) else value


@functools.cache
def settings_by_name() -> dict[str, tuple[Any, type]]:
    """Return type and dataclass of every setting by name; sections precede their settings."""
    found: dict[str, tuple[Any, type]] = {}

    def walk(kind: type, within: str) -> None:
        for name, hint in parse.hints_of(kind).items():
            found.setdefault(within + name, (hint, kind))
            section, _ = parse.section_of(hint)
            if section is not None:
                walk(section, f"{within}{name}.")
        for each in vars(kind).get("choices", []):  # from which the section is chosen
            walk(each, within)

    walk(RunConfig, "")
    return found


def _hint_of(key: str) -> Any:
    """Return the type of a setting: ``Any`` for a key in a mapping, None for an unknown one."""
    known = settings_by_name()
    if key in known or "." not in key:
        return known.get(key, (None,))[0]
    outer = _hint_of(key.rpartition(".")[0])
    is_mapping = any(typing.get_origin(each) is dict for each in (outer, *typing.get_args(outer)))
    return Any if is_mapping or outer is Any else None


def help_of(command: str, words: Sequence[str]) -> str | None:
    """Return the help that a word, such as ``--help``, asks for; else None."""
    known = settings_by_name()
    outer = [key for key in known if "." not in key]
    sections = [key for key in outer if parse.section_of(known[key][0])[0]]
    for word in words:
        if word in ("-h", "--help"):
            return _HELP.format(
                command=command,
                summary=RUN_COMMANDS[command],
                first="\n".join(_entry(key, with_type=False) for key in FIRST),
                sections="\n".join(row(key, _text(key)) for key in sections),
            )
        if word in ("--help-all", "--help_all"):
            first = [key for key in outer if key not in sections]
            return "\n".join(map(_entry, dict.fromkeys([*first, *known])))
    return None


_HELP = """usage: comera {command} FILE_OR_NAME [--KEY=VALUE ...]

{summary}

FILE_OR_NAME is a YAML file, a name that `comera init` lists, or the folder of a run.
What is set on the command line overrides the file.

changed first, in brackets the defaults:
{first}

sections of settings:
{sections}

`comera {command} --help_all` lists every key, with its type and default."""


def _entry(key: str, with_type: bool = True) -> str:
    """Return the text on a setting in a help, with its default in brackets."""
    hint, holder = settings_by_name()[key]
    if parse.section_of(hint)[0] is not None:
        return f"\n{key}: {_text(key)}"
    value = getattr(holder(), key.rpartition(".")[2])
    value = str(value).lower() if isinstance(value, bool) else value
    text = f"{_text(key)} ({parse.wanted(hint)})" if with_type else _text(key)
    return row(f"--{key}=", text if value in (None, "", [], {}) else f"{text} [{value}]")


def _text(key: str) -> str:
    holder = settings_by_name()[key][1]
    return _texts(*reversed(holder.__mro__))[key.rpartition(".")[2]]


def row(name: str, text: str) -> str:
    """Return the lines of a help on a name, with a text beside it."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    start, below = f"  {name}".ljust(_COLUMN), " " * _COLUMN
    if name and start[-1] != " ":
        return f"{start}\n{row('', text)}"
    lines = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=below)
    return "\n".join(lines or [start])
