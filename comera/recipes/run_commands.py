"""``comera train`` and ``comera plan``: settings of one run by the words of the command line.

Every setting is an option by its dotted name. ``--help`` prints those that are changed first,
``--help_all`` every one, ``--SECTION.help`` those of a section.
"""

import difflib
import functools
import os
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from docstring_parser import parse
from rich.console import Console

from comera._command import INTERRUPTED
from comera.recipes.parse import (
    choices_of,
    file_of,
    hints_of,
    merged,
    nested,
    parse_settings,
    read_yaml,
    section_of,
    wanted,
)
from comera.recipes.run_config import RunConfig

RUN_COMMANDS = {
    "train": "Train a run, or resume it.",
    "plan": "Show what a run would train, and what it would be compressed to.",
}

FIRST = (
    "out", "train.steps", "train.epochs", "train.batch_size", "train.precision", "optimizer.name",
    "optimizer.lr", "tensorize.rank", "two_stage.target", "seed", "device", "twin", "overwrite",
)  # fmt: skip
"""Settings that ``--help`` shows."""

_COLUMN, _WIDEST = 26, 100


def run_run_command(command: str, settings: RunConfig, console: Console, count: int) -> int:
    """Run ``train`` or ``plan`` in one of ``count`` processes; returns the exit status."""
    import torch

    from comera.allocator import reuse_freed_memory
    from comera.recipes.run import print_plan, run
    from comera.train.processes import joined, stop_with_parent

    if command == "plan":
        print_plan(settings, console)
        return 0
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        settings.overwrite = False  # torchrun has started the processes again: they resume
    stop_with_parent()
    reuse_freed_memory()
    if count == 1:
        return 0 if run(settings, console) else INTERRUPTED
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    with joined(cuda, settings.parallel.timeout_minutes) as processes:
        shown = console if processes.is_first else Console(quiet=True)
        return 0 if run(settings, shown, processes=processes) else INTERRUPTED


