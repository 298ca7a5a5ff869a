"""``comera train`` and ``comera plan``: settings of one run by the words of the command line.

Every setting is an option by its dotted name. ``--help`` prints those that are changed first,
``--help_all`` every one, ``--SECTION.help`` those of a section.
"""

import difflib
import functools
import os
import shutil
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import docstring_parser
import yaml
from rich.console import Console

from comera._command import INTERRUPTED
from comera.recipes import parse
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

_MINUTES = 60.0  # how long a process waits for the others, as while one reads the data

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
    with joined(cuda, _MINUTES) as processes:
        shown = console if processes.is_first else Console(quiet=True)
        return 0 if run(settings, shown, processes=processes) else INTERRUPTED


def typed_settings(words: Sequence[str]) -> RunConfig:
    """Return the settings that the words after ``comera train`` or ``comera plan`` stand for.

    One word may be a YAML file, the name of a configuration, or the folder of a run. The others are
    ``--KEY=VALUE`` or ``--KEY VALUE``, which override the file. ``--config=FILE`` is a file too,
    which overrides the words before it. Raises ``FileNotFoundError``, and ``ValueError`` with the
    first word that is wrong.
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
            hint = (
                f": did you mean {near[0]}?" if near else "; `comera train --help_all` lists them"
            )
            raise ValueError(f"{word} is not a setting{hint}")
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
            given = parse.nested({key: value_of(text, _hint_of(key))})
        settings = parse.merged(settings, given)
    try:
        return parse.parse_settings(RunConfig, settings)
    except ValueError:
        for path, given in files.items():
            try:
                parse.parse_settings(RunConfig, given)
            except ValueError as problem:
                raise ValueError(f"{path}: {problem}") from None
        raise


def changes_of(words: Sequence[str]) -> dict[str, Any]:
    """Return settings by dotted names, of words ``KEY=VALUE``; ``ValueError`` for other words."""
    changes = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set={word} must be KEY=VALUE, such as nli.train=pairs.jsonl")
        changes[key] = value_of(text, _hint_of(key))
    return changes


def with_underscores(word: str, is_option: Callable[[str], bool]) -> str:
    """Return ``--dry-run=true`` as ``--dry_run=true``, if that alone is an option.

    Keys inside a mapping stay, as ``user-id`` in ``--dlrm.table-sizes.user-id=3``.
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
    path = Path(word).expanduser() / "config.yaml"
    is_folder = path.is_file()
    path = path if is_folder else parse.file_of(word)
    settings = parse.read_yaml(path)
    if {"base", "variants"} & settings.keys():
        raise ValueError(f"{path} is no run but a sweep: comera sweep trains it")
    try:
        settings = parse.nested(settings)
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


@functools.cache
def settings_by_name() -> dict[str, tuple[Any, type]]:
    """Return type and dataclass of every setting, sections before the settings in them."""
    found: dict[str, tuple[Any, type]] = {}

    def walk(kind: type, within: str) -> None:
        for name, hint in parse.hints_of(kind).items():
            found.setdefault(within + name, (hint, kind))
            section, _ = parse.section_of(hint)
            if section is not None:
                walk(section, f"{within}{name}.")
        for each in parse.choices_of(kind):
            walk(each, within)

    walk(RunConfig, "")
    return found


def _hint_of(key: str) -> Any:
    """Return the type of a setting, ``Any`` inside a mapping; None for no setting."""
    known = settings_by_name()
    if key in known or "." not in key:
        return known.get(key, (None,))[0]
    outer = _hint_of(key.rpartition(".")[0])
    is_mapping = any(typing.get_origin(each) is dict for each in (outer, *typing.get_args(outer)))
    return Any if is_mapping or outer is Any else None


def help_of(command: str, words: Sequence[str]) -> str | None:
    """Return the help that a word asks for, or None."""
    known = settings_by_name()
    for word in words:
        section = word.removeprefix("--").removesuffix(".help")
        if word in ("-h", "--help"):
            sections = [
                k for k, (hint, _) in known.items() if parse.section_of(hint)[0] and "." not in k
            ]
            return _HELP.format(
                command=command,
                summary=RUN_COMMANDS[command],
                first="\n".join(_entry(key, with_type=False) for key in FIRST),
                sections="\n".join(row(key, _text(key)) for key in sections),
            )
        if word in ("--help-all", "--help_all"):
            return "\n".join(map(_entry, known))
        if word == f"--{section}.help" and section in known:
            return "\n".join(_entry(key) for key in known if key.startswith(f"{section}."))
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
    """Return the entry of a setting in a help, with its default in brackets."""
    hint, holder = settings_by_name()[key]
    if parse.section_of(hint)[0] is not None:
        return f"\n{key}: {_text(key)}"
    own = next(each for each in fields(holder) if each.name == key.rpartition(".")[2])
    value = own.default if own.default_factory is MISSING else own.default_factory()
    value = str(value).lower() if isinstance(value, bool) else value
    text = f"{_text(key)} ({parse.wanted(hint)})" if with_type else _text(key)
    return row(f"--{key}=", text if value is None else f"{text} [{value}]")


def _text(key: str) -> str:
    holder = settings_by_name()[key][1]
    texts = {
        param.arg_name: param.description or ""
        for kind in reversed(holder.__mro__)
        for param in docstring_parser.parse(kind.__doc__ or "").params
    }
    return " ".join(texts[key.rpartition(".")[2]].replace("``", "").split())


def row(name: str, text: str) -> str:
    """Return an entry of a help: a name, and a text beside it."""
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    start, below = f"  {name}".ljust(_COLUMN), " " * _COLUMN
    if len(start) > _COLUMN or (name and start[-1] != " "):
        return f"{start}\n{row('', text)}"
    lines = textwrap.wrap(text, width, initial_indent=start, subsequent_indent=below)
    return "\n".join(lines or [start])
