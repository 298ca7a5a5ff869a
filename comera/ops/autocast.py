"""Autocast for operators that choose their precision themselves."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Autocast off on the tensor's device; the meta device has none to switch off."""
    if _is_on(like):
        return torch.autocast(like.device.type, enabled=False)
    return nullcontext()


def autocast_together(
    x: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """All in autocast's dtype where autocast is on; float64 is left as it is."""
    if not _is_on(x) or lefts[0].dtype == torch.float64:
        return x, list(lefts), list(rights)
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), [left.to(dtype) for left in lefts], [right.to(dtype) for right in rights]


def autocast_dtype(like: Tensor) -> torch.dtype:
    """That of products with the tensor: autocast's where it is on, but float64 is left as it is."""
    if like.dtype == torch.float64 or not _is_on(like):
        return like.dtype
    return torch.get_autocast_dtype(like.device.type)


def _is_on(like: Tensor) -> bool:
    kind = like.device.type
    return _is_available(kind) and torch.is_autocast_enabled(kind)


def _is_available(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# What torch.compiler.assume_constant_result does; the compiler of torch 2.11 cannot look inside.
_is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]
