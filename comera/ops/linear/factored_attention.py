"""The parts of an attention that stays in the middle bonds of its tensor trains, for kernels.

With ``q = x A_q B_q`` and ``k = x A_k B_k`` the scores of a head are
``(x A_q) (B_q B_k^T) (x A_k)^T``. The batch meets ``A_q`` and then the small middle factors of all
heads side by side, which is a low-rank linear layer itself; of the keys and values only ``x A_k``
and ``x A_v`` are wanted.

Shape suffixes: M = rows of the batch, I = input width, D = width, H = heads, R = padded bonds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.ops.dispatch import Ways
from comera.ops.factors import set_ones_
from comera.ops.kernels.low_rank_kernel import multiply, multiply_backward
from comera.ops.linear.tt_linear import kernel_refuses
from comera.ops.operator import operator


@operator("comera::head_factors")
def head_factors(
    right_q: Tensor, right_k: Tensor, right_v: Tensor, left_o: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Compute what stands between the factorized projections of an attention, for all heads.

    Args:
        right_q: ``(R, D)``, heads side by side; D is the same for all.
        right_k: ``(R, D)``, of an R of its own.
        right_v: ``(R, D)``, of an R of its own.
        left_o: ``(D, R)``, of an R of its own.
        num_heads: Number of heads that D is split into.

    Returns:
        ``(R_q, H * R_k)``, each head's ``B_q B_k^T`` side by side, and ``(H * R_v, R_o)``, each
        head's ``B_v A_o`` below the other. They can be differentiated once.
    """
    q, k, v, o = _by_head(right_q, right_k, right_v, left_o, num_heads)
    scores = q.new_empty(q.shape[1], num_heads, k.shape[1])
    with without_autocast(q):
        _product_into(scores.transpose(0, 1), q, k.mT)
        values = torch.bmm(v, o)
    return scores.flatten(1), values.flatten(0, 1)


@head_factors.register_fake
def _(right_q, right_k, right_v, left_o, num_heads):
    return (
        right_q.new_empty(right_q.shape[0], num_heads * right_k.shape[0]),
        right_q.new_empty(num_heads * right_v.shape[0], left_o.shape[1]),
    )


