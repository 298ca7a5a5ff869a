"""Ask what an operator runs under: autocast, static shapes, fp8 or tf32, which machine."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from comera.planning.machine import Machine, load_machine


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Return a context with autocast off on the tensor's device; does nothing on ``meta``."""
    if is_autocast_on(like):
        return torch.autocast(like.device.type, enabled=False)
    return nullcontext()


def autocast_together(x: Tensor, factor: Tensor, *others: Tensor | None) -> list[Any]:
    """Cast all the tensors to autocast's dtype if autocast is on and ``factor`` is not float64."""
    if not is_autocast_on(x) or factor.dtype == torch.float64:
        return [x, factor, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [each if each is None else each.to(dtype) for each in (x, factor, *others)]


def autocast_dtype(like: Tensor) -> torch.dtype:
    """Return autocast's dtype; the tensor's own if that is float64 or autocast is off."""
    if like.dtype == torch.float64 or not is_autocast_on(like):
        return like.dtype
    return torch.get_autocast_dtype(like.device.type)


def is_autocast_on(like: Tensor) -> bool:
    if like.is_cpu:
        return torch.is_autocast_enabled("cpu")
    kind = like.device.type
    return _is_available(kind) and torch.is_autocast_enabled(kind)


def _is_available(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# What torch.compiler.assume_constant_result does; the compiler of torch 2.11 cannot look inside.
_is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]

_depth = 0  # one for all threads: in another one it only costs time


@contextlib.contextmanager
def static_shapes() -> Iterator[None]:
    """Forbid sizes that depend on values inside the context, as in a CUDA graph."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def shapes_are_static(like: Tensor) -> bool:
    """Return whether code is in :func:`static_shapes`, or captures a graph on that device.

    Code compiled for a card may be captured later.
    """
    if _depth > 0 or not like.is_cuda:
        return _depth > 0
    return torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()


_fp8_depth = 0  # one for all threads, as that of static_shapes


@contextlib.contextmanager
def fp8_products() -> Iterator[None]:
    """Enable fp8 products in bfloat16 tensor-train linears inside, forward and backward."""
    global _fp8_depth
    _fp8_depth += 1
    try:
        yield
    finally:
        _fp8_depth -= 1


def products_are_fp8() -> bool:
    return _fp8_depth > 0


def is_ordinary(like: Tensor) -> bool:
    """Return whether products run eagerly and unchanged: not compiled, captured or in fp8."""
    compiled = torch.compiler.is_compiling()
    return not (compiled or products_are_fp8() or shapes_are_static(like))


def products_are_tf32(like: Tensor) -> bool:
    """Return whether torch may use tf32 for a tensor's products on a card."""
    return like.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def machine_of(device: torch.device) -> Machine:
    """Load the measured profile of a GPU or, for any other device, of the CPU; else defaults."""
    if device.type == "cuda" and torch.cuda.is_available():
        return load_machine("cuda", torch.cuda.get_device_name(device))
    return load_machine("cpu", threads=torch.get_num_threads())
