"""A copy of everything a checkpoint keeps, and how each tensor of it is to be kept.

The state is taken apart into tensors by name and a skeleton of JSON, from which it is put together
again without running any code of the file.
"""

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from comera.checkpoint.streams import DamagedError
from comera.params import Undisturbed

Skeleton = Any

Treatment = Literal["exact", "lossy", "skip"]

SMALLEST_LOSSY = 256
"""Tensors of fewer entries are kept exactly, as are vectors: they are sensitive, and no saving."""

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENT = "exp_avg_sq"


class Policy:
    """Treatment of tensors, by patterns of names, and else by their kind.

    Weights and moments of floats are lossy if they are matrices or larger; the rest is exact:
    vectors, counters, projections, quantised states, buffers, and everything in ``extra``.
    """

    def __init__(self, patterns: Mapping[str, str] | None = None, lossless: bool = False) -> None:
        """
        Args:
            patterns: Regular expressions of whole names, the first that matches counts. Names are
                ``model.NAME``, ``optimizer.NAME.KEY`` and ``extra.KEY``.
            lossless: Nothing is lossy unless a pattern says so.

        Raises:
            ValueError: If a pattern or a treatment is none.
        """
        self._patterns, self._lossless = [], lossless
        for pattern, treatment in (patterns or {}).items():
            if treatment not in get_args(Treatment):
                raise ValueError(
                    f"policy {pattern!r}: {treatment!r} is not one of {get_args(Treatment)}"
                )
            try:
                self._patterns.append((re.compile(pattern), treatment))
            except re.error as problem:
                raise ValueError(
                    f"policy {pattern!r} is no regular expression: {problem}"
                ) from None

    def treatment(self, name: str, tensor: Tensor, lossy: bool) -> str:
        """Return how the tensor of that name is kept; ``lossy``: whether its kind may be lossy."""
        for pattern, treatment in self._patterns:
            if pattern.fullmatch(name) and (treatment != "lossy" or _can_be_lossy(tensor)):
                return treatment
        if not lossy or self._lossless:
            return "exact"
        matrix = tensor.ndim > 1 and tensor.numel() >= SMALLEST_LOSSY
        return "lossy" if matrix and _can_be_lossy(tensor) else "exact"


def _can_be_lossy(tensor: Tensor) -> bool:
    """Return whether a tensor holds real numbers of more than eight bits each."""
    return tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0


@dataclass
class MomentNames:
    """Names of the moments of one parameter, which are kept together.

    Attributes:
        weight: Name of the weight whose change decides which are kept, if it is known and lossy.
        first: Name of the first moments.
        second: Name of the second moments, if there are.
    """

    weight: str | None
    first: str
    second: str | None


@dataclass
class Snapshot:
    """Tensors by name, in the order in which they are written.

    Attributes:
        skeleton: The rest, see :func:`take_apart`.
        model: The model's tensors; changes of these are what a chain is made of.
        rest: All others.
        lossy: Names of weights that may be changed a little.
        moments: Lossy moments; tensors in none of them are exact.
    """

    skeleton: Skeleton = None
    model: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)
    lossy: set[str] = field(default_factory=set)
    moments: list[MomentNames] = field(default_factory=list)

    @property
    def raw_bytes(self) -> int:
        """Count the bytes of all tensors."""
        return sum(t.nbytes for part in (self.model, self.rest) for t in part.values())


