"""Multiply by block tensor trains: two batched products, with nothing copied between them.

The rank is the slow index of the first product's output, so that both products and all gradients
read and write plain strides. A bias is one more row of the right factor, which meets ones in the
hidden tensor. On a CPU rows go in pieces, whose hidden tensor stays in the cache.

Letters: T = tokens, a and b = blocks of the input and the numbers in each, c and d = those of the
output, R = rank of the blocks, K = R c, S = a R, plus one with a bias, G = layers.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from comera.ops.context import autocast_together, without_autocast
from comera.ops.cores import open_gate
from comera.ops.dispatch import is_eager, is_on_cpu
from comera.ops.linear.feed_forward import ACTIVATIONS
from comera.ops.operator import gradients_again, is_traced

_LEAST_SHARE = 1e-2  # least share of a typical singular value in the left core
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
        # What is compiled, traced or transformed has to see all operations.
        multiply = _Multiply.apply if is_eager() and not is_traced() else _multiply
        ys = multiply(x, *factors)
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
    _, last = _together(x_BI, [second])
    with without_autocast(x):
        run = _FeedForward.apply if is_eager() and not is_traced() else _feed_forward
        y = run(activation, len(first), x, *first, *last)
    return y if x_BI.dim() == 2 else y.view(*x_BI.shape[:-1], y.shape[1])


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


def _multiply(x_TI: Tensor, left_aKb: Tensor, *rights: Tensor) -> list[Tensor]:
    """Compute ``(T, c d)`` of each layer of :func:`_together`, the reference of _Multiply."""
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

    def __init__(self, left_aKb: Tensor, *rights: Tensor) -> None:
        self.left_aKb, self.rights = left_aKb, rights
        self.grads: list[Tensor | None] = [None] * (1 + len(rights))
        self.a, self.hidden_blocks, self.b = left_aKb.shape
        self.blocks = [right.shape[0] for right in rights]
        self.inner = self.a * self.hidden_blocks // sum(self.blocks)  # S without a bias

    def hidden(self, x_TI: Tensor) -> Tensor:
        """Compute the hidden tensor ``(S, C, T)`` of all layers, C blocks of the output."""
        rows, number = x_TI.shape[0], self.rights[0].shape[1]
        hidden_SCT = x_TI.new_empty(number, sum(self.blocks), rows)
        first_aKT = hidden_SCT[: self.inner].view(self.a, self.hidden_blocks, rows)
        torch.bmm(self.left_aKb, x_TI.t().view(self.a, self.b, rows), out=first_aKT)
        if number > self.inner:
            hidden_SCT[-1].fill_(1.0)
        return hidden_SCT

    def _parts(self, hidden_SCT: Tensor) -> Sequence[Tensor]:
        return [hidden_SCT] if len(self.blocks) == 1 else hidden_SCT.split(self.blocks, 1)

    def new(self, x_TI: Tensor) -> list[Tensor]:
        """Return memory for the products ``(T, c d)``."""
        return [x_TI.new_empty(x_TI.shape[0], r.shape[0] * r.shape[2]) for r in self.rights]

    def outputs(self, hidden_SCT: Tensor, ys: Sequence[Tensor]) -> Sequence[Tensor]:
        for y, hidden_ScT, right in zip(ys, self._parts(hidden_SCT), self.rights, strict=True):
            _product_into(_by_block(y, right.shape[0]), hidden_ScT.permute(1, 2, 0), right)
        return ys

    def backward(
        self,
        x_TI: Tensor,
        hidden_SCT: Tensor,
        grads: Sequence[Tensor],
        needs: Sequence[bool],
        grad_x: Tensor | None,
    ) -> None:
        """Add to the gradients that are needed, and write that of x to ``grad_x``."""
        inner = grad_x is not None or needs[0]
        hidden = hidden_SCT[: self.inner]
        grads_SCT = torch.empty_like(hidden) if inner else hidden
        parts = zip(self._parts(hidden_SCT), self._parts(grads_SCT), strict=True)
        for k, (hidden_ScT, grads_ScT) in enumerate(parts):
            right, grad = self.rights[k], grads[k]
            grad_cTd = _by_block(grad, right.shape[0])
            if needs[1 + k]:
                self._add(1 + k, hidden_ScT.transpose(0, 1), grad_cTd)
            if inner:
                right = right[:, : self.inner]
                _product_into(grads_ScT.transpose(0, 1), right, grad_cTd.transpose(1, 2))
        first_aKT = grads_SCT.view(self.a, self.hidden_blocks, grads_SCT.shape[2])
        if needs[0]:
            self._add(0, first_aKT, _by_block(x_TI, self.a))
        if grad_x is not None:
            _product_into(_by_block(grad_x, self.a), first_aKT.transpose(1, 2), self.left_aKb)

    def _add(self, k: int, one: Tensor, other: Tensor) -> None:
        total = self.grads[k]
        self.grads[k] = torch.bmm(one, other) if total is None else total.baddbmm_(one, other)


class _Multiply(torch.autograd.Function):
    """:func:`_multiply` with results written where they belong."""

    @staticmethod
    def forward(ctx: Any, x_TI, *factors):  # type: ignore[override]
        layers, saved = _Layers(*factors), []
        ys = layers.new(x_TI)
        ctx.rows = _rows(x_TI, layers.a * layers.hidden_blocks)
        for x, *outs in _each(ctx.rows, x_TI, *ys):
            saved.append(layers.hidden(x))
            layers.outputs(saved[-1], outs)
        ctx.save_for_backward(x_TI, *factors, *saved)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TI, *rest = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        factors, saved = rest[: len(needs)], rest[len(needs) :]
        with without_autocast(x_TI):
            if torch.is_grad_enabled() or any(map(is_legacy_batchedtensor, grads)):

                def side_by_side(*given: Tensor) -> Tensor:
                    return torch.cat(_multiply(*given), 1)

                return (*gradients_again(side_by_side, [x_TI, *factors], torch.cat(grads, 1)),)
            layers, grad_x = _Layers(*factors), x_TI.new_empty(x_TI.shape) if needs_x else None
            pieces = _each(ctx.rows, x_TI, grad_x, *grads)
            for hidden, (x, into, *given) in zip(saved, pieces, strict=True):
                layers.backward(x, hidden, given, needs, into)
            return grad_x, *layers.grads


class _FeedForward(torch.autograd.Function):
    """:func:`_feed_forward` that keeps nothing for the backward pass but its input."""

    @staticmethod
    def forward(ctx: Any, activation: str, size: int, x_TI, *factors):  # type: ignore[override]
        ctx.activation, ctx.size = activation, size
        ctx.save_for_backward(x_TI, *factors)
        first, second = _Layers(*factors[:size]), _Layers(*factors[size:])
        (y_TO,) = second.new(x_TI)
        ctx.rows = _rows(x_TI, second.a * second.b)
        for x, y in _each(ctx.rows, x_TI, y_TO):
            inner, *up = first.outputs(first.hidden(x), first.new(x))
            active = ACTIVATIONS[activation][0](inner, out=inner)
            active = active.mul_(up[0]) if up else active
            second.outputs(second.hidden(active), [y])
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TI, *factors = ctx.saved_tensors
        with without_autocast(x_TI):
            if torch.is_grad_enabled() or is_legacy_batchedtensor(grad_TO):
                again = functools.partial(_feed_forward, ctx.activation, ctx.size)
                return None, None, *gradients_again(again, [x_TI, *factors], grad_TO)
            _, _, needs_x, *needs = ctx.needs_input_grad
            first, second = _Layers(*factors[: ctx.size]), _Layers(*factors[ctx.size :])
            value, grad_of = ACTIVATIONS[ctx.activation]
            grad_x = x_TI.new_empty(x_TI.shape) if needs_x else None
            for x, into, grad_y in _each(ctx.rows, x_TI, grad_x, grad_TO):
                hidden = first.hidden(x)
                inner, *up = first.outputs(hidden, first.new(x))
                active = value(inner, out=torch.empty_like(inner))
                made = active * up[0] if up else active
                grad = torch.empty_like(made)
                second.backward(made, second.hidden(made), [grad_y], needs[ctx.size :], grad)
                of_up = [active.mul_(grad)] if up else []
                grad = grad.mul_(up[0]) if up else grad
                grad = grad_of(grad, inner, grad_input=grad)
                first.backward(x, hidden, [grad, *of_up], needs, into)
            return None, None, grad_x, *first.grads, *second.grads


def _feed_forward(activation: str, size: int, x_TI: Tensor, *factors: Tensor) -> Tensor:
    """Compute :func:`block_feed_forward`; the first layers have ``size`` factors."""
    inner, *up = _multiply(x_TI, *factors[:size])
    active = getattr(F, activation)(inner)
    return _multiply(active * up[0] if up else active, *factors[size:])[0]


def _by_block(x_Tn: Tensor, blocks: int) -> Tensor:
    rows, width = x_Tn.shape
    return x_Tn.view(rows, blocks, width // blocks).transpose(0, 1)


def _product_into(out: Tensor, one: Tensor, other: Tensor) -> None:
    """Write batched products to matrices that are not contiguous."""
    if out.is_cuda:
        torch.bmm(one, other, out=out)
    else:  # torch would take them one by one
        out.copy_(torch.bmm(one, other))


def _rows(x_TI: Tensor, hidden: int) -> int:
    """Return the rows of a piece: on a CPU so few that a hidden tensor fits the cache.

    A multiple of 32, for fast products; narrow dtypes go as one: sums over pieces lose digits.
    """
    rows = x_TI.shape[0]
    if x_TI.dtype.itemsize < 4 or not is_on_cpu(x_TI):
        return rows
    pieces = max(1, min(-(-rows * hidden // _HIDDEN_NUMBERS), rows // 256))
    return -(-rows // pieces // 32) * 32


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
        allowed = max(tolerance, torch.finfo(wide).eps) ** 2 * square.sum()
        rank = 1 + int((left_out > allowed).sum())
    rank = min(rank, s_ack.shape[2])
    s_ack = s_ack[..., :rank]
    # Halved between both cores; but were both of them zero, neither would ever have a gradient.
    typical = s_ack.square().mean().sqrt()
    root_ack = s_ack.clamp(min=float(typical) * _LEAST_SHARE or 1.0).sqrt()
    left = u_acbk[..., :rank] * root_ack[:, :, None]
    right = vh_ackd[:, :, :rank] * (s_ack / root_ack)[..., None]
    return left.permute(0, 2, 1, 3)[None], right.permute(2, 1, 0, 3)[..., None]
