"""Matrix products of numbers of eight bits, with one scale a matrix found anew for each product.

Values and weights are held as e4m3, which has three bits after the leading one and reaches 448,
gradients as e5m2, which has two and reaches 57344 (Micikevicius et al., FP8 formats for deep
learning, arXiv 2209.05433). The scale puts the largest entry of a matrix at the largest number of
the format. Products add up in float32. This is the recipe that torchao calls tensorwise, dynamic;
torchao itself takes ``nn.Linear`` modules, of which a tensor train has none.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_STEP = 16
"""cuBLAS takes such matrices only with rows of a multiple of 16 bytes."""

_FIRST_CARD = (8, 9)

_depth = 0  # one for all threads, as that of fixed_sizes


@contextlib.contextmanager
def scaled_products() -> Iterator[None]:
    """Inside, tensor-train linears of bfloat16 multiply in eight bits, backward included."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def products_are_scaled() -> bool:
    """Inside of :func:`scaled_products`."""
    return _depth > 0


class Scaled(NamedTuple):
    """A matrix in eight bits.

    Attributes:
        values: ``(M, N)``, both padded with zeros to multiples of 16.
        scale: A float32 scalar; the matrix is the product of both.
    """

    values: Tensor
    scale: Tensor

    @property
    def T(self) -> "Scaled":
        """Transposed, as a copy: products read rows only."""
        return Scaled(self.values.T.contiguous(), self.scale)


def padded_to_step(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // _STEP) * _STEP


def scaled(x_MN: Tensor, dtype: torch.dtype) -> Scaled:
    """A matrix that is not empty in eight bits, ``VALUES`` or ``GRADIENTS``."""
    largest = torch.finfo(dtype).max
    # Above zero, so that a matrix of zeros stays one; NaN stays NaN.
    scale = (x_MN.abs().amax().float() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    narrow = (x_MN.float() / scale).clamp_(-largest, largest).to(dtype)
    rows, columns = map(padded_to_step, x_MN.shape)
    if narrow.shape == (rows, columns):
        return Scaled(narrow.contiguous(), scale)
    values = torch.zeros(rows, columns, dtype=torch.uint8, device=x_MN.device)
    values[: x_MN.shape[0], : x_MN.shape[1]] = narrow.view(torch.uint8)
    return Scaled(values.view(dtype), scale)


def scaled_product(a_MK: Scaled, b_NK: Scaled, out_dtype: torch.dtype) -> Tensor:
    """``a @ b.T``, padding included: both are read row by row."""
    # torch.nn.functional.scaled_mm is the public one; torch 2.11 does not have it on a CPU.
    return torch._scaled_mm(
        a_MK.values, b_NK.values.T, scale_a=a_MK.scale, scale_b=b_NK.scale, out_dtype=out_dtype
    )


def scaled_product_reference(a_MK: Scaled, b_NK: Scaled, out_dtype: torch.dtype) -> Tensor:
    """The same as :func:`scaled_product` by numbers that are widened first."""
    a, b = (x.values.double() * x.scale for x in (a_MK, b_NK))
    return (a @ b.T).to(out_dtype)


@functools.cache
def why_not_scaled(device: torch.device) -> str | None:
    """Why products in eight bits do not run on a device, in words; None if they do."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FIRST_CARD:
            return (
                f"{torch.cuda.get_device_name(device)} has compute capability "
                f"{'.'.join(map(str, capability))}, and 8.9 or newer multiplies in eight bits"
            )
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no torch._scaled_mm"
    try:
        for dtype in (VALUES, GRADIENTS):
            one = torch.ones(_STEP, _STEP, device=device)
            scaled_product(scaled(one, dtype), scaled(one, VALUES), torch.bfloat16)
    except (RuntimeError, NotImplementedError, TypeError) as problem:
        return f"torch._scaled_mm fails on {device}: {str(problem).splitlines()[0]}"
    return None
