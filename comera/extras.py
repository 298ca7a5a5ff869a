"""Build error messages: missing packages, "did you mean", lists of names; log once or silently."""

import dataclasses
import difflib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_EXTRAS = {
    "accelerate": "hf",
    "docstring_parser": "cli",
    "huggingface_hub": "hf",
    "jinja2": "cli",
    "lightning": "lightning",
    "matplotlib": "cli",
    "onnxscript": "onnx",
    "optuna": "search",
    "pandas": "cli",
    "plotly": "notebooks",
    "pytorch_lightning": "lightning",
    "submitit": "submitit",
    "tensorboard": "cli",
    "tokenizers": "cli",
    "torchao": "quantize",
    "transformers": "hf",
    "yaml": "cli",
}
"""Imported packages, and the extra that brings each."""

_Config = TypeVar("_Config")
_Kinds = type[Exception] | tuple[type[Exception], ...]

_SAID = set[str]()  # by say_once

after_swap: list[Callable[[Any], None]] = []
"""Functions called with each model some of whose layers were replaced."""


class MissingPackageError(ModuleNotFoundError):
    """Raised if an optional package is missing; the message has the command that installs it."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Raise MissingPackageError if an import inside fails: ``what`` needs the package."""
    try:
        yield
    except ModuleNotFoundError as missing:
        name = (missing.name or "").split(".")[0]
        if name not in _EXTRAS:
            raise
        raise MissingPackageError(
            f"{what} needs {name}: pip install 'comera[{_EXTRAS[name]}]'", name=missing.name
        ) from None


def did_you_mean(word: object, known: Collection[str]) -> str:
    """Return a hint to add to an error: the known name most like ``word``, or all known names."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def check_known(word: object, known: Collection[str], said: str) -> None:
    """Raise ``ValueError`` with the text ``said`` and a hint unless ``word`` is known."""
    if word not in known:
        raise ValueError(said + did_you_mean(word, known))


@contextmanager
def error_prefix(text: str, kinds: _Kinds = ValueError) -> Iterator[None]:
    """Raise ``ValueError`` in place of an error inside, with ``text`` before its message."""
    try:
        yield
    except kinds as problem:
        raise ValueError(f"{text}{problem}") from None


def names_misspelt(cls: type[_Config]) -> type[_Config]:
    """Decorate a dataclass so that its TypeError for an unknown keyword suggests a field."""
    plain: Any = cls.__init__
    known = [each.name for each in dataclasses.fields(cls) if each.init]  # type: ignore[arg-type]

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                raise TypeError(
                    f"{name}={settings[name]!r} is not a setting of {cls.__name__}"
                    f"{did_you_mean(name, known)}"
                )
        plain(self, *args, **settings)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return the first ``most`` names in one string, with the number of the others."""
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def say_once(log: logging.Logger, level: int, text: str, *values: object) -> None:
    """Log a message unless this process has; while a filter gathers messages, log all of them."""
    said = text % values
    if log.isEnabledFor(level) and (log.filters or said not in _SAID):
        _SAID.add(said)
        log.log(level, "%s", said, stacklevel=2)


@contextmanager
def without_remarks(about: str = "comera") -> Iterator[None]:
    """Silence warnings of the logger ``about``, by default those about layers."""
    log = logging.getLogger(about)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
