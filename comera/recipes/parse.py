"""Parse settings from mappings, YAML files and the configurations that come with the package.

Words of the command line are converted in the same way. Errors name the first wrong key.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from comera.extras import check_known, did_you_mean, error_prefix, listed
from comera.files import naming_what_is_no_text

T = TypeVar("T")


def parse_settings(kind: type[T], values: Mapping[str, Any], within: str = "") -> T:
    """Return a dataclass of settings, such as ``RunConfig``, from values by field.

    Sections are mappings; their fields are dataclasses. One with a function ``choose`` is one of
    several dataclasses, by its values. Errors have keys with the prefix ``within``. Raises
    ``ValueError`` if a key is no field, or a value of another type.
    """
    hints = hints_of(kind)
    suited = f" for {name}" if (name := getattr(kind, "name", None)) else ""
    found = {}
    values = values if within else spelled_out(values)
    for key, value in values.items():
        check_known(key, hints, f"{within}{key} is not a setting")
        section, optional = section_of(hints[key])
        shown = "null" if value is None else repr(value)
        if section is None:
            try:
                found[key] = converted(value, hints[key])
            except ValueError:
                raise ValueError(
                    f"{within}{key}={shown} must be {wanted(hints[key])}{suited}"
                ) from None
        elif isinstance(value, Mapping):
            if hasattr(section, "choose"):
                section, value = section.choose(value, values)
            found[key] = parse_settings(section, value, f"{within}{key}.")
        elif value is None and optional:
            found[key] = None
        else:
            keys = listed([field.name for field in dataclasses.fields(section)])
            either = " or null" if optional else ""
            raise ValueError(
                f"{within}{key}={shown} must be a section, with keys of its own{either}: {keys}"
            )
    with error_prefix(within):  # it begins with the name of a field
        return kind(**found)


def converted(value: Any, hint: Any) -> Any:
    """Convert a value to the type ``hint``, or raise ``ValueError``.

    Lists may become tuples; whole numbers and texts become floats, as YAML reads ``1e-4`` as text.
    """
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        for option in inside:
            with contextlib.suppress(ValueError):
                return converted(value, option)
    elif kind is typing.Literal:
        if value in inside:
            return value
    elif kind is dict and isinstance(value, Mapping):
        return {converted(k, inside[0]): converted(v, inside[1]) for k, v in value.items()}
    elif kind is list and isinstance(value, list | tuple):
        return [converted(each, inside[0]) for each in value]
    elif kind is tuple and isinstance(value, list | tuple) and len(value) == len(inside):
        return tuple(map(converted, value, inside))
    elif hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        if math.isfinite(number := float(value)):
            return number
    elif hint is Any or (kind is None and type(value) is hint):
        return value
    raise ValueError(f"{value!r} must be {wanted(hint)}")


def check_least(settings: Any, within: str, **least: float) -> None:
    """Raise ``ValueError`` for a field that is below its least value; None is not checked."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise ValueError(f"{within}{name}={value} must be at least {bound}")


def merged(base: Mapping[str, Any], over: Mapping[str, Any], inner: bool = False) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``: mappings key by key, all else replaced."""
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        # An empty mapping changes no section, and empties a setting that is a mapping.
        if isinstance(below, Mapping) and isinstance(value, Mapping) and (value or not inner):
            value = merged(below, value, True)
        out[key] = value
    return out


def spelled_out(settings: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return settings in which ``optimizer: came`` is written as a section."""
    name = settings.get("optimizer")
    return {**settings, "optimizer": {"name": name}} if isinstance(name, str) else settings


