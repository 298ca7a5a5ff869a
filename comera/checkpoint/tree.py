"""JSON that anyone may have written, parsed only where it is nested no deeper than it ever is.

What the index of a checkpoint says of each tensor: how it is coded, and what was kept of it.
"""

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeGuard

import torch
from torch import Tensor

from comera.checkpoint.streams import DamagedError

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


Skeleton = Any

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
"""Kinds of entries by name."""

_KINDS_OF_TENSOR = {
    "torchao.optim.subclass_4bit.OptimState4bit",
    "torchao.optim.subclass_8bit.OptimState8bit",
    "torchao.optim.subclass_fp8.OptimStateFp8",
}
"""Subclasses that are put together again: no other class named in a file is ever imported."""


def take_apart(
    value: Any, take: Callable[[str, Tensor], str | None], name: str = "", deep: int = 0
) -> Skeleton:
    """Return the skeleton of nested dicts, lists and tuples.

    Args:
        value: Tensors, numbers, strings, None, and dicts, lists and tuples of them.
        take: Given every tensor under its dotted name; returns what to write in its place, or
            None to leave out the entry of the dict it is in.
        name: Dotted name of the value itself.
        deep: How many others the value lies in.

    Raises:
        TypeError: If there is anything else; says where it lies.
        ValueError: If it is nested too deep to be read again, or in itself.
    """
    if deep > DEEPEST_STATE:
        raise ValueError(
            f"{name[:60]}... is nested more than {DEEPEST_STATE} deep; checkpoints hold no more"
        )
    if isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind in _KINDS_OF_TENSOR:
            # Packed state of torchao: its parts are tensors, which are kept like any other.
            return {"subclass": kind, **_flattened(value, take, name)}
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name} is a {kind}, a kind of tensor that checkpoints do not know")
        taken = take(name, value)
        return _LEFT_OUT if taken is None else {"tensor": taken}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):  # JSON knows neither inf nor NaN
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.dtype):
        _check_dtype(name, value)
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        parts = [take_apart(part, take, f"{name}.{k}", deep + 1) for k, part in enumerate(value)]
        if any(part is _LEFT_OUT for part in parts):
            raise ValueError(f"{name} is a {type(value).__name__}, of which nothing can be skipped")
        return parts if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, Mapping):
        parts = [
            (key, take_apart(v, take, f"{name}.{key}".lstrip("."), deep + 1))
            for key, v in value.items()
        ]
        parts = [(key, part) for key, part in parts if part is not _LEFT_OUT]
        if all(isinstance(key, str) for key in value):
            return {"dict": dict(parts)}
        if all(isinstance(key, int | str) for key in value):
            return {"items": [[key, part] for key, part in parts]}
        raise TypeError(f"{name} has keys that are neither strings nor integers")
    raise TypeError(
        f"{name} is a {type(value).__name__}: checkpoints hold tensors, numbers, strings, None, "
        "and dicts, lists and tuples of them"
    )


_LEFT_OUT = object()


