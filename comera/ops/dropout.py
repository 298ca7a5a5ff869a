"""Dropout whose mask is cheap to draw and small to keep, with the residual added on the way.

torch draws one random number for each element on a CPU and keeps the mask in the type of the
input; once the linear layers are thin, that is a quarter of a training step. Here one random
number serves four elements, and the mask takes a byte.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
    if x.device.type == "cpu":
        return _dropout_add(x, residual, p)[0]
    dropped = torch.nn.functional.dropout(x, p, training)
    return dropped if residual is None else residual + dropped


def keep_mask(shape: Sequence[int], p: float) -> Tensor:
    """A random int8 mask on the CPU, zero with probability p."""
    dropped, count = _dropped_steps(p), math.prod(shape)
    if dropped == _STEPS:
        return torch.zeros(shape, dtype=torch.int8)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    keep = words.view(torch.int16).ge_(dropped - _STEPS // 2)
    return keep[:count].to(torch.int8).view(shape)


def keep_scale(p: float) -> float:
    """What the kept elements are multiplied by, so that the mean stays."""
    dropped = _dropped_steps(p)
    return _STEPS / (_STEPS - dropped) if dropped < _STEPS else 0.0


def _dropped_steps(p: float) -> int:
    return round(p * _STEPS)


@torch.library.custom_op(
    "comera::dropout_add", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropout_add(x: Tensor, residual: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    keep = keep_mask(x.shape, p)
    kept, scale = keep.to(x.dtype), keep_scale(p)
    if residual is None:
        return kept.mul_(scale).mul_(x), keep
    return torch.addcmul(residual, x, kept, value=scale), keep


@_dropout_add.register_fake
def _(x, residual, p):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int8)


def _setup_context(ctx, inputs, output) -> None:
    ctx.scale = keep_scale(inputs[2])
    ctx.save_for_backward(output[1])


def _backward(ctx, grad: Tensor, _):
    (keep,) = ctx.saved_tensors
    grad_x = keep.to(grad.dtype) * ctx.scale * grad
    return grad_x, grad if ctx.needs_input_grad[1] else None, None


_dropout_add.register_autograd(_backward, setup_context=_setup_context)
