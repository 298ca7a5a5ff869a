"""Run several layers as one operation if all are :class:`~comera.TTLinear`, else one by one.

Layers with hooks, patched or overridden methods are not fused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.linear import BTTLinear, TTLinear
from comera.ops.attention import attend, head_factors
from comera.ops.context import autocast_dtype, autocast_together, products_are_fp8
from comera.ops.contract_cores import contract_groups
from comera.ops.cores import Chains
from comera.ops.linear.blocks import BlockFactors, block_feed_forward, block_linears
from comera.ops.linear.feed_forward import ACTIVATIONS, factorized_feed_forward
from comera.ops.linear.feed_forward import gated_feed_forward as gated_by_factors
from comera.ops.linear.tt_linear import check_width, factorized_linears, set_ones_, times_left
from comera.ops.operator import is_recorded
from comera.ops.product import affine
from comera.params import params_of

_CALL = nn.Module.__call__
_FORWARD, _BLOCKS = TTLinear.forward, BTTLinear.forward


def is_plain(module: nn.Module, forward: Any) -> bool:
    """Return whether calling the module runs just this ``forward``, without hooks or patches."""
    kind: Any = type(module)
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    patched = "forward" in vars(module) or kind.__call__ is not _CALL
    return kind.forward is forward and not patched and not any(hooks)


def linears(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Compute ``[layer(x) for layer in layers]``, if possible in one pass over x."""
    layers = list(layers)
    of_blocks = _block_factors(x, layers, len(layers))
    if of_blocks is not None:
        return block_linears(x, of_blocks)
    trains = _factorized_layers(x, layers)
    if trains is None:
        return [layer(x) for layer in layers]
    lefts, rights, has_bias = zip(*(layer.factors() for layer in trains), strict=True)
    return factorized_linears(x, lefts, rights, has_bias[0])


def factors_together(x: Tensor, layers: nn.ModuleList) -> tuple[Tensor, Tensor, bool] | None:
    """Stack the factors of equal layers; None if they differ or ``F.grouped_mm`` refuses them."""
    trains = [layer for layer in layers if type(layer) is TTLinear and is_plain(layer, _FORWARD)]
    chains = [params_of(train.cores) for train in trains]
    kinds = {  # kind() takes five times as long
        (train._split, train.prune_below, train.bias is None, *[(c.shape, c.dtype) for c in cores])
        for train, cores in zip(trains, chains, strict=True)
    }
    first: Any = layers[0]
    if len(trains) < len(layers) or len(kinds) > 1 or not first.factor_width:
        return None
    dtypes, widths = {x.dtype, autocast_dtype(x), chains[0][0].dtype}, first._weight_size()
    if len(dtypes) > 1 or torch.float64 in dtypes or any(width % 8 for width in widths):
        return None
    if first.shared_factors is not None:
        lefts, rights, _ = zip(*(train.factors() for train in trains), strict=True)
        return torch.stack(lefts), torch.stack(rights), first.bias is not None
    cores, gates = [c for of in chains for c in of], [g for t in trains for g in t.bond_gates()]
    biases = [train.bias for train in trains if train.bias is not None]
    whole = Chains(cores, gates, biases, len(trains), first._split, first.prune_below)
    left, right = contract_groups([whole])
    return left[:, : first.in_features], right[..., : first.out_features].contiguous(), bool(biases)


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
    of_blocks = _block_factors(x, [first, second], 1)
    y = block_feed_forward(x, of_blocks, activation) if of_blocks else None
    if y is not None:
        return y
    trains = _factorized_layers(x, [first, second])
    if trains is None or products_are_fp8() or is_recorded():
        return second(getattr(F, activation)(first(x)))
    return factorized_feed_forward(x, trains[0].factors(), trains[1].factors(), activation)


def gated_feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Compute ``down(silu(gate(x)) * up(x))``; tensor trains recompute both hidden activations."""
    of_blocks = _block_factors(x, [gate, up, down], 2)
    y = block_feed_forward(x, of_blocks, "silu") if of_blocks else None
    if y is not None:
        return y
    trains = _factorized_layers(x, [gate, up, down])
    if trains is None or products_are_fp8() or is_recorded():
        opened, passing = linears(x, [gate, up])
        return down(F.silu(opened) * passing)
    return gated_by_factors(x, *(train.factors() for train in trains))


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
    trains = _in_ranks(x_BTD, layers, num_heads)
    if trains is None:
        return _attention_of_heads(x_BTD, layers, num_heads, keep_BT, dropout)
    return _factored_attention(x_BTD, trains, num_heads, keep_BT, dropout)


def _in_ranks(x_BTD: Tensor, layers: Sequence[nn.Module], num_heads: int) -> list[TTLinear] | None:
    """Return the layers if attention takes less in the space of their ranks; else None."""
    if products_are_fp8() or is_recorded():
        return None
    trains = _factorized_layers(x_BTD, layers)
    if trains is None or max(t.factor_width for t in trains) * num_heads > x_BTD.shape[2]:
        return None
    return trains


def _factored_attention(
    x_BTD: Tensor,
    trains: Sequence[TTLinear],
    num_heads: int,
    keep_BT: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attend in the space of the ranks: heads share keys ``x A_k`` and values ``x A_v``."""
    batch, length, width = x_BTD.shape
    pairs = [train.factors() for train in trains]
    bias, scale = trains[0].bias is not None, (width // num_heads) ** -0.5
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


def _block_factors(x: Tensor, layers: Sequence[nn.Module], first: int) -> list[BlockFactors] | None:
    """Return the factors of layers that are all plain block tensor trains, else None.

    Raises ``RuntimeError`` if x has another width than the ``first`` of them.
    """
    blocks = [m for m in layers if type(m) is BTTLinear and is_plain(m, _BLOCKS)]
    if not blocks or len(blocks) < len(layers):
        return None
    for layer in blocks[:first]:
        check_width(x, layer.in_features)
    return [layer.factors() for layer in blocks]


def _factorized_layers(x: Tensor, layers: Sequence[nn.Module]) -> list[TTLinear] | None:
    """Return the layers if all are plain tensor trains and faster factorized, else None."""
    trains = [layer for layer in layers if type(layer) is TTLinear and is_plain(layer, _FORWARD)]
    if not trains or len(trains) < len(layers):
        return None
    bias = trains[0].bias is not None
    if any((m.bias is not None) != bias or not m.is_factorized(x) for m in trains):
        return None
    if torch.is_grad_enabled() and not all(c.requires_grad for m in trains for c in m.cores):
        return None  # a frozen layer needs fewer products by itself
    return trains
