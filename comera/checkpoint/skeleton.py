"""Split nested state into named tensors and a JSON skeleton; joining them runs no code."""

import importlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from comera.checkpoint.streams import DamagedError

DEEPEST_STATE = 64
"""Levels of dicts, lists and tuples in a state to save; each takes up to three of JSON's."""

DEEPEST = 3 * DEEPEST_STATE + 16
"""Levels of JSON: its readers are recursive, and Python bounds the depth of calls."""

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
"""Dtypes by name."""

_SUBCLASSES = {
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_8bit.OptimState8bit",
    "torchao.optim.subclass_fp8.OptimStateFp8",
}
"""Tensor subclasses that can be saved: no other class named in a file is ever imported."""

_SKIPPED = object()


def parsed(raw: bytes) -> Any:
    """Return the value of a JSON text; ``ValueError``, or ``RecursionError`` beyond ``DEEPEST``."""
    value = json.loads(raw)
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        level = [
            part
            for outer in level
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, dict | list)
        ]
        if not level:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def take_apart(
    value: Any, take: Callable[[str, Tensor], str | None], name: str = "", depth: int = 0
) -> Any:
    """Return the skeleton of a value: plain JSON, with names in place of tensors.

    The value consists of tensors, numbers, strings, None, and dicts, lists and tuples of them;
    anything else raises ``TypeError`` with its name. ``take`` gets each tensor with its dotted name
    and returns the name to write, or None to skip the dict entry; ``name`` is the value's own name,
    ``depth`` the number of containers around it. Raises ``ValueError`` if the value is nested too
    deep, or a list holds a tensor to skip.
    """
    if depth > DEEPEST_STATE:
        raise ValueError(
            f"{name[:60]}... is nested more than {DEEPEST_STATE} deep; checkpoints hold no more"
        )
    if isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind in _SUBCLASSES:
            parts, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            return {
                "subclass": kind,
                "parts": {p: take_apart(getattr(value, p), take, f"{name}.{p}") for p in parts},
                "context": take_apart([*context], take, name),
            }
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name} is a {kind}, a kind of tensor that checkpoints do not know")
        taken = take(name, value)
        return _SKIPPED if taken is None else {"tensor": taken}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):  # JSON has neither inf nor NaN
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.dtype):
        check_dtype(name, value)
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        parts = [take_apart(part, take, f"{name}.{k}", depth + 1) for k, part in enumerate(value)]
        if any(part is _SKIPPED for part in parts):
            raise ValueError(f"{name} is a {type(value).__name__}, of which nothing can be skipped")
        return parts if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, Mapping):
        entries = [
            (key, take_apart(part, take, f"{name}.{key}".lstrip("."), depth + 1))
            for key, part in value.items()
        ]
        entries = [(key, part) for key, part in entries if part is not _SKIPPED]
        if all(isinstance(key, str) for key in value):
            return {"dict": dict(entries)}
        if all(isinstance(key, int | str) for key in value):
            return {"items": [[key, part] for key, part in entries]}
        raise TypeError(f"{name} has keys that are neither strings nor integers")
    raise TypeError(
        f"{name} is a {type(value).__name__}: checkpoints hold tensors, numbers, strings, None, "
        "and dicts, lists and tuples of them"
    )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES.values():
        raise TypeError(f"{name} is of {dtype}; checkpoints hold {', '.join(DTYPES)}")


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`take_apart` split.

    Raises ``DamagedError`` if the skeleton is not from :func:`take_apart`, or names a missing
    tensor, and ``ValueError`` if the class of a tensor is not installed.
    """
    if skeleton is None or isinstance(skeleton, bool | str | int | float):
        return skeleton
    if isinstance(skeleton, list):
        return [put_together(part, tensors) for part in skeleton]
    match skeleton:
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"float": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"dtype": str(text)} if text in DTYPES:
            return DTYPES[text]
        case {"tuple": list(parts)}:
            return tuple(put_together(part, tensors) for part in parts)
        case {"dict": dict(parts)}:
            return {key: put_together(part, tensors) for key, part in parts.items()}
        case {"items": list(pairs)} if all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str)
            for pair in pairs
        ):
            return {key: put_together(part, tensors) for key, part in pairs}
        case {"subclass": str(kind), "parts": dict(parts), "context": context} if (
            kind in _SUBCLASSES
        ):
            module, _, name = kind.rpartition(".")
            try:
                subclass = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as problem:
                raise ValueError(
                    f"the checkpoint has a {kind}, which is not installed here"
                ) from problem
            inner = {key: put_together(part, tensors) for key, part in parts.items()}
            try:
                return subclass.__tensor_unflatten__(
                    inner, tuple(put_together(context, tensors)), None, None
                )
            except (KeyError, RuntimeError, TypeError, ValueError) as problem:
                raise DamagedError(f"the parts make no {kind}: {problem!r}") from problem
    raise DamagedError(f"no such value: {str(skeleton)[:80]}")
