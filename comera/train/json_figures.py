"""Figures as JSON that every program reads: NaN and infinities are no numbers there."""

import json
import math
from typing import Any

_KEY = "not_finite"


def to_json(facts: dict[str, Any], indent: int | None = None) -> str:
    """Return facts as JSON, with null for numbers that are not finite.

    Which these are, and what they were, is said under ``not_finite``, where there are any:
    ``{"metrics": {"auc": null}, "not_finite": {"metrics.auc": "nan"}}``.
    """
    odd: dict[str, str] = {}

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: plain(each, f"{name}.{key}") for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each, f"{name}.{k}") for k, each in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            odd[name.removeprefix(".")] = str(value)
            return None
        return value

    found = plain(facts, "")
    return json.dumps(found | ({_KEY: odd} if odd else {}), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """Return what :func:`to_json` was given.

    Raises:
        ValueError: If it is not JSON.
    """
    found = json.loads(text)
    odd: dict[str, str] = found.pop(_KEY, {}) if isinstance(found, dict) else {}

    def restored(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: restored(each, f"{name}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [restored(each, f"{name}.{k}") for k, each in enumerate(value)]
        return float(odd[name[1:]]) if value is None and name[1:] in odd else value

    return restored(found, "") if odd else found