@torch.library.custom_op("comera::head_factors_backward", mutates_args=())
def _head_factors_backward(
    grad_scores: Tensor,
    grad_values: Tensor,
    right_q: Tensor,
    right_k: Tensor,
    right_v: Tensor,
    left_o: Tensor,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factors = right_q, right_k, right_v, left_o
    of_q, of_k, of_v, of_o = (factor.new_empty(factor.shape) for factor in factors)
    q, k, v, o = _by_head(*factors, num_heads)
    to_q, to_k, to_v, to_o = _by_head(of_q, of_k, of_v, of_o, num_heads)
    scores = grad_scores.unflatten(1, (num_heads, -1)).transpose(0, 1)
    values = grad_values.unflatten(0, (num_heads, -1))
    _product_into(to_q, scores, k)
    _product_into(to_k, scores.mT, q)
    _product_into(to_v, values, o.mT)
    _product_into(to_o, v.mT, values)
    return of_q, of_k, of_v, of_o


@_head_factors_backward.register_fake
def _(grad_scores, grad_values, right_q, right_k, right_v, left_o, num_heads):
    return tuple(factor.new_empty(factor.shape) for factor in (right_q, right_k, right_v, left_o))


def _setup_factors(ctx, inputs, output) -> None:
    *factors, ctx.num_heads = inputs
    ctx.save_for_backward(*factors)


def _back_factors(ctx, grad_scores: Tensor, grad_values: Tensor):
    with without_autocast(grad_scores):
        grads = _head_factors_backward(grad_scores, grad_values, *ctx.saved_tensors, ctx.num_heads)
    return *grads, None


head_factors.register_autograd(_back_factors, setup_context=_setup_factors)


@operator("comera::factorized_projections")
def factorized_projections(
    x_MI: Tensor, lefts: Sequence[Tensor], right_RO: Tensor, bias: bool
) -> list[Tensor]:
    """Compute one layer's output and the products of others with their left factors, in one pass.

    Args:
        x_MI: The batch.
        lefts: ``(I, R)`` each, left factors as
            :func:`~comera.ops.factors.contract_cores` makes them.
        right_RO: Right factor of the first.
        bias: Whether the last column of each ``x @ left`` is one instead.

    Returns:
        ``x @ lefts[0] @ right``, then ``x @ left`` of all the others, then that of the first. All
        can be differentiated once but the last, which is for the backward pass.
    """
    return PROJECTIONS(x_MI, lefts, right_RO, bias)


def _refuses(x_MI: Tensor, lefts: Sequence[Tensor], right_RO: Tensor, *_: Any) -> str | None:
    return kernel_refuses(x_MI, lefts, [right_RO])


PROJECTIONS = Ways(
    "factorized_projections", lambda new: (new(1024, 768), [new(768, 32)] * 3, new(32, 384), True)
)


@PROJECTIONS.way("kernel", _refuses, kernel="factorized_linears")
def _by_kernel(x_MI: Tensor, lefts: Sequence[Tensor], right_RO: Tensor, bias: bool) -> list[Tensor]:
    ts = [x_MI.new_empty(x_MI.shape[0], left.shape[1]) for left in lefts]
    (y,) = multiply(x_MI, lefts, [right_RO], ts, bias)
    return [y, *ts[1:], ts[0]]


@PROJECTIONS.way("torch")
def _by_torch(x_MI: Tensor, lefts: Sequence[Tensor], right_RO: Tensor, bias: bool) -> list[Tensor]:
    ts = [x_MI @ left for left in lefts]
    for t in ts:
        set_ones_(t, bias)
    return [ts[0] @ right_RO, *ts[1:], ts[0]]


@factorized_projections.register_fake
def _(x_MI, lefts, right_RO, bias):
    widths = [right_RO.shape[1], *(left.shape[1] for left in (*lefts[1:], lefts[0]))]
    return [x_MI.new_empty(x_MI.shape[0], width) for width in widths]


@torch.library.custom_op("comera::factorized_projections_backward", mutates_args=())
def _factorized_projections_backward(
    grads: Sequence[Tensor],
    x_MI: Tensor,
    lefts: Sequence[Tensor],
    right_RO: Tensor,
    t_MR: Tensor,
) -> list[Tensor]:
    """Return the gradients of x, of the left factors and of the right one."""
    return _PROJECTIONS_BACK(x_MI, lefts, right_RO, grads, t_MR)


_PROJECTIONS_BACK = Ways("factorized_projections_backward", PROJECTIONS.sample)


@_PROJECTIONS_BACK.way("kernel", _refuses, kernel="factorized_linears")
def _gradients_by_kernel(
    x_MI: Tensor,
    lefts: Sequence[Tensor],
    right_RO: Tensor,
    grads: Sequence[Tensor],
    t_MR: Tensor,
) -> list[Tensor]:
    grad_x, grad_lefts, grad_rights = multiply_backward(
        grads, x_MI, lefts, [right_RO], [t_MR], True, True
    )
    assert grad_x is not None
    return [grad_x, *grad_lefts, *grad_rights]


@_PROJECTIONS_BACK.way("torch")
def _gradients_by_torch(
    x_MI: Tensor,
    lefts: Sequence[Tensor],
    right_RO: Tensor,
    grads: Sequence[Tensor],
    t_MR: Tensor,
) -> list[Tensor]:
    us = [grads[0] @ right_RO.T, *grads[1:]]
    u = torch.cat(us, 1)
    return [u @ torch.cat(list(lefts), 1).T, *(x_MI.T @ each for each in us), t_MR.T @ grads[0]]


@_factorized_projections_backward.register_fake
def _(grads, x_MI, lefts, right_RO, t_MR):
    return [each.new_empty(each.shape) for each in (x_MI, *lefts, right_RO)]


def _setup_projections(ctx, inputs, output) -> None:
    x_MI, lefts, right_RO, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_MI, *lefts, right_RO, output[-1])


def _back_projections(ctx, grads: Sequence[Tensor | None]):
    x_MI, *lefts, right_RO, t_MR = ctx.saved_tensors
    widths = [right_RO.shape[1], *(left.shape[1] for left in lefts[1:])]
    with without_autocast(x_MI):
        grads = [
            x_MI.new_zeros(x_MI.shape[0], width) if grad is None else grad.to(x_MI.dtype)
            for grad, width in zip(grads, widths, strict=False)
        ]
        grad_x, *factors = _factorized_projections_backward(grads, x_MI, lefts, right_RO, t_MR)
    return grad_x, factors[:-1], factors[-1], None


factorized_projections.register_autograd(_back_projections, setup_context=_setup_projections)


def _by_head(
    right_q: Tensor, right_k: Tensor, right_v: Tensor, left_o: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split factors by head: ``(H, R, D / H)`` for q, k and v, ``(H, D / H, R)`` for o."""
    q, k, v = (
        right.unflatten(1, (num_heads, -1)).transpose(0, 1) for right in (right_q, right_k, right_v)
    )
    return q, k, v, left_o.unflatten(0, (num_heads, -1))


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write ``a @ b`` to ``out``, whose rows may lie apart, so that nothing is copied."""
    torch.bmm(a, b, out=out)
