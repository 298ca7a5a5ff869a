"""Attention of several heads, whose keys and values may be shared by all of them.

A GPU has fused kernels, which share the work out by sequence, head and block of keys: heads that
share keys are given them once each, as views of one memory. A processor does not mind, and goes
through such keys once for the queries of all heads.

torch has no fused attention with dropout on a CPU: its way keeps four tensors of all scores. The
one here keeps two, one of them of bytes, and works on pieces that stay in the processor's cache.

Shape suffixes: B = batch, H = heads, G = heads of keys, H or 1, M = queries, T = keys, E = width,
N = batch times heads of keys, in pieces.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.dispatch import Case, Times, Ways, on_cpu_alone
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
    q_BHME: Tensor,
    k_BGTE: Tensor,
    v_BGTE: Tensor,
    keep_BT: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Compute ``softmax(scale * q @ k.T) @ v``, with dropout on the softmax.

    Args:
        q_BHME: Queries; a view of ``(B, M, H, E)`` in memory is not copied on a GPU.
        k_BGTE: Keys, of every head or one for all.
        v_BGTE: Values, as the keys; their width may be another.
        keep_BT: Which keys may be attended to, booleans or whole numbers as Hugging Face has them,
            or what :func:`score_bias` has made of it. A sequence without any is attended to
            evenly. None for all keys, which takes a GPU less time.
        scale: Factor of the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        ``(B, H, M, width of v)``, most often a view of ``(B, M, H, width of v)`` in memory. On a
        CPU it can be differentiated once.

    Raises:
        ValueError: If ``dropout`` is no probability.
    """
    check_probability(dropout)
    if keep_BT is not None and keep_BT.dtype != q_BHME.dtype:
        keep_BT = keep_BT == 0 if keep_BT.is_floating_point() else keep_BT != 0
        keep_BT = score_bias(keep_BT, q_BHME.dtype)
    return _ATTEND(q_BHME, k_BGTE, v_BGTE, keep_BT, scale, dropout)


def _sample(new: Callable[..., Any]) -> tuple[Any, ...]:
    return new(8, 12, 128, 32), new(8, 1, 128, 32), new(8, 1, 128, 32), new(8, 128), 0.125, 0.1


def _not_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> str | None:
    if q.dtype not in (torch.float32, torch.float64):
        return "the dtype is neither float32 nor float64"
    if not dropout and k.shape[-1] == v.shape[-1]:
        return "torch's own is fused without dropout"
    return on_cpu_alone(q)


def _not_as_one_head(q: Tensor, k: Tensor, *_: Any) -> str | None:
    if q.is_cuda:
        return "a card shares work out by heads"
    return None if k.shape[1] == 1 else "every head has keys of its own"


def _case(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> Case:
    """Time depends on the positions, on whether heads share keys, and on dropout."""
    keys = "shared keys" if k.shape[1] == 1 else "own keys"
    return q, q.dtype, (k.shape[2], keys, "dropout" if dropout else "no dropout")


_ATTEND = Ways("attend", _sample, Times("attend", _case))


@_ATTEND.way("in pieces", _not_in_pieces, timed_as="in pieces")
def _in_pieces(
    q_BHME: Tensor,
    k_BGTE: Tensor,
    v_BGTE: Tensor,
    bias_BT: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    q_BGME = _queries_by_keys(q_BHME, k_BGTE)
    bias_N1T = None if bias_BT is None else bias_BT[:, None]
    if bias_BT is not None and k_BGTE.shape[1] > 1:
        bias_N1T = bias_BT.repeat_interleave(k_BGTE.shape[1], 0)[:, None]
    q_NME, k_NTE, v_NTE = (x.flatten(0, 1) for x in (q_BGME, k_BGTE, v_BGTE))
    out_NME = _attend(q_NME, k_NTE, v_NTE, bias_N1T, scale, dropout)[0]
    return _by_heads(out_NME.view(*q_BGME.shape[:3], v_BGTE.shape[3]), q_BHME)


@_ATTEND.way("torch, all queries in one head", _not_as_one_head, timed_as="one head")
def _as_one_head(
    q_BHME: Tensor,
    k_B1TE: Tensor,
    v_B1TE: Tensor,
    bias_BT: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    q_B1ME = _queries_by_keys(q_BHME, k_B1TE)
    return _by_heads(_by_torch(q_B1ME, k_B1TE, v_B1TE, bias_BT, scale, dropout), q_BHME)


@_ATTEND.way("torch")
def _by_torch(
    q_BHME: Tensor,
    k_BGTE: Tensor,
    v_BGTE: Tensor,
    bias_BT: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    heads = q_BHME.shape[1]
    return F.scaled_dot_product_attention(
        q_BHME,
        k_BGTE.expand(-1, heads, -1, -1),  # of one head for all: nothing is copied
        v_BGTE.expand(-1, heads, -1, -1),
        attn_mask=None if bias_BT is None else bias_BT[:, None, None],
        dropout_p=dropout,
        scale=scale,
    )


def _queries_by_keys(q_BHME: Tensor, k_BGTE: Tensor) -> Tensor:
    """Put the queries of heads that share their keys into one head, position by position."""
    if k_BGTE.shape[1] == q_BHME.shape[1]:
        return q_BHME
    return q_BHME.transpose(1, 2).flatten(1, 2)[:, None]


def _by_heads(out_BGME: Tensor, like_BHME: Tensor) -> Tensor:
    """Undo :func:`_queries_by_keys` for the result."""
    if out_BGME.shape[1] == like_BHME.shape[1]:
        return out_BGME
    _, heads, queries, _ = like_BHME.shape
    return out_BGME.squeeze(1).unflatten(1, (queries, heads)).transpose(1, 2)


@operator("comera::attend", tags=[torch.Tag.nondeterministic_seeded])
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, the softmax, its dropout mask (empty without dropout) and its scale."""
    weights = q.new_empty(*q.shape[:2], k.shape[1])
    out = q.new_empty(*q.shape[:2], v.shape[2])
    keep, scale_kept = keep_mask(weights.shape if dropout else (0,), dropout)
    for n in _slices(weights):
        scores = _scores(q[n], k[n], None if bias is None else bias[n], scale)
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


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is None:
        return torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    return torch.baddbmm(bias, q, k.mT, alpha=scale)


def _drop(x: Tensor, keep: Tensor, n: slice) -> Tensor:
    """Mask without the scale: applying that to the narrow results saves a pass over all scores."""
    return keep[n].to(x.dtype).mul_(x) if keep.numel() else x


def _product_into(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _slices(weights: Tensor) -> Iterator[slice]:
    count = -(-weights.numel() // _SCORES)
    at_once = -(-weights.shape[0] // max(1, count))
    return (slice(n, n + at_once) for n in range(0, weights.shape[0], max(1, at_once)))
