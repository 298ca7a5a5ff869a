"""The thin products of tensor-train linears in eight bits, forward and backward.

As :func:`~comera.ops.tt_linear.thin_linears`, but that biases are added at full width: in e4m3 they
would keep three bits. What is kept for the backward pass has eight bits, too.

Shape suffixes: B = batch, I = input width, R = bonds of all pairs side by side, each padded to a
multiple of 16, O = output width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.autocast import without_autocast
from comera.ops.operator import operator
from comera.ops.scaled import (
    GRADIENTS,
    VALUES,
    Scaled,
    padded_to_step,
    scaled,
    scaled_product,
)


def scaled_thin_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """``x @ left @ right`` for each pair of halves; arguments as those of ``thin_linears``.

    Returns:
        ``(*, O)`` in the dtype of x for each pair. It can be differentiated once.
    """
    return _scaled_thin_linears(x_BI, lefts, rights, bias)[: len(lefts)]


@operator("comera::scaled_thin_linears")
def _scaled_thin_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Every ``y``, then in eight bits x and ``t = x @ left``, both left and right halves."""
    with without_autocast(x_BI):
        batch, dtype = x_BI.shape[:-1], x_BI.dtype
        rows = math.prod(batch)
        x = scaled(x_BI.reshape(rows, -1), VALUES)
        left_RI = scaled(_beside(lefts).T, VALUES)
        t = scaled(scaled_product(x, left_RI, dtype), VALUES)
        ys, kept, end = [], [], 0
        for right in rights:
            begin, end = end, end + padded_to_step(right.shape[0])
            right_RO = scaled(_without_bias(right, bias), VALUES)
            tj = Scaled(t.values[:, begin:end].contiguous(), t.scale)
            y = scaled_product(tj, right_RO.T, dtype)[:rows, : right.shape[1]]
            y = y + right[-1] if bias else y.contiguous()
            ys.append(y.reshape(*batch, right.shape[1]))
            kept += [*right_RO]
        return [*ys, *x, *t, *left_RI, *kept]


@_scaled_thin_linears.register_fake
def _(x_BI, lefts, rights, bias):
    batch, width = x_BI.shape[:-1], padded_to_step(x_BI.shape[-1])
    rows = padded_to_step(math.prod(batch))
    bonds = [padded_to_step(right.shape[0]) for right in rights]
    sizes = [(rows, width), (rows, sum(bonds)), (sum(bonds), width)]
    sizes += [
        (bond, padded_to_step(right.shape[1])) for bond, right in zip(bonds, rights, strict=True)
    ]
    kept = [
        part
        for size in sizes
        for part in (
            x_BI.new_empty(size, dtype=VALUES),
            x_BI.new_empty((), dtype=torch.float32),
        )
    ]
    return [*(x_BI.new_empty(*batch, right.shape[1]) for right in rights), *kept]


def _setup_context(ctx, inputs, output) -> None:
    x_BI, lefts, rights, ctx.bias = inputs
    ctx.shape, ctx.dtype = x_BI.shape, x_BI.dtype
    ctx.bonds = [left.shape[1] for left in lefts]
    ctx.widths = [right.shape[1] for right in rights]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[len(lefts) :])


def _backward(ctx, grads: Sequence[Tensor | None]):
    count, saved = len(ctx.bonds), ctx.saved_tensors
    if all(gy is None for gy in grads[:count]):
        return None, [None] * count, [None] * count, None
    pairs = [Scaled(*saved[k : k + 2]) for k in range(0, len(saved), 2)]
    x, t, left_RI, *rights = pairs
    rows, width = math.prod(ctx.shape[:-1]), ctx.shape[-1]
    like = saved[1]
    with without_autocast(like):
        us, grad_rights, end = [], [], 0
        t_RB = t.T
        for gy, right_RO, bond, out in zip(grads, rights, ctx.bonds, ctx.widths, strict=False):
            begin, end = end, end + right_RO.values.shape[0]
            if gy is None:
                gy = like.new_zeros(rows, out, dtype=ctx.dtype)
            gy = gy.reshape(rows, out).to(ctx.dtype)
            narrow = scaled(gy, GRADIENTS)
            us.append(scaled_product(narrow, right_RO, ctx.dtype))
            tj = Scaled(t_RB.values[begin:end], t.scale)
            grad = scaled_product(tj, narrow.T, ctx.dtype)[:bond, :out]
            if ctx.bias:
                grad = torch.cat([grad[:-1], gy.sum(0, keepdim=True)])
            grad_rights.append(grad.contiguous())
        u = scaled(torch.cat(us, 1), GRADIENTS)
        grad_x = scaled_product(u, left_RI.T, ctx.dtype)[:rows, :width].reshape(ctx.shape)
        grad_left_RI = scaled_product(u.T, x.T, ctx.dtype)[:, :width]
        parts = grad_left_RI.split([right.values.shape[0] for right in rights])
        grad_lefts = [part[:bond].T for part, bond in zip(parts, ctx.bonds, strict=True)]
    return grad_x, grad_lefts, grad_rights, None


_scaled_thin_linears.register_autograd(_backward, setup_context=_setup_context)


def _without_bias(right_RO: Tensor, bias: bool) -> Tensor:
    """The row of a bias left out; what is padded takes its place."""
    return F.pad(right_RO[:-1], (0, 0, 0, 1)) if bias else right_RO


def _beside(lefts: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [F.pad(left, (0, padded_to_step(left.shape[1]) - left.shape[1])) for left in lefts], 1
    )