def check_holdable(name: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` for a tensor that cannot be copied, or not be read again."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else f"of {tensor.layout}"
        raise TypeError(f"{name} is {kind}: checkpoints hold dense tensors")
    if tensor.is_meta:
        raise TypeError(f"{name} is on the meta device: it has no numbers that could be saved")
    _check_dtype(name, tensor.dtype)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES.values():
        raise TypeError(f"{name} is of {dtype}; checkpoints hold {', '.join(DTYPES)}")


def put_together(skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`take_apart` took apart.

    Raises:
        DamagedError: If the skeleton is not one of :func:`take_apart`, or names a missing tensor.
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
        case {"items": list(pairs)}:
            return {key: put_together(part, tensors) for key, part in map(_pair, pairs)}
        case {"subclass": str(kind), "parts": dict(parts), "context": context} if (
            kind in _KINDS_OF_TENSOR
        ):
            return _unflattened(
                kind,
                {key: put_together(part, tensors) for key, part in parts.items()},
                put_together(context, tensors),
            )
    raise DamagedError(f"no such value: {str(skeleton)[:80]}")


def _pair(pair: Any) -> tuple[int | str, Skeleton]:
    match pair:
        case [(int() | str()) as key, part]:
            return key, part
    raise DamagedError(f"no key and value: {str(pair)[:80]}")


def _flattened(value: Any, take: Callable[[str, Tensor], str | None], name: str) -> dict[str, Any]:
    parts, context = value.__tensor_flatten__()
    return {
        "parts": {part: take_apart(getattr(value, part), take, f"{name}.{part}") for part in parts},
        "context": take_apart([*context], take, name),
    }


def _unflattened(kind: str, parts: dict[str, Tensor], context: Any) -> Tensor:
    module, _, name = kind.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        raise ValueError(f"the checkpoint has a {kind}, which is not installed here") from problem
    return found.__tensor_unflatten__(parts, tuple(context), None, None)


_LARGEST = 1 << 48
_MOST_VALUES = 255


@dataclass(frozen=True)
class Record:
    """One tensor, or the two moments of one weight, in the streams of a checkpoint.

    Attributes:
        codec: Which pair of functions writes and reads it.
        change: Whether the bits of ``exact`` are those of a difference to the one before.
        kept: How many entries the other codecs have kept.
        books: How many values each of their codebooks has; two for first and second moments.
        places: Where kept entries lie: ``all``, ``many`` (marked one by one), or the bytes of their
            gaps.
        weight: The weight without whose changes ``moments`` cannot be read, if any.
        names: Names of the tensors.
        shape: Shape that all of them have.
        dtypes: Dtype of each of them.
    """

    codec: Literal["exact", "change", "moments"]
    change: bool = False
    kept: int = 0
    books: tuple[int, ...] = ()
    places: str | int = "all"
    weight: str | None = None
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def of(self, names: list[str], tensors: list[Tensor], weight: str | None = None) -> Self:
        """Return the same record with what is said of the tensors themselves."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        shape = tuple(tensors[0].shape)
        return replace(self, names=tuple(names), shape=shape, dtypes=dtypes, weight=weight)

    @property
    def bytes(self) -> int:
        """Count the bytes of the tensors in memory."""
        return sum(math.prod(self.shape) * dtype.itemsize for dtype in self.dtypes)

    @property
    def is_of_model(self) -> bool:
        """Tell whether the tensor is one of the model, not of the optimizer or extra state."""
        return self.names[0].startswith("model.")

    def as_json(self) -> dict[str, Any]:
        """Return plain values, their keys in the order in which every archive has them."""
        coded: dict[str, Any]
        if self.codec == "exact":
            coded = {"change": self.change}
        elif self.codec == "change":
            coded = {"kept": self.kept, "book": self.books[0], "places": self.places}
        else:
            coded = {"kept": self.kept, "books": list(self.books), "places": self.places}
            coded["weight"] = self.weight
        return {
            "codec": self.codec,
            **coded,
            "names": list(self.names),
            "shape": list(self.shape),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
        }

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Return the record that plain values describe.

        Raises:
            DamagedError: If :meth:`as_json` could not have written them.
        """
        match value:
            case {"names": list(names), "shape": list(shape), "dtypes": list(dtypes)} if (
                1 <= len(names) == len(dtypes) <= 2
                and all(isinstance(name, str) for name in names)
                and all(_is_count(size) for size in shape)
                and all(isinstance(dtype, str) and dtype in DTYPES for dtype in dtypes)
            ):
                record = cls._coded(value)
                kinds = tuple(DTYPES[dtype] for dtype in dtypes)
                if record is not None and record._fits(math.prod(shape), kinds):
                    return replace(record, names=tuple(names), shape=tuple(shape), dtypes=kinds)
        raise DamagedError(f"no such tensor: {str(value)[:80]}")

    @classmethod
    def _coded(cls, value: dict[str, Any]) -> Self | None:
        match value:
            case {"codec": "exact", "change": bool(change)}:
                return cls("exact", change)
            case {"codec": "change", "kept": kept, "book": book, "places": places}:
                return cls("change", kept=kept, books=(book,), places=places)
            case {
                "codec": "moments",
                "kept": kept,
                "books": list(books),
                "places": places,
                "weight": None | str() as weight,
            } if places != "all":
                return cls("moments", False, kept, tuple(books), places, weight)
        return None

    def _fits(self, entries: int, kinds: tuple[torch.dtype, ...]) -> bool:
        """Tell whether the figures are possible for tensors of so many entries."""
        if self.codec == "exact":
            return len(kinds) == 1
        if not all(kind.is_floating_point for kind in kinds) or len(kinds) != len(self.books):
            return False
        if not (_is_count(self.kept) and self.kept <= entries):
            return False
        if not all(_is_count(book) and book <= _MOST_VALUES for book in self.books):
            return False
        most = self.kept + entries // 255  # bytes of gaps
        places = self.places
        return places in ("all", "many") or (_is_count(places) and places <= most)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
