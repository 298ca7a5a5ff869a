"""Compute multi-head attention, products of factors of its projections, and dropout.

Heads may share keys and values. On a CPU, attention with dropout and dropout itself are written
here, in less memory than torch's. One random number of 64 bits serves eight elements; the
probability is rounded at random to one of the two nearest multiples of 1/256, so its mean is exact.

Shape suffixes: B = batch, H = heads, G = heads of keys, H or 1, M = queries, T = keys, E = width of
a head, N = batch times heads of keys, in pieces, D = width of all heads, R = padded bonds.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import without_autocast
from comera.ops.dispatch import is_on_cpu, may_read_values
from comera.ops.operator import is_recorded, operator

_SCORES = 1 << 20  # scores at a time on a CPU: a few megabytes, the size of a cache
_STEPS = 1 << 8  # probabilities of dropout that a mask of bytes can have


def score_bias(keep_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores: zero for keys to attend to, very negative for others.

    It is all zeros for a sequence without such a key, in which torch's fused attention on a CPU
    would sum gradients over keys where it has to average.
    """
    others_BT = keep_BT.logical_xor(keep_BT.any(-1, keepdim=True))
    return others_BT.to(dtype).mul_(torch.finfo(dtype).min / 2)


def attend(
    q_BHME: Tensor,
    k_BGTE: Tensor,
    v_BGTE: Tensor,
    keep_BT: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Compute ``softmax(scale * q @ k.T) @ v``, with dropout on the softmax.

    Keys and values are of every head or one for all; the width of values may be another. Queries
    are not copied on a GPU if they are a view of ``(B, M, H, E)`` in memory. ``keep_BT`` are keys
    that may be attended to, booleans or integers as Hugging Face has them, or the result of
    :func:`score_bias`; a sequence without such a key is attended to as a whole. None is all keys,
    which takes a GPU less time. Returns ``(B, H, M, width of v)``, most often a view of ``(B, M, H,
    width of v)`` in memory. On a CPU the result can be differentiated once. A ``dropout`` outside
    [0, 1] is a ``ValueError``. Floats of q's dtype are added to scores, as torch adds an
    ``attn_mask``; ones and zeros as floats of another dtype are, on a CPU, a ``TypeError``.
    """
    check_probability(dropout)
    if keep_BT is not None and keep_BT.dtype != q_BHME.dtype:
        floats = keep_BT.is_floating_point()
        if floats and may_read_values(keep_BT) and bool((keep_BT > 0).any()):
            raise TypeError("keep_BT has numbers above 0: give booleans, or score_bias() of them")
        keep_BT = score_bias(keep_BT == 0 if floats else keep_BT != 0, q_BHME.dtype)
    given = q_BHME, k_BGTE, v_BGTE, keep_BT, scale, dropout
    # torch has a fused attention on a CPU too, but not with dropout or values of another width.
    is_fused = not dropout and k_BGTE.shape[-1] == v_BGTE.shape[-1]
    is_wide = q_BHME.dtype in (torch.float32, torch.float64)
    if is_wide and not is_fused and is_on_cpu(q_BHME) and not is_recorded():
        return _in_pieces(*given)
    if k_BGTE.shape[1] == 1 and not q_BHME.is_cuda:  # a card shares work out by heads
        return _as_one_head(*given)
    return _by_torch(*given)


def _in_pieces(
    q_BHME: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, bias_BT: Tensor | None, *scale_dropout: float
) -> Tensor:
    """Attend by :func:`_attend`; heads that share their keys are merged into one head."""
    q_BGME, heads = _queries_by_keys(q_BHME, k_BGTE), k_BGTE.shape[1]
    if bias_BT is not None:
        bias_BT = (bias_BT if heads == 1 else bias_BT.repeat_interleave(heads, 0))[:, None]
    q_NME, k_NTE, v_NTE = (x.flatten(0, 1) for x in (q_BGME, k_BGTE, v_BGTE))
    out_NME = _attend(q_NME, k_NTE, v_NTE, bias_BT, *scale_dropout)[0]
    return _by_heads(out_NME.view(*q_BGME.shape[:3], v_BGTE.shape[3]), q_BHME)


def _as_one_head(q_BHME: Tensor, *keys: Any) -> Tensor:
    return _by_heads(_by_torch(_queries_by_keys(q_BHME, keys[0]), *keys), q_BHME)


def _by_torch(
    q_BHME: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, bias_BT: Tensor | None, scale: float,
    dropout: float,
) -> Tensor:  # fmt: skip
    return F.scaled_dot_product_attention(
        q_BHME,
        k_BGTE.expand(-1, q_BHME.shape[1], -1, -1),  # of one head for all: nothing is copied
        v_BGTE.expand(-1, q_BHME.shape[1], -1, -1),
        attn_mask=None if bias_BT is None else bias_BT[:, None, None],
        dropout_p=dropout,
        scale=scale,
    )


def _queries_by_keys(q_BHME: Tensor, k_BGTE: Tensor) -> Tensor:
    """Merge the queries of heads with shared keys into one head, position by position."""
    if k_BGTE.shape[1] == q_BHME.shape[1]:
        return q_BHME
    return q_BHME.transpose(1, 2).flatten(1, 2)[:, None]


def _by_heads(out_BGME: Tensor, like_BHME: Tensor) -> Tensor:
    """Split an attention result of merged heads into the heads of ``like_BHME`` again."""
    if out_BGME.shape[1] == like_BHME.shape[1]:
        return out_BGME
    _, heads, queries, _ = like_BHME.shape
    return out_BGME.squeeze(1).unflatten(1, (queries, heads)).transpose(1, 2)


@operator("comera::attend", tags=[torch.Tag.nondeterministic_seeded])
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention's result, the softmax, and the seed of the dropout mask."""
    weights = q.new_empty(*q.shape[:2], k.shape[1])
    out = q.new_empty(*q.shape[:2], v.shape[2])
    seed = draw_seed(dropout if weights.numel() else 0)
    keep, kept = keep_mask(weights.shape if dropout else (0,), dropout, seed)
    for n in _slices(weights):
        added = q.new_empty(()) if bias is None else bias[n]
        scores = torch.baddbmm(added, q[n], k[n].mT, beta=float(bias is not None), alpha=scale)
        torch.softmax(scores, -1, out=weights[n])
        _product_into(out[n], _drop(weights[n], keep, n), v[n], kept)
    return out, weights, seed


@_attend.register_fake
def _(q, k, v, bias, scale, dropout):
    out, weights = (q.new_empty(*q.shape[:2], width) for width in (v.shape[2], k.shape[1]))
    return out, weights, q.new_empty((), dtype=torch.int64)


@torch.library.custom_op("comera::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, seed: Tensor,
    scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    keep, kept = keep_mask(weights.shape if dropout else (0,), dropout, seed)
    for n in _slices(weights):
        _product_into(grad_v[n], _drop(weights[n], keep, n).mT, grad[n], kept)
        per_weight = _drop(grad[n] @ v[n].mT, keep, n)
        per_score = torch._softmax_backward_data(per_weight, weights[n], -1, q.dtype)
        _product_into(grad_q[n], per_score, k[n], kept * scale)
        _product_into(grad_k[n], per_score.mT, q[n], kept * scale)
    return grad_q, grad_k, grad_v


@_attend_backward.register_fake
def _(grad, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_attend(ctx, inputs, output) -> None:
    q, k, v, _, *ctx.scales = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output[1:])


def _back_attend(ctx, grad: Tensor | None, *_):
    if grad is None:
        return (None,) * 6
    return *_attend_backward(grad, *ctx.saved_tensors, *ctx.scales), None, None, None


_attend.register_autograd(_back_attend, setup_context=_setup_attend)


def _drop(x: Tensor, keep: Tensor, n: slice) -> Tensor:
    """Zero the dropped entries; the caller scales the product that the kept entries go into."""
    return keep[n].to(x.dtype).mul_(x) if keep.numel() else x


def _product_into(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _slices(weights: Tensor) -> Iterator[slice]:
    at_once = max(1, -(-weights.shape[0] // max(1, -(-weights.numel() // _SCORES))))
    return (slice(n, n + at_once) for n in range(0, weights.shape[0], at_once))


@operator("comera::head_factors")
def head_factors(
    right_q: Tensor, right_k: Tensor, right_v: Tensor, left_o: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Multiply the factors of neighbouring projections of an attention, head by head.

    With ``q = x A_q B_q`` and ``k = x A_k B_k`` the scores of a head are
    ``(x A_q) (B_q B_k^T) (x A_k)^T``. The right factors are ``(R, D)``, the left one ``(D, R)``,
    and their R may differ; D has the heads side by side. Returns ``(R_q, H * R_k)``, the
    ``B_q B_k^T`` of all heads side by side, and ``(H * R_v, R_o)``, the ``B_v A_o`` of all heads
    below each other. Both can be differentiated any number of times.
    """
    q, k, v, o = _by_head([right_q, right_k, right_v, left_o], num_heads)
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


def _head_factors_gradients(
    grads: Sequence[Tensor], kept: Sequence[Tensor], right_q: Tensor, right_k: Tensor,
    right_v: Tensor, left_o: Tensor, num_heads: int, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    factors = [right_q, right_k, right_v, left_o]
    found = [factor.new_empty(factor.shape) for factor in factors]
    q, k, v, o = _by_head(factors, num_heads)
    to_q, to_k, to_v, to_o = _by_head(found, num_heads)
    scores = grads[0].unflatten(1, (num_heads, -1)).transpose(0, 1)
    values = grads[1].unflatten(0, (num_heads, -1))
    torch.bmm(scores, k, out=to_q)
    torch.bmm(scores.mT, q, out=to_k)
    torch.bmm(values, o.mT, out=to_v)
    torch.bmm(v.mT, values, out=to_o)
    return list(compress(found, needs))


def _head_factors_plainly(*given: Any) -> list[Tensor]:
    q, k, v, o = _by_head(given[:4], given[4])
    return [(q @ k.mT).transpose(0, 1).flatten(1), (v @ o).flatten(0, 1)]


head_factors.register_gradients(_head_factors_gradients, _head_factors_plainly)


def _by_head(factors: Sequence[Tensor], num_heads: int) -> list[Tensor]:
    """Split factors by head: ``(H, R, D / H)`` for q, k and v, ``(H, D / H, R)`` for o."""
    *rights, left_o = factors
    apart = [right.unflatten(1, (num_heads, -1)).transpose(0, 1) for right in rights]
    return [*apart, left_o.unflatten(0, (num_heads, -1))]


def dropout_add(x: Tensor, residual: Tensor | None, p: float, training: bool) -> Tensor:
    """Compute ``residual + dropout(x)``, or ``dropout(x)`` if the residual is None.

    As in torch, kept elements are scaled. Raises ``ValueError`` if p is no probability.
    """
    check_probability(p)
    if not training or p == 0:
        return x if residual is None else residual + x
    if is_on_cpu(x) and not is_recorded():
        return _dropout_add(x, residual, p)[0]
    dropped, _ = torch.native_dropout(x, p, True)
    return dropped if residual is None else residual + dropped


def check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability {p} must be between 0 and 1")


def draw_seed(p: float) -> Tensor:
    """Draw the seed of a mask; without dropout, torch's random state is left alone."""
    return torch.randint(1 << 62, ()) if p else torch.zeros((), dtype=torch.int64)


def keep_mask(shape: Sequence[int], p: float, seed: Tensor) -> tuple[Tensor, float]:
    """Return the int8 mask of a seed, zero with probability p, and the scale of the rest."""
    numbers = np.random.SFC64(int(seed))  # it draws twice as fast as torch
    lower, count = math.floor(p * _STEPS), math.prod(shape)
    dropped = lower + int(numbers.random_raw() / 2**64 < p * _STEPS - lower)
    if dropped == _STEPS:
        return torch.zeros(shape, dtype=torch.int8), 0.0
    words = numbers.random_raw(-(-count // 8))
    keep = torch.from_numpy(words.view(np.int8)).ge_(dropped - _STEPS // 2)
    return keep[:count].view(shape), float(np.float32(_STEPS / (_STEPS - dropped)))


@functools.cache
def _zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


@operator("comera::dropout_add", tags=[torch.Tag.nondeterministic_seeded])
def _dropout_add(x: Tensor, residual: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    seed = draw_seed(p if x.numel() else 0)
    return _add_kept(_zero(x.dtype) if residual is None else residual, x, p, seed), seed


def _add_kept(base: Tensor, x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Return ``base`` plus the kept elements of x times their scale, in the memory of the mask."""
    keep, scale = keep_mask(x.shape, p, seed)
    out = keep.to(torch.promote_types(base.dtype, x.dtype))
    return torch.addcmul(base, x, out, value=scale, out=out)


@_dropout_add.register_fake
def _(x, residual, p):
    return x.new_empty(x.shape), x.new_empty((), dtype=torch.int64)


@torch.library.custom_op("comera::dropout_backward", mutates_args=())
def _dropout_backward(grad: Tensor, p: float, seed: Tensor) -> Tensor:
    return _add_kept(_zero(grad.dtype), grad, p, seed)


_dropout_backward.register_fake(lambda grad, p, seed: grad.new_empty(grad.shape))


def _setup_dropout(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.p = inputs[2]
    ctx.save_for_backward(output[1])


def _back_dropout(ctx, grad: Tensor | None, *_):
    if grad is None:
        return None, None, None
    grad_residual = grad if ctx.needs_input_grad[1] else None
    return _dropout_backward(grad, ctx.p, *ctx.saved_tensors), grad_residual, None


_dropout_add.register_autograd(_back_dropout, setup_context=_setup_dropout)
