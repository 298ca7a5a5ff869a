"""Dropout whose mask is cheap to draw and small to keep, with the residual added on the way.

torch draws one random number for each element on a CPU and keeps the mask in the type of the
input; once the linear layers are thin, that is a quarter of a training step. Here one random
number serves four elements, and the mask takes a byte.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_STEPS = 1 << 16
"""Probabilities are rounded to multiples of one in this many."""


def dropout_add(x: Tensor, residual: Tensor | None, p: float, training: bool) -> Tensor:
    """``residual + dropout(x)``.

    Args:
        x: Any shape.
        residual: Of the same shape; None for dropout alone.
        p: Probability of dropping an element; on a CPU rounded to 16 bits.
        training: Without it nothing is dropped.

    Returns:
        A tensor like x, whose kept elements are scaled by ``1 / (1 - p)``.
    """
    if not training or p == 0:
        return x if residual is None else residual + x
    if draws_own_masks(x):
        return _DropoutAdd.apply(x, residual, p)
    dropped = torch.nn.functional.dropout(x, p, training)
    return dropped if residual is None else residual + dropped


def draws_own_masks(x: Tensor) -> bool:
    """On a CPU, outside torch.compile, which generates better code from torch's own dropout."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def keep_mask(shape: tuple[int, ...], p: float) -> tuple[Tensor, float]:
    """A random int8 mask on the CPU, zero with probability p, and the scale of what is kept."""
    dropped = round(p * _STEPS)
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    if dropped == _STEPS:
        return torch.zeros(shape, dtype=torch.int8), 0.0
    keep = words.view(torch.int16).ge_(dropped - _STEPS // 2)
    return keep[:count].to(torch.int8).view(shape), _STEPS / (_STEPS - dropped)


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor | None, p: float) -> Tensor:
        keep, ctx.scale = keep_mask(x.shape, p)
        ctx.save_for_backward(keep)
        kept = keep.to(x.dtype)
        if residual is None:
            return x * kept.mul_(ctx.scale)
        return torch.addcmul(residual, x, kept, value=ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (keep,) = ctx.saved_tensors
        grad_residual = grad if ctx.needs_input_grad[1] else None
        return keep.to(grad.dtype).mul_(ctx.scale).mul_(grad), grad_residual, None
