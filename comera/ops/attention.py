"""Attention with dropout on a CPU, a few sequences at a time.

torch has no fused attention with dropout there: its way keeps four tensors of all scores. This
one keeps two, one of them of bytes, and works on pieces that stay in the processor's cache.

Shape suffixes: B = batch, N = batch times key heads, M = queries a key head, T = keys, E = width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from comera.ops.dropout import draws_own_masks, keep_mask

_SCORES = 1 << 20
"""Scores at a time on a CPU: a few megabytes, the size of a cache."""


def attend(
    q_NME: Tensor, k_NTE: Tensor, v_NTE: Tensor, keep_BT: Tensor, scale: float, dropout: float
) -> Tensor:
    """``softmax(scale * q @ k.T) @ v``, with dropout on the softmax.

    Args:
        q_NME: Queries; several heads that share their keys stand one after the other in M.
        k_NTE: Keys.
        v_NTE: Values; their width may be another.
        keep_BT: Which keys may be attended to; N is a multiple of B, sequence by sequence. A
            sequence without any is attended to evenly.
        scale: Of the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        ``(N, M, width of v)``. On a CPU it can be differentiated once.
    """
    lowest = torch.finfo(q_NME.dtype).min / 2  # finite: a softmax over -inf alone is NaN
    bias_BT = torch.zeros_like(keep_BT, dtype=q_NME.dtype).masked_fill_(~keep_BT, lowest)
    bias_N1T = bias_BT.repeat_interleave(q_NME.shape[0] // keep_BT.shape[0], 0)[:, None]
    if draws_own_masks(q_NME) and q_NME.dtype in (torch.float32, torch.float64):
        return _Attend.apply(q_NME, k_NTE, v_NTE, bias_N1T, scale, dropout)
    return F.scaled_dot_product_attention(
        q_NME, k_NTE, v_NTE, attn_mask=bias_N1T, dropout_p=dropout, scale=scale
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, scale: float, dropout: float) -> Tensor:
        weights = q.new_empty(*q.shape[:2], k.shape[1])
        out = q.new_empty(*q.shape[:2], v.shape[2])
        keep, ctx.keep_scale = keep_mask(weights.shape, dropout) if dropout else (None, 1.0)
        for n in _slices(weights):
            scores = torch.baddbmm(bias[n], q[n], k[n].mT, alpha=scale)
            torch.softmax(scores, -1, out=weights[n])
            kept = weights[n] if keep is None else _drop(weights[n], keep[n], ctx.keep_scale)
            torch.bmm(kept, v[n], out=out[n])
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, weights, keep)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, weights, keep = ctx.saved_tensors
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
        for n in _slices(weights):
            kept = weights[n] if keep is None else _drop(weights[n], keep[n], ctx.keep_scale)
            torch.bmm(kept.mT, grad[n], out=grad_v[n])
            per_weight = grad[n] @ v[n].mT
            if keep is not None:
                per_weight = _drop(per_weight, keep[n], ctx.keep_scale)
            per_score = torch._softmax_backward_data(per_weight, weights[n], -1, q.dtype)
            per_score *= ctx.scale
            torch.bmm(per_score, k[n], out=grad_q[n])
            torch.bmm(per_score.mT, q[n], out=grad_k[n])
        return grad_q, grad_k, grad_v, None, None, None


def _drop(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    return keep.to(x.dtype).mul_(scale).mul_(x)


def _slices(weights: Tensor) -> Iterator[slice]:
    at_once = max(1, _SCORES // max(1, weights[0].numel())) if weights.shape[0] else 1
    return (slice(n, n + at_once) for n in range(0, weights.shape[0], at_once))
