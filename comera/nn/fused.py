"""Run several layers as one operation if all are compressed in one format, else one by one.

Layers with hooks, patched or overridden methods are not fused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.linear import CompressedLinear, TTLinear, factors_that_win
from comera.ops.attention import attend, head_factors
from comera.ops.context import autocast_dtype, autocast_together, products_are_fp8
from comera.ops.linear.feed_forward import ACTIVATIONS
from comera.ops.linear.tt_linear import Factors, check_width, set_ones_, times_left
from comera.ops.operator import is_recorded
from comera.ops.product import affine
from comera.params import params_of

_CALL = nn.Module.__call__


def is_plain(module: nn.Module, forward: Any) -> bool:
    """Return whether calling the module runs just this ``forward``, without hooks or patches."""
    kind: Any = type(module)
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    patched = "forward" in vars(module) or kind.__call__ is not _CALL
    return kind.forward is forward and not patched and not any(hooks)


def format_of(layers: Sequence[nn.Module]) -> type[CompressedLinear] | None:
    """Return the class of layers of one format, called without hooks or patches; else None."""
    kind = type(next(iter(layers), None))
    if not issubclass(kind, CompressedLinear) or "multiply" not in vars(kind):
        return None  # what a subclass computes is its own
    return kind if all(type(m) is kind and is_plain(m, kind.own_forward) for m in layers) else None


def linears(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Compute ``[layer(x) for layer in layers]``, if possible in one pass over x."""
    kind = format_of(layers)
    ys = None if kind is None else kind.multiply(x, layers)
    return [layer(x) for layer in layers] if ys is None else ys


def factors_together(x: Tensor, layers: Any) -> tuple[Tensor, Tensor, bool] | None:
    """Stack the factors of equal layers; None if they differ or ``F.grouped_mm`` refuses them."""
    trains: list[Any] = list(layers) if format_of(layers) is TTLinear else []
    chains = [params_of(train.cores) for train in trains]
    kinds = {  # kind() takes five times as long
        (train._split, train.prune_below, train.bias is None, *[(c.shape, c.dtype) for c in cores])
        for train, cores in zip(trains, chains, strict=True)
    }
    first: Any = layers[0]
    if len(kinds) != 1 or not first.factor_width:
        return None
    dtypes, widths = {x.dtype, autocast_dtype(x), chains[0][0].dtype}, first._weight_size()
    if len(dtypes) > 1 or torch.float64 in dtypes or any(width % 8 for width in widths):
        return None
    if first.shared_factors is not None:
        lefts, rights, _ = zip(*(train.factors() for train in trains), strict=True)
        return torch.stack(lefts), torch.stack(rights), first.bias is not None
    left, right = TTLinear.stacked_factors([trains])
    right = right[..., : first.out_features].contiguous()
    return left[:, : first.in_features], right, first.bias is not None


def grouped_linear(x: Tensor, ends: Tensor, left: Tensor, right: Tensor, has_bias: bool) -> Tensor:
    """Multiply each group of rows by its factors; group g ends before row ``ends[g]``."""
    check_width(x, left.shape[1])
    t = F.grouped_mm(x, left, offs=ends)
    set_ones_(t, has_bias)
    return F.grouped_mm(t, right, offs=ends)


def feed_forward(x: Tensor, first: nn.Module, second: nn.Module, activation: str) -> Tensor:
    """Compute ``second(activation(first(x)))``; tensor trains store no hidden activation.

    Instead, they compute the hidden activation again in backward. ``activation`` is ``"gelu"``,
    ``"relu"`` or ``"silu"``; others raise ``ValueError``.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    kind = format_of([first, second])
    y = None if kind is None else kind.feed_forward(x, [first, second], activation)
    return second(getattr(F, activation)(first(x))) if y is None else y


def gated_feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Compute ``down(silu(gate(x)) * up(x))``; tensor trains recompute both hidden activations."""
    kind = format_of([gate, up, down])
    y = None if kind is None else kind.feed_forward(x, [gate, up, down], "silu")
    if y is not None:
        return y
    opened, passing = linears(x, [gate, up])
    return down(F.silu(opened) * passing)