def take_snapshot(
    model: nn.Module | Mapping[str, Any],
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    policy: Policy,
    parameters: Mapping[Any, str] | None = None,
) -> Snapshot:
    """Copy the state of a model, an optimizer and the caller.

    Args:
        model: A module or its state.
        optimizer: An optimizer, its state, or None.
        extra: Tensors and plain values of the caller.
        policy: Which tensors are skipped, and which are lossy.
        parameters: Names of weights by the optimizer's keys of parameters, where a state is given
            in place of an optimizer.

    Raises:
        TypeError: If something is neither a tensor nor a plain value; says which.
        RuntimeError: If another thread trains the model meanwhile.
    """
    if not isinstance(model, nn.Module | Mapping):
        raise TypeError(
            f"the model is a {type(model).__name__}; what is saved is (step, model, optimizer), "
            "modules and optimizers or their state_dict()"
        )
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    states = optimizer.state_dict() if hasattr(optimizer, "state_dict") else optimizer
    # Of a bare state nothing tells parameters from buffers, which must be exact: all may be lossy.
    trained = set(weights)
    if isinstance(model, nn.Module):
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = parameters or _names_of_parameters(model, optimizer, weights, states)
    entries = {  # paths of the optimizer's tensors, numbered like the parameters, and their names
        f"optimizer.state.{key}.{entry}": f"optimizer.{names.get(key, key)}.{entry}"
        for key, found in (states or {}).get("state", {}).items()
        if isinstance(found, Mapping)
        for entry in found
    }
    snapshot = Snapshot()
    where: dict[Any, str] = {}  # tied tensors are kept once, if they are treated alike

    def take(path: str, tensor: Tensor) -> str | None:
        part, _, inner = path.partition(".")
        name, lossy = path, part == "model" and inner in trained
        if path in entries:
            name, lossy = entries[path], entries[path].endswith(_LOSSY_MOMENTS)
        treatment = policy.treatment(name, tensor, lossy)
        if treatment == "skip":
            return None
        check_holdable(name, tensor)
        place = (
            treatment, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(),
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        if tensor.numel() and place in where:
            return where[place]
        into = snapshot.model if part == "model" else snapshot.rest
        while name in snapshot.model or name in snapshot.rest:
            name += "'"  # {"a.b": 1, "a": {"b": 2}}
        copy = tensor.detach().to("cpu", copy=True)
        into[name], where[place] = copy.contiguous(), name
        if treatment == "lossy":
            snapshot.lossy.add(name)
        return name

    parts = {
        "model": weights, "optimizer": states, "extra": extra or {}, "parameters": names
    }  # fmt: skip
    watched = Undisturbed(weights)
    snapshot.skeleton = take_apart(parts, take)
    watched.check()
    snapshot.moments = _moments(snapshot)
    return snapshot


_LOSSY_MOMENTS = tuple(f".{key}" for key in (*_FIRST_MOMENTS, _SECOND_MOMENT))


def _names_of_parameters(
    model: nn.Module | Mapping[str, Any],
    optimizer: Any,
    weights: Mapping[str, Any],
    states: Mapping[str, Any] | None,
) -> dict[Any, str]:
    """Return names of weights by the optimizer's keys of parameters, as far as they are known."""
    if not states or "state" not in states:
        return {}
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "param_groups"):
        return _guessed(weights, states)
    of = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {k: of[id(param)] for k, param in enumerate(params) if id(param) in of}


def _guessed(weights: Mapping[str, Any], states: Mapping[str, Any]) -> dict[Any, str]:
    """Return names of numbered parameters: those in the state, or the weights' in order.

    Nothing where moments would then have other shapes than the weights.
    """
    groups = states.get("param_groups", [])
    numbers = [k for group in groups for k in group.get("params", [])]
    names = [name for group in groups for name in group.get("param_names", [])]
    if len(names) == len(numbers):
        return dict(zip(numbers, names, strict=True))
    if numbers and all(key in weights for key in numbers):  # names already
        return {name: name for name in numbers}
    floats = [n for n, w in weights.items() if isinstance(w, Tensor) and w.is_floating_point()]
    if len(floats) != len(numbers):
        return {}
    guessed = dict(zip(sorted(numbers), floats, strict=True))
    for key, name in guessed.items():
        moment = states["state"].get(key, {}).get("exp_avg")
        if isinstance(moment, Tensor) and moment.shape != weights[name].shape:
            return {}
    return guessed


def _moments(snapshot: Snapshot) -> list[MomentNames]:
    found, taken = [], set[str]()  # an optimizer may keep two first moments beside one second
    for first in snapshot.rest:
        parameter, _, key = first.removeprefix("optimizer.").rpartition(".")
        if first not in snapshot.lossy or key not in _FIRST_MOMENTS:
            continue
        shape = snapshot.rest[first].shape
        weight, second = f"model.{parameter}", f"optimizer.{parameter}.{_SECOND_MOMENT}"
        weighed = weight in snapshot.lossy and snapshot.model[weight].shape == shape
        free = second in snapshot.lossy and second not in taken
        paired = free and snapshot.rest[second].shape == shape
        found.append(MomentNames(weight if weighed else None, first, second if paired else None))
        if paired:
            taken.add(second)
    return found


# ── the skeleton ─────────────────────────────────────────────────────────────────────────────────


DEEPEST_STATE = 64
"""Levels of dicts, lists and tuples in a state to save; each takes up to three of JSON's."""

DEEPEST = 3 * DEEPEST_STATE + 16
"""Levels of JSON: their readers are recursive, and Python bounds the depth of calls."""


def parsed(raw: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is none, or nested more than ``DEEPEST`` deep. What is nested far deeper
            can raise a RecursionError.
    """
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
        case {"items": list(pairs)} if all(map(_is_pair, pairs)):
            return {key: put_together(part, tensors) for key, part in pairs}
        case {"subclass": str(kind), "parts": dict(parts), "context": context} if (
            kind in _KINDS_OF_TENSOR
        ):
            return _unflattened(
                kind,
                {key: put_together(part, tensors) for key, part in parts.items()},
                put_together(context, tensors),
            )
    raise DamagedError(f"no such value: {str(skeleton)[:80]}")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str)


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
