"""Attention of several heads, the factors between factorized projections, and dropout.

Heads may share keys and values. A GPU has fused kernels, which share the work out by sequence, head
and block of keys: heads that share keys are given them once each, as views of one memory. A
processor goes through such keys once for the queries of all heads.

torch has no fused attention with dropout on a CPU: its way keeps four tensors of all scores. The
one here keeps two, one of them of bytes, and works on pieces that stay in the processor's cache.

torch draws one random number for each element of dropout on a CPU and keeps the mask in the type of
the input; once the linear layers are factorized, that is a quarter of a training step. Here one
random number of 64 bits serves eight elements, and the mask takes a byte. Eight bits know only
multiples of 1/256. So each mask is drawn at one of the two multiples next to the probability asked
for, at random, such that on average it is met exactly; what is kept is scaled by what was really
drawn.

Shape suffixes: B = batch, H = heads, G = heads of keys, H or 1, M = queries, T = keys, E = width of
a head, N = batch times heads of keys, in pieces, D = width of all heads, R = padded bonds.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import without_autocast
from comera.ops.dispatch import Case, Times, Ways, on_cpu_alone
from comera.ops.operator import operator

_SCORES = 1 << 20
"""Scores at a time on a CPU: a few megabytes, the size of a cache."""
_STEPS = 1 << 8
"""Probabilities of dropout that a mask of bytes can have."""


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


def _setup_attend(ctx, inputs, output) -> None:
    q, k, v, _, ctx.scale, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output[1:])


def _back_attend(ctx, grad: Tensor | None, *_):
    if grad is None:
        return (None,) * 6
    grads = _attend_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *grads, None, None, None


_attend.register_autograd(_back_attend, setup_context=_setup_attend)


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


@operator("comera::head_factors")
def head_factors(
    right_q: Tensor, right_k: Tensor, right_v: Tensor, left_o: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Compute the products of factors between the factorized projections of an attention.

    With ``q = x A_q B_q`` and ``k = x A_k B_k`` the scores of a head are
    ``(x A_q) (B_q B_k^T) (x A_k)^T``. The batch meets ``A_q`` and then the small middle factors of
    all heads side by side, which is a low-rank linear layer itself.

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
        torch.bmm(q, k.mT, out=scores.transpose(0, 1))
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
    torch.bmm(scores, k, out=to_q)
    torch.bmm(scores.mT, q, out=to_k)
    torch.bmm(values, o.mT, out=to_v)
    torch.bmm(v.mT, values, out=to_o)
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
def _dropout_by_bytes(x: Tensor, residual: Tensor | None, p: float) -> Tensor:
    return _dropout_add(x, residual, p)[0]


@_DROPOUT.way("torch")
def _dropout_by_torch(x: Tensor, residual: Tensor | None, p: float) -> Tensor:
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


def _setup_dropout(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _back_dropout(ctx, grad: Tensor | None, *_):
    if grad is None:
        return None, None, None
    grad_residual = grad if ctx.needs_input_grad[1] else None
    return _dropout_backward(grad, *ctx.saved_tensors), grad_residual, None


_dropout_add.register_autograd(_back_dropout, setup_context=_setup_dropout)
