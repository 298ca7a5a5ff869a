"""What is wrong with the settings that were typed, in one sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from comera.recipes.parse import merged, nested, parse_settings, read_yaml
from comera.recipes.run_config import RunConfig


def first_mistake(words: Sequence[str]) -> str | None:
    """Name the first setting that does not fit, what was typed and what would be right.

    The parser of the command line tries every type a setting may have, and says at length of each
    why not.

    Args:
        words: Words of the command ``train`` or ``plan``, spelled out.

    Returns:
        None if nothing is wrong with the values: then it is something else.
    """
    try:
        settings: dict[str, Any] = {}
        for key, value in _pairs(words):
            given = read_yaml(Path(value)) if key == "config" else {key: _read(value)}
            settings = merged(settings, nested(given))
        parse_settings(RunConfig, settings)
    except (ValueError, OSError) as problem:
        return str(problem)
    return None


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return keys and values of ``--key=value`` and ``--key value``."""
    pairs = []
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        key, equals, value = word.partition("=")
        if key.startswith("--") and (equals or not after.startswith("--")):
            pairs.append((key.removeprefix("--"), value if equals else after))
    return pairs


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
