"""Names that do not exist, and the ones that were most likely meant."""

import dataclasses
import difflib
import functools
from collections.abc import Collection
from typing import Any, TypeVar

Config = TypeVar("Config")


def did_you_mean(word: object, known: Collection[str]) -> str:
    """Return words to add to an error: the nearest of the known names, or all of them."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def names_misspelt(cls: type[Config]) -> type[Config]:
    """Have a dataclass name the field that was meant where a keyword is none of its fields.

    It raises a TypeError as before, of which Python's own names no other.
    """
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
