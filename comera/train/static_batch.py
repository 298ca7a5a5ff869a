"""A batch that stays at one place in memory, and what may be put there."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
"""Types of which a graph can hold a value as a constant."""

Signature = tuple[Any, tuple[Any, ...]]


class StaticBatch:
    """Tensors of which a recorded function reads; other values are part of the recording.

    Args:
        batch: Tensors and plain values in nested lists, tuples and dicts.

    Attributes:
        value: The batch, of tensors of its own.
        signature: What another batch must be like to be copied in its place.
    """

    def __init__(self, batch: Any) -> None:
        leaves, spec = tree_flatten(batch)
        self._leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self.value = tree_unflatten(self._leaves, spec)
        self.signature = signature(batch)

    def fill_(self, batch: Any) -> None:
        """Copy the tensors of a batch of equal signature; nothing waits for it."""
        for mine, given in zip(self._leaves, tree_flatten(batch)[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)


def signature(batch: Any) -> Signature:
    """Return structure, plain values, and the shape, dtype and device of every tensor."""
    leaves, spec = tree_flatten(batch)
    return spec, tuple(_kind(value) for value in leaves)


def why_not_static(batch: Any, device: torch.device) -> str | None:
    """Say what in a batch a recorded function could not read, and what to give instead."""
    for path, value in tree_flatten_with_path(batch)[0]:
        name = f"batch{keystr(path)}"
        if isinstance(value, Tensor):
            if value.device != device:
                return f"{name} is on {value.device} and the model on {device}: move it there first"
            if value.layout != torch.strided or value.is_nested:
                return f"{name} is sparse or nested: give its parts as dense tensors"
            if value.requires_grad:
                return f"{name} requires a gradient: give it detached"
        elif not isinstance(value, _PLAIN):
            return f"{name} is a {type(value).__name__}: give tensors, in lists, tuples and dicts"
    return None


def difference(before: Signature, now: Signature, batch: Any) -> str:
    """Say which part of a batch is not as it was.

    Args:
        before: What it was like.
        now: What it is like, and not the same.
        batch: The one of now.
    """
    (old_spec, old), (new_spec, new) = before, now
    if old_spec != new_spec:
        return f"the batch is another structure: {new_spec} instead of {old_spec}"
    paths = [path for path, _ in tree_flatten_with_path(batch)[0]]
    changes = [
        f"batch{keystr(path)} is {_say(mine)} instead of {_say(theirs)}"
        for path, mine, theirs in zip(paths, new, old, strict=True)
        if mine != theirs
    ]
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def is_variant(now: Signature, before: Signature) -> bool:
    """Tell whether batches differ in plain values alone: their tensors have the same places."""
    (old_spec, old), (new_spec, new) = before, now
    return old_spec == new_spec and all(
        mine == theirs or Tensor not in (mine[0], theirs[0])
        for mine, theirs in zip(new, old, strict=True)
    )


def is_shorter(now: Signature, before: Signature) -> bool:
    """Tell whether a batch only has fewer rows, as the last one of a data set has."""
    (old_spec, old), (new_spec, new) = before, now
    if old_spec != new_spec:
        return False
    pairs = [(mine, theirs) for mine, theirs in zip(new, old, strict=True) if mine != theirs]
    rows = {_without_rows(mine, theirs) for mine, theirs in pairs}
    return len(rows) == 1 and None not in rows


def _without_rows(mine: Any, theirs: Any) -> tuple[int, int] | None:
    """Return both numbers of rows, if those are all that differs and there are fewer."""
    both_tensors = mine[0] is theirs[0] is Tensor
    if not both_tensors or mine[2:] != theirs[2:] or not mine[1] or not theirs[1]:
        return None
    fewer = mine[1][0] < theirs[1][0] and mine[1][1:] == theirs[1][1:]
    return (mine[1][0], theirs[1][0]) if fewer else None


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.device
    return (type(value), value if isinstance(value, _PLAIN) else id(value))


def _say(kind: tuple[Any, ...]) -> str:
    if kind[0] is Tensor:
        _, shape, dtype, device = kind
        return f"{str(dtype).removeprefix('torch.')} {shape} on {device}"
    return repr(kind[1])