def self_attention(
    x_BTD: Tensor,
    query: nn.Module,
    key: nn.Module,
    value: nn.Module,
    out: nn.Module,
    num_heads: int,
    keep_BT: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute multi-head self-attention, including the projections.

    If all four projections, each from D to D, are tensor trains with a middle bond below the width
    of a head, attention is computed in the space of that bond and takes fewer operations: with
    ``q = x A_q B_q`` and ``k = x A_k B_k`` the scores of a head are
    ``(x A_q) (B_q B_k^T) (x A_k)^T``. ``keep_BT`` are the positions to attend to (None for all), or
    :func:`~comera.ops.attention.score_bias` of them. Raises ``ValueError`` if ``num_heads`` does
    not divide the width, ``keep_BT`` has another shape than the sequences, or ``dropout`` is not in
    [0, 1].
    """
    batch, length, width = x_BTD.shape
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide the width {width}")
    if keep_BT is not None and keep_BT.shape != (batch, length):
        raise ValueError(
            f"keep_BT has shape {tuple(keep_BT.shape)}, the sequences {(batch, length)}"
        )
    layers = [query, key, value, out]
    factors = _in_ranks(x_BTD, layers, num_heads)
    if factors is None:
        return _attention_of_heads(x_BTD, layers, num_heads, keep_BT, dropout)
    return _factored_attention(x_BTD, factors, num_heads, keep_BT, dropout)


def _in_ranks(x_BTD: Tensor, layers: Sequence[Any], num_heads: int) -> list[Factors] | None:
    """Return the factors if attention takes less in the space of their ranks; else None."""
    if products_are_fp8() or is_recorded() or format_of(layers) is not TTLinear:
        return None
    if max(layer.factor_width for layer in layers) * num_heads > x_BTD.shape[2]:
        return None
    return factors_that_win(x_BTD, layers)


def _factored_attention(
    x_BTD: Tensor,
    pairs: Sequence[Factors],
    num_heads: int,
    keep_BT: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attend in the space of the ranks: heads share keys ``x A_k`` and values ``x A_v``."""
    batch, length, width = x_BTD.shape
    bias, scale = pairs[0].has_bias, (width // num_heads) ** -0.5
    x, *factors = autocast_together(
        x_BTD.flatten(0, 1), *(factor for pair in pairs for factor in pair[:2])
    )
    lefts, rights = factors[::2], factors[1::2]
    scores, values = head_factors(*rights[:3], lefts[3], num_heads)
    t_q, t_k, t_v = times_left(x, lefts[:3], bias).split([r.shape[0] for r in rights[:3]], 1)
    q_BTHR = affine(t_q, scores).view(batch, length, num_heads, t_k.shape[1])
    k_B1TR, v_B1TR = (t.unflatten(0, (batch, length))[:, None] for t in (t_k, t_v))
    mixed_BHTR = attend(q_BTHR.transpose(1, 2), k_B1TR, v_B1TR, keep_BT, scale, dropout)
    t_o = times_left(mixed_BHTR.transpose(1, 2).flatten(2).flatten(0, 1), [values], bias)
    return affine(t_o, rights[3]).unflatten(0, (batch, length))


def _attention_of_heads(
    x_BTD: Tensor,
    layers: Sequence[nn.Module],
    num_heads: int,
    keep_BT: Tensor | None,
    dropout: float,
) -> Tensor:
    def heads(y_BTD: Tensor) -> Tensor:
        return y_BTD.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    *inner, out = layers
    q, k, v = map(heads, linears(x_BTD, inner))
    mixed_BHTE = attend(q, k, v, keep_BT, (x_BTD.shape[2] // num_heads) ** -0.5, dropout)
    return out(mixed_BHTE.transpose(1, 2).flatten(-2))
