"""``comera train`` and ``comera plan``: one run, from the words of the command line.

The settings of a run as they were typed: a file, a name or a folder, and keys beside it.

What ``comera train --help`` prints: the settings that are changed first, then the sections.
"""

import difflib
import os
import re
import shutil
import sys
import textwrap
import typing
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser
from rich.console import Console

from comera.allocator import reuse_freed_memory
from comera.recipes.jobs import INTERRUPTED
from comera.recipes.parse import (
    file_of,
    hints_of,
    merged,
    nested,
    parse_settings,
    read_yaml,
    section_of,
)
from comera.recipes.run import plan, planned_memory, run
from comera.recipes.run_config import RunConfig
from comera.train.processes import joined
from comera.train.stop_signals import stop_with_parent


def typed_settings(words: Sequence[str]) -> RunConfig:
    """Return the settings that the words after ``comera train`` or ``comera plan`` stand for.

    Args:
        words: One of them may be a YAML file, the name of a configuration that comes along, or the
            folder of a run. The others are ``--KEY=VALUE`` or ``--KEY VALUE``, and count whatever
            the file says. ``--config=FILE`` is a file too, which counts over those before it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a word is none of that, or a setting is unknown or does not fit; names the
            first one, what was typed and what would be right.
    """
    file, pairs = _taken_apart(words)
    settings = {} if file is None else _of_file(file)
    for key, text in pairs:
        given = _of_file(text) if key == "config" else nested({key: _value(key, text)})
        settings = merged(settings, given)
    return parse_settings(RunConfig, settings)


def changes_of(words: Sequence[str]) -> dict[str, Any]:
    """Return settings by their dotted names, as an option ``--set='[KEY=VALUE,...]'`` has them.

    Raises:
        ValueError: If a word is no such pair.
    """
    changes = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set={word} must be KEY=VALUE, such as nli.train=pairs.jsonl")
        changes[key] = _value(key, text)
    return changes


def with_underscores(word: str, is_option: Callable[[str], bool]) -> str:
    """Return ``--dry-run=true`` as ``--dry_run=true``, if that alone is an option.

    Keys inside of a mapping, as ``user-id`` in ``--dlrm.table-sizes.user-id=3``, stay as typed.
    """
    name, equals, value = word.partition("=")
    parts = name[2:].split(".")
    for count in range(len(parts) + 1) if name.startswith("--") else ():
        outer = [part.replace("-", "_") for part in parts[:count]]
        other = f"--{'.'.join([*outer, *parts[count:]])}"
        if is_option(other):
            return f"{other}{equals}{value}"
    return word


