"""What ``comera train --help`` prints: the settings that are changed first, then the sections."""

import shutil
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from docstring_parser import parse

from comera.recipes.parse import section_of
from comera.recipes.run_config import RunConfig

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
