"""JSON that anyone may have written, parsed only where it is nested no deeper than it ever is."""

import json
from typing import Any

DEEPEST_STATE = 64
"""Levels of dicts, lists and tuples in what is saved; each takes up to three of JSON's."""

DEEPEST = 3 * DEEPEST_STATE + 16
"""Levels of JSON: what reads them calls itself, and Python bounds how often."""


def parsed(raw: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is none, or nested more than ``DEEPEST`` deep. What is nested far deeper
            can raise a RecursionError.
    """
    value = json.loads(raw)
    level = [value]
    for _ in range(DEEPEST):
        level = [part for outer in level for part in _parts(outer)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
