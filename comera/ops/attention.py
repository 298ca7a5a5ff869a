"""Attention with dropout on a CPU, a few sequences at a time.

torch has no fused attention with dropout there: its way keeps four tensors of all scores. This
one keeps two, one of them of bytes, and works on pieces that stay in the processor's cache.

Shape suffixes: B = batch, N = batch times key heads, M = queries a key head, T = keys, E = width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.dispatch import Ways, on_cpu_alone
from comera.ops.dropout import check_probability, keep_mask
from comera.ops.operator import operator

_SCORES = 1 << 20
"""Scores at a time on a CPU: a few megabytes, the size of a cache."""


def score_bias(keep_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores: zero for keys that may be attended to, else very little.

    Made once, it serves all layers of a model.
    """
    lowest = torch.finfo(dtype).min / 2  # finite: a softmax over -inf alone is NaN
    bias_BT = torch.logical_not(keep_BT, out=torch.empty_like(keep_BT, dtype=dtype))
    return bias_BT.mul_(lowest)


def attend(
    q_NME: Tensor, k_NTE: Tensor, v_NTE: Tensor, keep_BT: Tensor, scale: float, dropout: float
) -> Tensor:
    """Compute ``softmax(scale * q @ k.T) @ v``, with dropout on the softmax.

    Args:
        q_NME: Queries; several heads that share their keys stand one after the other in M.
        k_NTE: Keys.
        v_NTE: Values; their width may be another.
        keep_BT: Which keys may be attended to, booleans or whole numbers as Hugging Face has them,
            or what :func:`score_bias` has made of it; N is a
            multiple of B, sequence by sequence. A sequence without any is attended to evenly.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        ``(N, M, width of v)``. On a CPU it can be differentiated once.

    Raises:
        ValueError: If ``dropout`` is no probability.
    """
    check_probability(dropout)
    if keep_BT.dtype != q_NME.dtype:
        keep_BT = keep_BT == 0 if keep_BT.is_floating_point() else keep_BT != 0
        keep_BT = score_bias(keep_BT, q_NME.dtype)
    bias_B1T = keep_BT[:, None]
    heads = q_NME.shape[0] // max(1, keep_BT.shape[0])
    return _ATTEND(q_NME, k_NTE, v_NTE, bias_B1T, heads, scale, dropout)


def _sample(new: Callable[..., Any]) -> tuple[Any, ...]:
    return new(96, 128, 64), new(96, 128, 64), new(96, 128, 64), new(8, 1, 128), 12, 0.125, 0.1


def _not_in_pieces(q_NME: Tensor, *_: Any) -> str | None:
    if q_NME.dtype not in (torch.float32, torch.float64):
        return "the dtype is neither float32 nor float64"
    return on_cpu_alone(q_NME)


_ATTEND = Ways("attend", _sample)


@_ATTEND.way("in pieces", _not_in_pieces)
def _in_pieces(
    q_NME: Tensor,
    k_NTE: Tensor,
    v_NTE: Tensor,
    bias_B1T: Tensor,
    heads: int,
    scale: float,
    dropout: float,
) -> Tensor:
    bias_N1T = bias_B1T if heads == 1 else bias_B1T.repeat_interleave(heads, 0)
    return _attend(q_NME, k_NTE, v_NTE, bias_N1T, scale, dropout)[0]


@_ATTEND.way("torch")
def _by_torch(
    q_NME: Tensor,
    k_NTE: Tensor,
    v_NTE: Tensor,
    bias_B1T: Tensor,
    heads: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend in four dimensions: a GPU has fused kernels for no others."""
    q, k, v = (x.unflatten(0, (-1, max(1, heads))) for x in (q_NME, k_NTE, v_NTE))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias_B1T[:, None], dropout_p=dropout, scale=scale
    ).flatten(0, 1)


@operator("comera::attend", tags=[torch.Tag.nondeterministic_seeded])
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, the softmax, its dropout mask (empty without dropout) and its scale."""
    weights = q.new_empty(*q.shape[:2], k.shape[1])
    out = q.new_empty(*q.shape[:2], v.shape[2])
    keep, scale_kept = keep_mask(weights.shape if dropout else (0,), dropout)
    for n in _slices(weights):
        scores = torch.baddbmm(bias[n], q[n], k[n].mT, alpha=scale)
        torch.softmax(scores, -1, out=weights[n])
        _product_into(out[n], _drop(weights[n], keep, n), v[n], float(scale_kept))
    return out, weights, keep, scale_kept


@_attend.register_fake
def _(q, k, v, bias, scale, dropout):
    size = (*q.shape[:2], k.shape[1])
    out = q.new_empty(*q.shape[:2], v.shape[2])
    keep = q.new_empty(size if dropout else (0,), dtype=torch.int8)
    return out, q.new_empty(size), keep, q.new_empty((), dtype=torch.float32)


@torch.library.custom_op("comera::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    keep: Tensor,
    scale_kept: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    kept = float(scale_kept)
    for n in _slices(weights):
        _product_into(grad_v[n], _drop(weights[n], keep, n).mT, grad[n], kept)
        per_weight = _drop(grad[n] @ v[n].mT, keep, n)
        per_score = torch._softmax_backward_data(per_weight, weights[n], -1, q.dtype)
        _product_into(grad_q[n], per_score, k[n], kept * scale)
        _product_into(grad_k[n], per_score.mT, q[n], kept * scale)
    return grad_q, grad_k, grad_v


@_attend_backward.register_fake
def _(grad, q, k, v, weights, keep, scale_kept, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, _, ctx.scale, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output[1:])


def _backward(ctx, grad: Tensor | None, *_):
    if grad is None:
        return (None,) * 6
    grads = _attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None


_attend.register_autograd(_backward, setup_context=_setup_context)


def _drop(x: Tensor, keep: Tensor, n: slice) -> Tensor:
    """Mask without the scale: applying that to the narrow results saves a pass over all scores."""
    return keep[n].to(x.dtype).mul_(x) if keep.numel() else x


def _product_into(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _slices(weights: Tensor) -> Iterator[slice]:
    count = -(-weights.numel() // _SCORES)
    at_once = -(-weights.shape[0] // max(1, count))
    return (slice(n, n + at_once) for n in range(0, weights.shape[0], max(1, at_once)))
