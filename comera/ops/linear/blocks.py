"""Multiply by block tensor trains: two batched products.

The rank is the slow index of the first product's output, so that on a GPU both products and all
gradients read and write plain strides. A bias is one more row of the right factor, which meets ones
in the hidden tensor. On a CPU rows go in pieces, whose hidden tensor stays in the cache. oneDNN
multiplies contiguous matrices twice as fast as others, so that it gets copies.

Letters: T = tokens, a and b = blocks of the input and the numbers in each, c and d = those of the
output, R = rank of the blocks, K = R c, S = a R, plus one with a bias, G = layers.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import autocast_together, without_autocast
from comera.ops.cores import open_gate
from comera.ops.dispatch import is_eager, is_on_cpu
from comera.ops.linear.feed_forward import ACTIVATIONS
from comera.ops.operator import is_recorded, operator
from comera.ops.product import BATCHED_FROM, batched_by, computes_by_onednn
from comera.planning.machine import PACKED_FROM

_LEAST_SHARE = 1e-2  # least share of a typical singular value in the left core
_LARGE = 32  # numbers in a block of the input, from which a compiled graph has one operator
_FEW_NUMBERS = 1 << 16
"""Numbers of a hidden tensor up to which a CPU takes 0.8 to 0.96 times as long without the operator
in a layer alone, and 0.93 to 1.00 in a whole step; with twice as many a step takes 1.2 times."""
_HIDDEN_NUMBERS = 1 << 19  # of a piece on a CPU: two megabytes, the size of a cache


class BlockFactors(NamedTuple):
    """The factors ``(a, K, b)`` and ``(c, S, d)`` of a layer, and its output width."""

    left: Tensor
    right: Tensor
    out_features: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of blocks, rank and bias: layers with equal keys are multiplied as one."""
        rank = self.left.shape[1] // len(self.right)
        return (*self.left.shape[::2], rank, self.right.shape[1])