def typed_settings(words: Sequence[str]) -> RunConfig:
    """Return the settings that the words after ``comera train`` or ``comera plan`` stand for.

    Args:
        words: One of them may be a YAML file, the name of a configuration that comes along, or the
            folder of a run. The others are ``--KEY=VALUE`` or ``--KEY VALUE``, which override the
            file. ``--config=FILE`` is a file too, which overrides those before it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a word is none of that, or a setting is unknown or does not fit; names the
            first one, what was typed and what would be right.
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
            near = difflib.get_close_matches(key, [f"--{name}" for name in settings_by_name()], n=1)
            raise ValueError(
                f"{word} is not a setting"
                + (
                    f": did you mean {near[0]}?"
                    if near
                    else "; `comera train --help_all` lists them"
                )
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{word} needs a value: {word}=...")
            text = rest.pop(0)
        pairs.append((key.removeprefix("--"), text))
    settings: dict[str, Any] = {}
    files: dict[Path, dict[str, Any]] = {}
    for key, text in [("config", file), *pairs] if file is not None else pairs:
        if key == "config":
            path, given = _of_file(text)
            files[path] = given
        else:
            given = nested({key: value_of(text, _hint_of(key))})
        settings = merged(settings, given)
    try:
        return parse_settings(RunConfig, settings)
    except ValueError:
        for path, given in files.items():
            try:
                parse_settings(RunConfig, given)
            except ValueError as problem:
                raise ValueError(f"{path}: {problem}") from None
        raise


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
        changes[key] = value_of(text, _hint_of(key))
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


def _is_option(word: str) -> bool:
    return word == "--config" or (word.startswith("--") and _hint_of(word[2:]) is not None)


def _of_file(word: str) -> tuple[Path, dict[str, Any]]:
    """Return the file that a word stands for, and its settings."""
    path = Path(word).expanduser() / "config.yaml"
    is_folder = path.is_file()
    path = path if is_folder else file_of(word)
    settings = read_yaml(path)
    if {"base", "variants"} & settings.keys():
        raise ValueError(f"{path} is no run but a sweep: comera sweep trains it")
    try:
        settings = nested(settings)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None
    of_a_run = path.name == "config.yaml" and (path.parent / "metrics.jsonl").is_file()
    # A run does not write where it is, so that its folder can be moved.
    return path, {"out": str(path.parent), **settings} if is_folder or of_a_run else settings


def value_of(text: str, hint: Any) -> Any:
    """Read a word as a value of YAML, unless it can only be a text."""
    if hint is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    holds_text = str in typing.get_args(hint)
    return text if holds_text and not isinstance(value, list | None) else value


@dataclass(frozen=True)
class Setting:
    """One setting of a run, or a section of them.

    Attributes:
        hint: Its type.
        holder: The dataclass that has it: of several optimizers the first one.
        name: Its name there.
        takers: The optimizers that take it, if not all do.
    """

    hint: Any
    holder: type
    name: str
    takers: list[str] = field(default_factory=list)

    @property
    def is_section(self) -> bool:
        """Whether the setting is a section with settings of its own."""
        return section_of(self.hint)[0] is not None

    def help(self, with_type: bool = False) -> str:
        """Return the description in the docstring, and the default in brackets if it is no null."""
        told = {
            param.arg_name: param.description
            for kind in reversed(self.holder.__mro__)
            for param in parse(kind.__doc__ or "").params
        }
        text = " ".join((told[self.name] or "").replace("``", "").split())
        text += f" Of {', '.join(self.takers)}." if self.takers else ""
        if self.is_section:
            return text
        own = next(each for each in fields(self.holder) if each.name == self.name)
        value = own.default if own.default_factory is MISSING else own.default_factory()
        shown = str(value).lower() if isinstance(value, bool) else value
        text += f" ({wanted(self.hint)})" if with_type else ""
        return text if value is None else f"{text} [{shown}]"


@functools.cache
def settings_by_name() -> dict[str, Setting]:
    """Return all settings of a run by their dotted names, sections before what is in them."""
    found: dict[str, Setting] = {}

    def walk(kind: type, within: str, names: tuple[str, ...] = ()) -> None:
        for name, hint in hints_of(kind).items():
            setting = found.setdefault(within + name, Setting(hint, kind, name))
            if "choose" not in vars(setting.holder):
                setting.takers.extend(names)
            section, _ = section_of(hint)
            if section is not None:
                walk(section, f"{within}{name}.")
        for each in choices_of(kind):
            walk(each, within, (str(getattr(each, "name", "")),))

    walk(RunConfig, "")
    return found


def _hint_of(key: str) -> Any:
    """Return the type of a setting; None if there is none of that name.

    Keys inside of a mapping, such as ``dlrm.table_sizes.user``, can be anything.
    """
    known = settings_by_name()
    if key in known:
        return known[key].hint
    outer = key.rpartition(".")[0]
    while outer and outer not in known:
        outer = outer.rpartition(".")[0]
    hint = known[outer].hint if outer else None
    holds_any = any(typing.get_origin(each) is dict for each in (hint, *typing.get_args(hint)))
    return Any if holds_any else None


def help_of(command: str, words: Sequence[str]) -> str | None:
    """Return the help that one of the words asks for; None if none does."""
    known = settings_by_name()
    for word in words:
        if word in ("-h", "--help"):
            return _short_help(command)
        if re.fullmatch(r"--help[_-]all", word):
            return _table(known)
        section = word.removeprefix("--").removesuffix(".help")
        if word == f"--{section}.help" and section in known:
            return _table(key for key in known if key.startswith(f"{section}."))
    return None


def _short_help(command: str) -> str:
    known = settings_by_name()
    sections = [name for name, setting in known.items() if setting.is_section and "." not in name]
    first = [line for key in FIRST for line in row(f"--{key}=", known[key].help())]
    return "\n".join(
        [
            f"usage: comera {command} FILE_OR_NAME [--KEY=VALUE ...]\n",
            f"{RUN_COMMANDS[command]}\n",
            "FILE_OR_NAME is a YAML file, a name that `comera init` lists, or the folder of a run.",
            "What is set on the command line overrides the file.\n",
            "changed first, in brackets the defaults:",
            *first,
            "\nsections of settings:",
            *(line for name in sections for line in row(name, known[name].help())),
            f"\n`comera {command} --help_all` lists every key, with its type and default.",
        ]
    )


def _table(keys: Iterable[str]) -> str:
    """Return the rows of settings, each with its type and default."""
    lines = []
    for key in keys:
        setting = settings_by_name()[key]
        if setting.is_section:
            lines += ["", f"{key}: {setting.help()}"]
        else:
            lines += row(f"--{key}=", setting.help(with_type=True))
    return "\n".join(lines)


def row(name: str, text: str) -> list[str]:
    """Return the lines of an entry of a help: a name, and what it is beside it."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    start = f"  {name}".ljust(_COLUMN)
    if len(start) > _COLUMN or (name and start[-1] != " "):
        return [start, *row("", text)]
    below = " " * _COLUMN
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=below) or [start]
