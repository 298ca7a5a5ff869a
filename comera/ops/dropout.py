"""Dropout whose mask is cheap to draw and small to keep, with the residual added on the way.

torch draws one random number for each element on a CPU and keeps the mask in the type of the
input; once the linear layers are factorized, that is a quarter of a training step. Here one random
number of 64 bits serves eight elements, and the mask takes a byte.

Eight bits know only multiples of 1/256. So each mask is drawn at one of the two multiples next to
the probability asked for, at random, such that on average it is met exactly; what is kept is
scaled by what was really drawn.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from comera.ops.dispatch import Ways, on_cpu_alone
from comera.ops.operator import operator

_STEPS = 1 << 8


def dropout_add(x: Tensor, residual: Tensor | None, p: float, training: bool) -> Tensor:
    """Compute ``residual + dropout(x)``.

    Args:
        x: Any shape.
        residual: What is added, of the shape of x; None for dropout alone.
        p: Probability of dropping an element.
        training: Whether to drop anything at all.

    Returns:
        A tensor like x, whose kept elements are scaled so that its mean stays.

    Raises:
        ValueError: If p is no probability.
    """
    check_probability(p)
    if not training or p == 0:
        return x if residual is None else residual + x
    return _DROPOUT(x, residual, p)


_DROPOUT = Ways("dropout_add", lambda new: (new(1024, 768), new(1024, 768), 0.1))


@_DROPOUT.way("a mask of bytes", lambda x, *_: on_cpu_alone(x))
def _by_bytes(x: Tensor, residual: Tensor | None, p: float) -> Tensor:
    return _dropout_add(x, residual, p)[0]


@_DROPOUT.way("torch")
def _by_torch(x: Tensor, residual: Tensor | None, p: float) -> Tensor:
    dropped, _ = torch.native_dropout(x, p, True)
    return dropped if residual is None else residual + dropped


def check_probability(p: float) -> None:
    """Raise ``ValueError`` for a number outside of [0, 1]."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability {p} must be between 0 and 1")


def keep_mask(shape: Sequence[int], p: float) -> tuple[Tensor, Tensor]:
    """Draw an int8 mask on the CPU, zero with probability p, and the scale of what it keeps.

    Draws nothing for no entries: evaluation leaves torch's random state alone.
    """
    if not math.prod(shape):
        return torch.zeros(shape, dtype=torch.int8), torch.ones(())
    seed = int(torch.randint(1 << 62, ()))  # torch's seed decides; numpy draws twice as fast
    numbers = np.random.SFC64(seed)
    lower, count = math.floor(p * _STEPS), math.prod(shape)
    dropped = lower + int(numbers.random_raw() / 2**64 < p * _STEPS - lower)
    if dropped == _STEPS:
        return torch.zeros(shape, dtype=torch.int8), torch.zeros(())
    words = numbers.random_raw(-(-count // 8))
    keep = torch.from_numpy(words.view(np.int8)).ge_(dropped - _STEPS // 2)
    return keep[:count].view(shape), torch.tensor(_STEPS / (_STEPS - dropped))


@operator("comera::dropout_add", tags=[torch.Tag.nondeterministic_seeded])
def _dropout_add(x: Tensor, residual: Tensor | None, p: float) -> tuple[Tensor, Tensor, Tensor]:
    keep, scale = keep_mask(x.shape, p)
    base = _zero(x.dtype) if residual is None else residual
    return torch.addcmul(base, x, keep.to(x.dtype), value=float(scale)), keep, scale


@_dropout_add.register_fake
def _(x, residual, p):
    keep = x.new_empty(x.shape, dtype=torch.int8)
    return x.new_empty(x.shape), keep, x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("comera::dropout_backward", mutates_args=())
def _dropout_backward(grad: Tensor, keep: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(_zero(grad.dtype), grad, keep.to(grad.dtype), value=float(scale))


@_dropout_backward.register_fake
def _(grad, keep, scale):
    return grad.new_empty(grad.shape)


@functools.cache
def _zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx, grad: Tensor | None, *_):
    if grad is None:
        return None, None, None
    grad_residual = grad if ctx.needs_input_grad[1] else None
    return _dropout_backward(grad, *ctx.saved_tensors), grad_residual, None


_dropout_add.register_autograd(_backward, setup_context=_setup_context)
