"""What stands between the projections of an attention that stays in their middle bonds.

With ``q = x A_q B_q`` and ``k = x A_k B_k`` the scores of a head are
``(x A_q) (B_q B_k^T) (x A_k)^T``. The batch meets ``A_q`` and then the small middle factors of all
heads side by side, which is a low-rank linear layer itself; of the keys and values only ``x A_k``
and ``x A_v`` are wanted.

Shape suffixes: D = width, H = heads, R = padded bonds.
"""

import torch
from torch import Tensor

from comera.ops.context import without_autocast
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