def _taken_apart(words: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the file, if one was typed, and keys with the texts that they are to be."""
    file, pairs, rest = None, [], list(words)
    while rest:
        word = rest.pop(0)
        word = with_underscores(word, _is_option)
        key, equals, text = word.partition("=")
        if not key.startswith("-"):
            if equals and _hint_of(key) is not None:
                raise ValueError(f"{word} is no file: if it is a setting, type --{word}")
            if file is not None:
                raise ValueError(f"{word} cannot stand beside {file}: a run is one file")
            file = word
            continue
        _check_key(word, key)
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{word} needs a value: {word}=...")
            text = rest.pop(0)
        pairs.append((key.removeprefix("--"), text))
    return file, pairs


def _is_option(word: str) -> bool:
    return word == "--config" or (word.startswith("--") and _hint_of(word[2:]) is not None)


def _of_file(word: str) -> dict[str, Any]:
    """Return the settings in the file that a word stands for, checked by themselves."""
    path = Path(word).expanduser() / "config.yaml"
    is_folder = path.is_file()
    path = path if is_folder else file_of(word)
    settings = read_yaml(path)
    if {"base", "variants"} & settings.keys():
        raise ValueError(f"{path} is no run but a sweep: comera sweep trains it")
    try:
        settings = nested(settings)
        parse_settings(RunConfig, settings)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None
    of_a_run = path.name == "config.yaml" and (path.parent / "metrics.jsonl").is_file()
    # A run does not write where it is, so that its folder can be moved.
    return {"out": str(path.parent), **settings} if is_folder or of_a_run else settings


def _value(key: str, text: str) -> Any:
    """Read a value as it would be in a file, but leave a text as it was typed."""
    hint = _hint_of(key)
    if hint is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    holds_text = str in typing.get_args(hint)
    return text if holds_text and not isinstance(value, list | None) else value


def _check_key(word: str, key: str) -> None:
    if _is_option(key):
        return
    known = [f"--{name}" for name in _keys(RunConfig)]
    near = difflib.get_close_matches(key, known, n=1)
    raise ValueError(
        f"{word} is not a setting"
        + (f": did you mean {near[0]}?" if near else "; `comera train --help_all` lists them")
    )


def _keys(kind: type, within: str = "") -> Iterator[str]:
    """Yield all keys, those of sections after a dot."""
    for name, hint in hints_of(kind).items():
        yield within + name
        section, _ = section_of(hint)
        if section is not None:
            yield from _keys(section, f"{within}{name}.")


def _hint_of(key: str) -> Any:
    """Return the type of a setting; None if there is none of that name.

    What is inside of a mapping, such as ``dlrm.table_sizes.user``, can be anything.
    """
    section: type | None = RunConfig
    hint: Any = None
    for name in key.split("."):
        if section is None:
            options = (hint, *typing.get_args(hint))
            holds_any = any(typing.get_origin(option) is dict for option in options)
            return Any if holds_any else None
        hint = hints_of(section).get(name)
        section, _ = section_of(hint)
    return hint


FIRST = (
    "out", "train.steps", "train.epochs", "train.batch_size", "train.precision", "optimizer.name",
    "optimizer.lr", "tensorize.rank", "two_stage.target", "seed", "device", "twin", "overwrite",
)  # fmt: skip

_COLUMN, _WIDEST = 26, 100


def short_help(command: str, description: str) -> str:
    """Return the help of a command that takes the settings of a run.

    Args:
        command: ``train`` or ``plan``.
        description: What it does.
    """
    return "\n".join(
        [
            f"usage: comera {command} FILE_OR_NAME [--KEY=VALUE ...]",
            "",
            description,
            "",
            "FILE_OR_NAME is a YAML file, a name that `comera init` lists, or the folder of a run.",
            "What is set on the command line counts, whatever the file says.",
            "",
            "changed first, in brackets what counts where nothing is given:",
            *(line for key in FIRST for line in _row(f"--{key}=", _text_of(key), _default_of(key))),
            "",
            "sections of settings:",
            *(line for name in _sections() for line in _row(name, _text_of(name))),
            "",
            f"`comera {command} --help_all` lists every key, with its type and default.",
            "",
        ]
    )


def _sections() -> Iterator[str]:
    for name, hint in typing.get_type_hints(RunConfig).items():
        if section_of(hint)[0] is not None:
            yield name


def _holder_of(key: str) -> tuple[Any, str]:
    """Return the dataclass that holds a key, such as ``train.steps``, and its name there."""
    holder: Any = RunConfig
    *outer, name = key.split(".")
    for part in outer:
        holder = section_of(typing.get_type_hints(holder)[part])[0]
    return holder, name


def _default_of(key: str) -> str:
    """Return a default in brackets; nothing where it is null, of which the docstring tells."""
    holder, name = _holder_of(key)
    default = next(field.default for field in fields(holder) if field.name == name)
    if default is None:
        return ""
    return f" [{str(default).lower() if isinstance(default, bool) else default}]"


def _text_of(key: str) -> str:
    """Return what the docstrings of settings say of a key, such as ``train.steps``."""
    holder, name = _holder_of(key)
    told = {param.arg_name: param.description for param in parse(holder.__doc__).params}
    return " ".join((told[name] or "").replace("``", "").split())


def _row(name: str, text: str, default: str = "") -> list[str]:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    start = f"  {name}".ljust(_COLUMN)
    if len(start) > _COLUMN:
        return [start, *_row("", text, default)]
    below = " " * _COLUMN
    return textwrap.wrap(text + default, width, initial_indent=start, subsequent_indent=below)


RUN_COMMANDS = {
    "train": "Train a run, or resume it.",
    "plan": "Show what a run would train, and what it would be compressed to.",
}


def add_run_commands(commands: Any, with_settings: bool) -> None:
    """Add the commands to those of ``comera``, for their help and what shells complete.

    Their words are read by :func:`typed_settings`. Without their settings it takes less time.
    """
    for name, text in RUN_COMMANDS.items():
        command = _Parser(description=text, allow_abbrev=False)
        command.name = name
        command.add_argument(
            "--help_all",
            action=_ShowEverySetting,
            nargs=0,
            default=SUPPRESS,
            help="Show every setting and exit.",
        )
        command.add_argument(
            "--config",
            type=str,
            help="YAML file that describes the run; `comera init` lists configurations that can be "
            "given by name instead.",
        )
        if with_settings:
            # Every field of a run is an option, its help the field's line in the docstring.
            command.add_class_arguments(RunConfig, None)
        # By itself the usage would list every key of a run.
        command.usage = f"comera {name} FILE_OR_NAME [--KEY=VALUE ...]"
        commands.add_subcommand(name, command, help=text)


def asks_for_help(words: Sequence[str]) -> bool:
    """Tell whether one of the words wants to see settings, all or those of a section."""
    return any(
        word in ("-h", "--help") or re.fullmatch(r"--help[_-]all|--[\w.-]+\.help", word)
        for word in words
    )


def run_settings(words: Sequence[str]) -> RunConfig:
    """Return the settings of ``train`` or ``plan``; raises what :func:`typed_settings` does."""
    settings = typed_settings(words)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        settings.overwrite = False  # torchrun has started the processes again: they go on
    return settings


def run_run_command(command: str, settings: RunConfig, console: Console, count: int) -> int:
    """Carry one of them out, in one of ``count`` processes; returns the exit status."""
    if command == "plan":
        _show_plan(settings, console)
        return 0
    stop_with_parent()
    reuse_freed_memory()
    if count == 1:
        return 0 if run(settings, console) else INTERRUPTED
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    with joined(cuda, settings.parallel.timeout_minutes) as processes:
        shown = console if processes.is_first else Console(quiet=True)
        return 0 if run(settings, shown, processes=processes) else INTERRUPTED


class _Parser(ArgumentParser):
    """Shows what is changed first; ``--help_all`` shows every key, ``--SECTION.help`` some."""

    name: str = ""

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """Return the text of ``--help``."""
        if not self.name:  # jsonargparse makes one for a section
            return super().format_help(formatter)
        return short_help(self.name, self.description or "")


class _ShowEverySetting(Action):
    """Prints what argparse would, a paragraph a key."""

    def __call__(self, parser: Any, *_: object) -> NoReturn:
        print(ArgumentParser.format_help(parser), end="")
        sys.exit(0)


def _show_plan(config: RunConfig, console: Console) -> None:
    report, layers, target = plan(config)
    memory = planned_memory(config)
    console.print(str(report), soft_wrap=True, highlight=False)
    if layers is not None:
        console.print(str(layers), soft_wrap=True, highlight=False)
    for table in memory:
        console.print(str(table), soft_wrap=True, highlight=False, markup=False)
    if target is not None:
        cores = report.live_params
        rest = report.params - cores
        console.print(
            f"rank learning from {cores:,} to at most {target:,} entries in the cores: "
            f"the whole model then has at most {rest + target:,} parameters, "
            f"{report.dense_params / (rest + target):.1f}x fewer than dense"
        )
