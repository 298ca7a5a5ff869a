"""The settings of a run as they were typed: a file, a name or a folder, and keys beside it."""

import difflib
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from comera.recipes.named import file_of
from comera.recipes.parse import merged, nested, parse_settings, read_yaml, section_of
from comera.recipes.run_config import RunConfig


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
    for name, hint in typing.get_type_hints(kind).items():
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
        hint = typing.get_type_hints(section).get(name)
        section, _ = section_of(hint)
    return hint
