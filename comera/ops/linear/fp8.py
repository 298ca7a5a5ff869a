"""Multiply matrices in fp8, with one dynamic scale per matrix.

Values and weights are e4m3, up to 448; gradients are e5m2, up to 57344 (Micikevicius et al., FP8
formats for deep learning, arXiv 2209.05433). The scale maps the largest entry of a matrix to the
largest number of the format; products accumulate in float32 (torchao: tensorwise, dynamic).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import without_autocast
from comera.ops.operator import operator

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_STEP = 16  # cuBLAS takes such matrices only with rows of a multiple of 16 bytes


class Fp8Matrix(NamedTuple):
    """A matrix in eight bits: ``values (M, N)``, padded to multiples of 16, times a scalar."""

    values: Tensor
    scale: Tensor

    @property
    def T(self) -> "Fp8Matrix":
        """A transposed copy, as products read both of their matrices row by row."""
        return Fp8Matrix(self.values.T.contiguous(), self.scale)


def padded_to_step(size: int) -> int:
    return -(-size // _STEP) * _STEP


def to_fp8(x_MN: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Quantize a non-empty matrix to fp8; ``dtype`` is ``VALUES`` or ``GRADIENTS``."""
    largest = torch.finfo(dtype).max
    # Above zero, so that a matrix of zeros stays one; NaN stays NaN.
    scale = (x_MN.abs().amax().float() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    narrow = (x_MN.float() / scale).clamp_(-largest, largest).to(dtype)
    rows, columns = map(padded_to_step, x_MN.shape)
    if narrow.shape == (rows, columns):
        return Fp8Matrix(narrow.contiguous(), scale)
    values = torch.zeros(rows, columns, dtype=torch.uint8, device=x_MN.device)
    values[: x_MN.shape[0], : x_MN.shape[1]] = narrow.view(torch.uint8)
    return Fp8Matrix(values.view(dtype), scale)


def fp8_product(a_MK: Fp8Matrix, b_NK: Fp8Matrix, out_dtype: torch.dtype) -> Tensor:
    """Compute ``a @ b.T`` with the padding; both matrices are read row by row."""
    # torch.nn.functional.scaled_mm is the public one; torch 2.11 does not have it on a CPU.
    return torch._scaled_mm(
        a_MK.values, b_NK.values.T, scale_a=a_MK.scale, scale_b=b_NK.scale, out_dtype=out_dtype
    )


@functools.cache
def why_not_fp8(device: torch.device) -> str | None:
    """Return why products in eight bits do not run on a device; None if they do."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return (
                f"{torch.cuda.get_device_name(device)} has compute capability "
                f"{'.'.join(map(str, capability))}, and 8.9 or newer multiplies in eight bits"
            )
    try:
        for dtype in (VALUES, GRADIENTS):
            one = torch.ones(_STEP, _STEP, device=device)
            fp8_product(to_fp8(one, dtype), to_fp8(one, VALUES), torch.bfloat16)
    except (RuntimeError, TypeError) as problem:
        return f"torch._scaled_mm fails on {device}: {str(problem).splitlines()[0]}"
    return None


def fp8_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Compute ``factorized_linears`` of the same arguments with products in eight bits.

    Returns ``(*, O)`` in the dtype of x for each pair, which can be differentiated once.
    """
    return _fp8_linears(x_BI, lefts, rights, bias)[: len(lefts)]


@operator("comera::fp8_linears")
def _fp8_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Return every ``y``; then, in eight bits for backward, x, all ``x @ left``, the factors."""
    with without_autocast(x_BI):
        batch, dtype = x_BI.shape[:-1], x_BI.dtype
        rows = math.prod(batch)
        x = to_fp8(x_BI.reshape(rows, -1), VALUES)
        beside = [F.pad(left, (0, padded_to_step(left.shape[1]) - left.shape[1])) for left in lefts]
        left_RI = to_fp8(torch.cat(beside, 1).T, VALUES)
        t = to_fp8(fp8_product(x, left_RI, dtype), VALUES)
        ys, kept, end = [], [], 0
        for right in rights:
            begin, end = end, end + padded_to_step(right.shape[0])
            # Padding takes the place of the row of a bias.
            right_RO = to_fp8(F.pad(right[:-1], (0, 0, 0, 1)) if bias else right, VALUES)
            tj = Fp8Matrix(t.values[:, begin:end].contiguous(), t.scale)
            y = fp8_product(tj, right_RO.T, dtype)[:rows, : right.shape[1]]
            y = y + right[-1] if bias else y.contiguous()
            ys.append(y.reshape(*batch, right.shape[1]))
            kept += [*right_RO]
        return [*ys, *x, *t, *left_RI, *kept]


@_fp8_linears.register_fake
def _(x_BI, lefts, rights, bias):
    batch, width = x_BI.shape[:-1], padded_to_step(x_BI.shape[-1])
    rows = padded_to_step(math.prod(batch))
    bonds = [padded_to_step(right.shape[0]) for right in rights]
    sizes = [(rows, width), (rows, sum(bonds)), (sum(bonds), width)]
    sizes += [
        (bond, padded_to_step(right.shape[1])) for bond, right in zip(bonds, rights, strict=True)
    ]
    found = [x_BI.new_empty(*batch, right.shape[1]) for right in rights]
    for size in sizes:
        found += [x_BI.new_empty(size, dtype=VALUES), x_BI.new_empty((), dtype=torch.float32)]
    return found


def _setup_context(ctx, inputs, output) -> None:
    x_BI, lefts, rights, ctx.bias = inputs
    ctx.shape, ctx.dtype = x_BI.shape, x_BI.dtype
    ctx.bonds = [left.shape[1] for left in lefts]
    ctx.widths = [right.shape[1] for right in rights]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[len(lefts) :])


def _backward(ctx, grads: Sequence[Tensor | None]):
    count, saved = len(ctx.bonds), ctx.saved_tensors
    if all(gy is None for gy in grads[:count]):
        return None, [None] * count, [None] * count, None
    pairs = [Fp8Matrix(*saved[k : k + 2]) for k in range(0, len(saved), 2)]
    x, t, left_RI, *rights = pairs
    rows, width = math.prod(ctx.shape[:-1]), ctx.shape[-1]
    like = saved[1]
    with without_autocast(like):
        us, grad_rights, end = [], [], 0
        t_RB = t.T
        for gy, right_RO, bond, out in zip(grads, rights, ctx.bonds, ctx.widths, strict=False):
            begin, end = end, end + right_RO.values.shape[0]
            if gy is None:
                gy = like.new_zeros(rows, out, dtype=ctx.dtype)
            gy = gy.reshape(rows, out).to(ctx.dtype)
            narrow = to_fp8(gy, GRADIENTS)
            us.append(fp8_product(narrow, right_RO, ctx.dtype))
            tj = Fp8Matrix(t_RB.values[begin:end], t.scale)
            grad = fp8_product(tj, narrow.T, ctx.dtype)[:bond, :out]
            if ctx.bias:
                grad = torch.cat([grad[:-1], gy.sum(0, keepdim=True)])
            grad_rights.append(grad.contiguous())
        u = to_fp8(torch.cat(us, 1), GRADIENTS)
        grad_x = fp8_product(u, left_RI.T, ctx.dtype)[:rows, :width].reshape(ctx.shape)
        grad_left_RI = fp8_product(u.T, x.T, ctx.dtype)[:, :width]
        parts = grad_left_RI.split([right.values.shape[0] for right in rights])
        grad_lefts = [part[:bond].T for part, bond in zip(parts, ctx.bonds, strict=True)]
    return grad_x, grad_lefts, grad_rights, None


_fp8_linears.register_autograd(_backward, setup_context=_setup_context)