def block_factors(
    lefts: Sequence[Tensor],
    gates: Sequence[Tensor],
    rights: Sequence[Tensor],
    biases: Sequence[Tensor],
    threshold: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the factors of G layers of equal shape, ``(G a, K, b)`` and ``(G c, S, d)``.

    Args:
        lefts: The first cores, ``(1, a, b, c, R)``.
        gates: ``(R,)`` each.
        rights: The second cores, ``(R, c, a, d, 1)``.
        biases: ``(O,)`` each, or none at all.
        threshold: A gate at or below it is a pruned rank.
        dtype: That of the factors; None for that of the cores.
    """
    (_, a, b, c, rank), layers, d = lefts[0].shape, len(lefts), rights[0].shape[3]
    if layers == 1:
        left, gate, right = lefts[0], gates[0], rights[0].permute(1, 2, 0, 3, 4)
    else:
        left, gate = torch.cat(list(lefts)), torch.stack(list(gates))
        right = torch.stack(list(rights)).permute(0, 2, 3, 1, 4, 5)
    gate = open_gate(gate, threshold).to(left.dtype).view(layers, 1, rank, 1, 1)
    # Expanded, so that a gate's gradient is two short sums: one over all is slow on a GPU.
    left = left.permute(0, 1, 4, 3, 2).contiguous() * gate.expand(-1, a, -1, 1, 1)
    left = left.view(layers * a, rank * c, b)
    right = right.reshape(layers * c, a * rank, d)
    if biases:
        bias = biases[0] if layers == 1 else torch.stack(list(biases))
        bias = F.pad(bias, (0, missing)) if (missing := c * d - bias.shape[-1]) else bias
        right = torch.cat((right, bias.view(layers * c, 1, d)), 1)
    return (left, right) if dtype is None else (left.to(dtype), right.to(dtype))


def block_linears(x_TI: Tensor, layers: Sequence[BlockFactors]) -> list[Tensor]:
    """Return ``x @ W.T + bias`` of each layer, if of equal ranks in one pass over x.

    They are ``(*, O)`` for an input ``(*, I)``, at autocast's dtype where autocast is on, and can
    be differentiated any number of times.
    """
    if len(layers) > 1 and len({layer.kind for layer in layers}) > 1:
        return [block_linears(x_TI, [layer])[0] for layer in layers]
    x, factors = _together(x_TI, layers)
    missing = factors[0].shape[0] * factors[0].shape[2] - x.shape[1]
    x = F.pad(x, (0, missing)) if missing else x
    with without_autocast(x):
        numbers = x.shape[0] * math.prod(factors[0].shape[:2])
        few = is_eager() and is_on_cpu(x) and numbers <= _FEW_NUMBERS
        one = _is_one_operator(x, factors[0]) and not few
        ys = _blocks(x, factors)[:-1] if one else _multiply(x, factors)
    widths = [layer.out_features for layer in layers]
    ys = [y[:, :n] if n < y.shape[1] else y for y, n in zip(ys, widths, strict=True)]
    return ys if x_TI.dim() == 2 else [y.reshape(*x_TI.shape[:-1], y.shape[1]) for y in ys]


def block_feed_forward(
    x_BI: Tensor, layers: Sequence[BlockFactors], activation: str
) -> Tensor | None:
    """Return ``act(x @ W1) @ W2``, or of three layers ``(act(x @ W1) * (x @ W2)) @ W3``.

    The hidden activation is computed again in backward, a piece of rows at a time. Returns None
    where that is not possible: blocks are padded, or the first layers differ in rank or bias.
    """
    *firsts, second = layers
    wide, hidden = (each.left.shape[0] * each.left.shape[2] for each in (firsts[0], second))
    padded = any(each.right.shape[0] * each.right.shape[2] > each.out_features for each in layers)
    if padded or wide != x_BI.shape[-1] or {each.out_features for each in firsts} != {hidden}:
        return None
    if len({first.kind for first in firsts}) > 1:
        return None
    x, first = _together(x_BI, firsts)
    factors = [*first, *_together(x_BI, [second])[1]]
    with without_autocast(x):
        given = x, factors, len(first), activation
        y = _feed_forward(*given) if _is_one_operator(x, first[0]) else _plainly(*given)[0]
    return y if x_BI.dim() == 2 else y.view(*x_BI.shape[:-1], y.shape[1])


def _is_one_operator(x: Tensor, left_aKb: Tensor) -> bool:
    """Return whether one operator may stand for the products: always, unless they are recorded.

    A compiled graph gains more by fusing copies than by oneDNN, unless the blocks are large.
    """
    if is_eager():
        return not is_recorded()
    is_large = left_aKb.shape[2] >= _LARGE and not torch.compiler.is_exporting()
    return is_large and computes_by_onednn(x)


def _together(x: Tensor, layers: Sequence[BlockFactors]) -> tuple[Tensor, list[Tensor]]:
    """Return x as a matrix, and the left factor of all layers as one, then their right ones."""
    x, *factors = autocast_together(x, *(factor for each in layers for factor in each[:2]))
    left, lefts, rights = factors[0], factors[::2], factors[1::2]
    if len(layers) > 1:
        parts = zip(lefts, rights, strict=True)
        apart = [left.unflatten(1, (left.shape[1] // len(r), len(r))) for left, r in parts]
        left = torch.cat(apart, 2).flatten(1, 2)
    x = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]
    return x, [left, *rights]


def _multiply(x_TI: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Compute ``(T, c d)`` of each layer of :func:`_together`, operation by operation."""
    left_aKb, *rights = factors
    (a, wide, b), blocks = left_aKb.shape, [len(right) for right in rights]
    first_aKT = torch.bmm(left_aKb, x_TI.t().unflatten(0, (a, b)))
    rank = wide // sum(blocks)
    hidden_SCT = first_aKT.unflatten(1, (rank, sum(blocks))).flatten(0, 1)
    ys = []
    for hidden_ScT, right_cSd in zip(hidden_SCT.split(blocks, 1), rights, strict=True):
        y_cTd = torch.bmm(hidden_ScT.permute(1, 2, 0), right_cSd[:, : a * rank])
        y_cTd = y_cTd + right_cSd[:, a * rank :] if right_cSd.shape[1] > a * rank else y_cTd
        ys.append(y_cTd.transpose(0, 1).flatten(1))
    return ys


class _Layers:
    """Layers that are multiplied as one, and sums of their gradients over pieces of rows."""

    def __init__(self, rows: int, left_aKb: Tensor, *rights: Tensor) -> None:
        self.left_aKb, self.rights = left_aKb, rights
        self.grads: list[Tensor | None] = [None] * (1 + len(rights))
        self.a, self.hidden_blocks, self.b = left_aKb.shape
        self.blocks = [right.shape[0] for right in rights]
        rank = self.hidden_blocks // sum(self.blocks)
        self.inner = self.a * rank  # S without a bias
        large = rank * self.b >= PACKED_FROM and rows * left_aKb.numel() >= BATCHED_FROM
        self.packed = large and computes_by_onednn(left_aKb)  # contiguous, as oneDNN wants all

    def by_block(self, x_Tn: Tensor, blocks: int) -> Tensor:
        """Return ``(blocks, T, n / blocks)``, contiguous if that is faster here."""
        parts = _split(x_Tn, blocks)
        return parts.contiguous() if self.packed else parts

    def regroup(self, x_cTd: Tensor, blocks: int) -> Tensor:
        """Return the same in another number of blocks."""
        if x_cTd.shape[0] == blocks:
            return x_cTd
        return self.by_block(x_cTd.transpose(0, 1).flatten(1), blocks)

    def hidden_of(self, kept_TH: Tensor) -> Tensor:
        """View memory for C S numbers a row as a hidden tensor ``(C, S, T)``."""
        rows, number, wide = kept_TH.shape[0], self.rights[0].shape[1], sum(self.blocks)
        if self.packed:
            return kept_TH.view(wide, number, rows)
        return kept_TH.view(number, wide, rows).transpose(0, 1)

    def hidden(self, x_aTb: Tensor, kept_TH: Tensor | None = None) -> Tensor:
        """Compute the hidden tensor ``(C, S, T)`` of all layers, C blocks of the output."""
        rows, number, wide = x_aTb.shape[1], self.rights[0].shape[1], sum(self.blocks)
        kept_TH = x_aTb.new_empty(rows, wide * number) if kept_TH is None else kept_TH
        hidden_CST = self.hidden_of(kept_TH)
        if self.packed:
            first_SCT = self._product(self.left_aKb, x_aTb.mT).view(self.inner, wide, rows)
            hidden_CST[:, : self.inner] = first_SCT.transpose(0, 1)
        else:
            first_SCT = hidden_CST.transpose(0, 1)[: self.inner]
            self._product(self.left_aKb, x_aTb.mT, first_SCT.view(self.a, self.hidden_blocks, rows))
        if number > self.inner:
            hidden_CST[:, -1].fill_(1.0)
        return hidden_CST

    def _parts(self, hidden_CST: Tensor) -> Sequence[Tensor]:
        return [hidden_CST] if len(self.blocks) == 1 else hidden_CST.split(self.blocks)

    def outputs(self, hidden_CST: Tensor, ys: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Compute the products ``(c, T, d)``, in new memory or in ``ys``."""
        rows, shapes = hidden_CST.shape[2], [right.shape[::2] for right in self.rights]
        if not ys and self.packed:
            ys = [hidden_CST.new_empty(c, rows, d) for c, d in shapes]
        elif not ys:
            ys = [_split(hidden_CST.new_empty(rows, c * d), c) for c, d in shapes]
        parts = self._parts(hidden_CST)
        for y_cTd, hidden_cST, right_cSd in zip(ys, parts, self.rights, strict=True):
            self._product(hidden_cST.mT, right_cSd, y_cTd)
        return ys

    def backward(
        self,
        x_aTb: Tensor,
        hidden_CST: Tensor,
        grads: Sequence[Tensor],
        needs: Sequence[bool],
        grad_x: Tensor | None,
    ) -> None:
        """Add to the gradients that are needed, and write that of x to ``grad_x``, ``(a, T, b)``.

        ``grads`` are those of the products, ``(c, T, d)``.
        """
        inner = grad_x is not None or needs[0]
        grads_CST = torch.empty_like(hidden_CST[:, : self.inner]) if inner else hidden_CST
        parts = zip(self._parts(hidden_CST), self._parts(grads_CST), strict=True)
        for k, (hidden_cST, grads_cST) in enumerate(parts):
            right, grad_cTd = self.rights[k], grads[k]
            if needs[1 + k]:
                self._add(1 + k, hidden_cST, grad_cTd)
            if inner:
                self._product(right[:, : self.inner], grad_cTd.mT, grads_cST)
        if not inner:
            return
        first_aKT = grads_CST.transpose(0, 1).reshape(self.a, self.hidden_blocks, x_aTb.shape[1])
        if needs[0]:
            self._add(0, first_aKT, x_aTb)
        if grad_x is not None:
            self._product(first_aKT.mT, self.left_aKb, grad_x)

    def _product(self, one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        if self.packed:
            with batched_by(one, other) as by_onednn:
                if by_onednn:
                    return torch.bmm(one, other, out=out)
        if out is None or out.is_cuda or out.is_contiguous():
            return torch.bmm(one, other, out=out)
        return out.copy_(torch.bmm(one, other))  # MKL would take them one by one

    def _add(self, k: int, one: Tensor, other: Tensor) -> None:
        total = self.grads[k]
        if total is None:
            self.grads[k] = self._product(one, other)
        else:
            with batched_by(one, other) if self.packed else nullcontext():
                total.baddbmm_(one, other)


@operator("comera::blocks")
def _blocks(x_TI: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Return :func:`_multiply` with results written where they belong; last the hidden numbers."""
    *ys, kept_TH = _empty(x_TI, factors)
    rows = _rows(x_TI, math.prod(factors[0].shape[:2]))
    layers = _Layers(rows, *factors)
    for x, kept, *outs in _each(rows, x_TI, kept_TH, *ys):
        hidden = layers.hidden(layers.by_block(x, layers.a), kept)
        layers.outputs(hidden, list(map(_split, outs, layers.blocks)))
    return [*ys, kept_TH]


@_blocks.register_fake
def _empty(x_TI, factors):
    rights = [right.shape for right in factors[1:]]
    hidden = sum(blocks for blocks, _, _ in rights) * rights[0][1]
    widths = *(blocks * d for blocks, _, d in rights), hidden
    return [x_TI.new_empty(x_TI.shape[0], width) for width in widths]


def _blocks_gradients(
    grads: Sequence[Tensor], kept: Sequence[Tensor], x_TI: Tensor, factors: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    rows = _rows(x_TI, math.prod(factors[0].shape[:2]))
    layers = _Layers(rows, *factors)
    grad_x = x_TI.new_empty(x_TI.shape) if needs[0] else None
    for x, hidden, into, *given in _each(rows, x_TI, kept[0], grad_x, *grads):
        of_ys = list(map(layers.by_block, given, layers.blocks))
        of_x = None if into is None else _split(into, layers.a)
        x_aTb = layers.by_block(x, layers.a)
        layers.backward(x_aTb, layers.hidden_of(hidden), of_ys, needs[1:], of_x)
    return [grad for grad in (grad_x, *layers.grads) if grad is not None]


_blocks.register_gradients(_blocks_gradients, _multiply, kept=1)


@operator("comera::block_feed_forward")
def _feed_forward(x_TI: Tensor, factors: Sequence[Tensor], size: int, activation: str) -> Tensor:
    """Return :func:`_plainly`, of which the backward pass gets the input alone."""
    rows = _rows(x_TI, math.prod(factors[size].shape[::2]))
    first, second = _Layers(rows, *factors[:size]), _Layers(rows, *factors[size:])
    y_TO = _empty_output(x_TI, factors, size, activation)
    for x, y in _each(rows, x_TI, y_TO):
        inner, *up = first.outputs(first.hidden(first.by_block(x, first.a)))
        active = ACTIVATIONS[activation][0](inner, out=inner)
        active = second.regroup(active.mul_(up[0]) if up else active, second.a)
        second.outputs(second.hidden(active), [_split(y, second.blocks[0])])
    return y_TO


@_feed_forward.register_fake
def _empty_output(x_TI, factors, size, activation):
    return x_TI.new_empty(x_TI.shape[0], factors[-1].shape[0] * factors[-1].shape[2])


def _feed_forward_gradients(
    grads: Sequence[Tensor], kept: Sequence[Tensor], x_TI: Tensor, factors: Sequence[Tensor],
    size: int, activation: str, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    rows = _rows(x_TI, math.prod(factors[size].shape[::2]))
    first, second = _Layers(rows, *factors[:size]), _Layers(rows, *factors[size:])
    value, grad_of = ACTIVATIONS[activation]
    grad_x = x_TI.new_empty(x_TI.shape) if needs[0] else None
    for x, into, of_y in _each(rows, x_TI, grad_x, grads[0]):
        x_aTb = first.by_block(x, first.a)
        hidden = first.hidden(x_aTb)
        inner, *up = first.outputs(hidden)
        active = value(inner, out=torch.empty_like(inner))
        made = second.regroup(active * up[0] if up else active, second.a)
        grad, of_y = torch.empty_like(made), second.by_block(of_y, second.blocks[0])
        second.backward(made, second.hidden(made), [of_y], needs[1 + size :], grad)
        grad = first.regroup(grad, first.blocks[0])
        of_up = [active.mul_(grad)] if up else []
        grad = grad.mul_(up[0]) if up else grad
        grad = grad_of(grad, inner, grad_input=grad)
        into = None if into is None else _split(into, first.a)
        first.backward(x_aTb, hidden, [grad, *of_up], needs[1 : 1 + size], into)
    return [grad for grad in (grad_x, *first.grads, *second.grads) if grad is not None]


def _plainly(x_TI: Tensor, factors: Sequence[Tensor], size: int, activation: str) -> list[Tensor]:
    """Compute :func:`block_feed_forward`; the first layers have ``size`` factors."""
    inner, *up = _multiply(x_TI, factors[:size])
    active = getattr(F, activation)(inner)
    return _multiply(active * up[0] if up else active, factors[size:])


_feed_forward.register_gradients(_feed_forward_gradients, _plainly)


def _split(x_Tn: Tensor, blocks: int) -> Tensor:
    return x_Tn.view(x_Tn.shape[0], blocks, x_Tn.shape[1] // blocks).transpose(0, 1)


def _rows(x_TI: Tensor, hidden: int) -> int:
    """Return the rows of a piece: on a CPU so few that a hidden tensor fits the cache.

    A power of two, so that batches of any length have the same pieces but for the last. Narrow
    dtypes go as one: sums over pieces lose digits.
    """
    if x_TI.dtype.itemsize < 4 or not is_on_cpu(x_TI):
        return x_TI.shape[0]
    return min(x_TI.shape[0], 1 << max(8, (_HIDDEN_NUMBERS // max(1, hidden)).bit_length() - 1))


def _each(rows: int, x_TI: Tensor, *others: Tensor | None) -> Iterable[Sequence[Any]]:
    """Return the pieces of all tensors by rows; those of None are None."""
    if rows >= x_TI.shape[0]:
        return [(x_TI, *others)]
    first = x_TI.split(rows)
    parts = (first, *([None] * len(first) if t is None else t.split(rows) for t in others))
    return zip(*parts, strict=True)


def blocks_to_dense(left_1abcR: Tensor, right_Rcad1: Tensor) -> Tensor:
    weight = torch.einsum("abcr,rcad->cdab", left_1abcR.squeeze(0), right_Rcad1.squeeze(4))
    return weight.flatten(2).flatten(0, 1)


def weight_to_blocks(
    weight_OI: Tensor, in_modes: tuple[int, int], out_modes: tuple[int, int]
) -> Tensor:
    """Return the blocks ``(a, c, b, d)`` of a dense weight, padded with zeros."""
    (a, b), (c, d) = in_modes, out_modes
    high, wide = weight_OI.shape
    padded = F.pad(weight_OI, (0, a * b - wide, 0, c * d - high))
    return padded.view(c, d, a, b).permute(2, 0, 3, 1)


def split_blocks(
    blocks_acbd: Tensor, rank: int, tolerance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Approximate every block by its largest singular vectors, the best at that rank.

    Returns cores ``(1, a, b, c, R)`` and ``(R, c, a, d, 1)``, in float32 or wider, of about equal
    norm. Raises ``ValueError`` if an entry is not finite.

    Args:
        blocks_acbd: ``(a, c, b, d)``.
        rank: The rank that each block gets, cut where a block is smaller.
        tolerance: Bound on the relative Frobenius error of all blocks together: the smallest rank,
            at least one, that meets the bound replaces ``rank``.
    """
    wide = torch.promote_types(blocks_acbd.dtype, torch.float32)
    blocks = blocks_acbd.to(wide)
    if not bool(blocks.isfinite().all()):
        raise ValueError("the weight holds numbers that are not finite")
    u_acbk, s_ack, vh_ackd = torch.linalg.svd(blocks, full_matrices=False)
    if tolerance is not None:
        square = s_ack.double().square().sum((0, 1))
        left_out = square.sum() - square.cumsum(0)  # by rank 1, 2, ...
        least = 2 * s_ack.shape[2] ** 0.5 * torch.finfo(wide).eps  # as in tt_svd
        allowed = max(tolerance, least) ** 2 * square.sum()
        rank = 1 + int((left_out > allowed).sum())
    rank = min(rank, s_ack.shape[2])
    s_ack = s_ack[..., :rank]
    # Halved between both cores; but were both of them zero, neither would ever have a gradient.
    typical = s_ack.double().square().mean().sqrt()
    root_ack = s_ack.clamp(min=float(typical) * _LEAST_SHARE or 1.0).sqrt()
    left = u_acbk[..., :rank] * root_ack[:, :, None]
    right = vh_ackd[:, :, :rank] * (s_ack / root_ack)[..., None]
    return left.permute(0, 2, 1, 3)[None], right.permute(2, 1, 0, 3)[..., None]