def nested(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Turn dotted keys of the outermost level into mappings: ``a.b: 1`` into ``a: {b: 1}``.

    Only keys of the outermost mapping are split, as inner keys, such as those of ``rank_pattern``,
    may be regular expressions. Raises ``ValueError`` if a key is given twice, or ``a.b`` is given
    and ``a`` is no mapping.
    """
    out: dict[str, Any] = {}
    for key, value in spelled_out(settings).items():
        for part in reversed(str(key).split(".")):
            value = {part: value}
        _add(out, value, "")
    return out


def _add(place: dict[str, Any], more: Mapping[str, Any], within: str) -> None:
    for key, value in more.items():
        if isinstance(place.get(key), dict) and isinstance(value, Mapping):
            _add(place[key], value, f"{within}{key}.")
        elif key in place:
            raise ValueError(f"{within}{key} is given twice: {place[key]!r} and {value!r}")
        else:
            place[key] = copy.deepcopy(value)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; ``FileNotFoundError``, or ``ValueError`` without one."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with naming_what_is_no_text(path):
            content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, RecursionError) as problem:
        deep = isinstance(problem, RecursionError)
        said = "it is nested too deep" if deep else " ".join(str(problem).split())
        raise ValueError(f"{path} is not readable as YAML: {said}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values, not {reprlib.repr(content)}")
    return content


class _Loader(yaml.SafeLoader):
    """YAML loader that raises on a duplicate key; by default the last value wins silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node.value, str):
                continue
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key_node.value} in line {line} is there already")
            seen.add(key_node.value)
        return node


def hints_of(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def section_of(hint: Any) -> tuple[type | None, bool]:
    """Return the dataclass in a field's type, or None, and whether the field may be None."""
    options = typing.get_args(hint) or (hint,)
    section = next((option for option in options if dataclasses.is_dataclass(option)), None)
    return typing.cast(type | None, section), type(None) in options


def wanted(hint: Any) -> str:
    """Return the values of a type in words, such as ``a whole number or null``."""
    *others, last = _alternatives(hint)
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(hint: Any) -> list[str]:
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return [str(value) for value in inside]
    if kind in (typing.Union, types.UnionType):
        return [each for option in inside for each in _alternatives(option)]
    if kind is tuple:
        return [f"a list of {len(inside)} numbers"]
    if kind is list:
        return [f"a list of {_MANY.get(inside[0], 'lists')}"]
    if kind is dict:
        return [f"a mapping, each to {wanted(inside[1])}"]
    return _ONE[kind or hint]


_ONE: dict[Any, list[str]] = {
    bool: ["true", "false"],
    float: ["a number"],
    int: ["a whole number"],
    str: ["a text"],
    type(None): ["null"],
}
_MANY = {int: "whole numbers", int | None: "whole numbers or null", str: "texts"}


def folder() -> Path:
    """Return the folder of the configurations: in the package, or above it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "_configs"
    return inside if inside.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """List the names of all configurations, such as ``quickstart`` and ``nli/snli-small``."""
    root = folder()
    files = sorted(root.rglob("*.yaml"), key=lambda path: (path.parent != root, path))
    return [path.relative_to(root).with_suffix("").as_posix() for path in files]


def file_of(word: str, beside: Path = Path()) -> Path:
    """Return the file at a path, relative to ``beside``, or the configuration with that name.

    A name is one of :func:`names`, or its last part. ``FileNotFoundError`` if there is neither.
    """
    path = beside / Path(word).expanduser()
    if path.is_file():
        return path
    by_name = {short: name for name in names() for short in (name, Path(name).name)}
    if word in by_name:
        return folder() / f"{by_name[word]}.yaml"
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder, and not that of a run: it has no config.yaml")
    near = did_you_mean(Path(word).stem, by_name)
    if "did you mean" not in near:
        near = "; `comera init` lists the configurations that need none"
    raise FileNotFoundError(f"there is no file {path}{near}")


def init(name: str | None = None, /, *, console: Console) -> None:
    """Print a configuration to begin with: comera init NAME > mine.yaml

    Args:
        name: Name of a configuration; without it all are listed.
    """
    # As a file and not as to a terminal: no line may be broken.
    if name is not None:
        print(file_of(name).read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, names()))
    for each in names():
        print(f"{each:{width}}  {first_sentence(folder() / f'{each}.yaml')}")


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in comment).split(". ")[0].rstrip(".")
