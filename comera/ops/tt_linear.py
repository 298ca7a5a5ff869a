"""Multiply by a matrix held as a tensor train, without ever forming it.

The input cores join to a thin ``(I, R)`` matrix and the output cores to ``(R, O)``; the batch
meets only those two. Cost ``B * R * (I + O)`` instead of ``B * I * O``; the backward pass keeps
x, the thin ``x @ left`` and the cores, nothing else (CoMERA, arXiv 2405.14377, section 4).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.chain import merge_chain, without_autocast


def tt_linear_reference(
    x_BI: Tensor,
    cores: Sequence[Tensor],
    split: int,
    bias_O: Tensor | None = None,
    *,
    in_features: int | None = None,
    out_features: int | None = None,
) -> Tensor:
    """The same as :func:`tt_linear` through the dense matrix, for autograd to differentiate."""
    weight = tt_to_dense(cores, split)[:out_features, :in_features]
    return torch.nn.functional.linear(x_BI, weight, bias_O)


def tt_linear(
    x_BI: Tensor,
    cores: Sequence[Tensor],
    split: int,
    bias_O: Tensor | None = None,
    *,
    gates: Sequence[Tensor] = (),
    threshold: float = 0.0,
    in_features: int | None = None,
    out_features: int | None = None,
) -> Tensor:
    """Return ``x @ W.T + bias`` where ``W`` is a tensor train.

    Args:
        x_BI: ``(*, in_features)``; any leading dimensions, empty ones included.
        cores: ``(left bond, mode, right bond)`` each, the first and last bond being 1.
        split: How many of the cores carry the input.
        bias_O: ``(out_features,)`` or None.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        in_features: Width of x if the modes multiply to more: x is zero-padded, without a copy.
        out_features: Width of the result if the modes multiply to more: it is cut.

    Returns:
        ``(*, out_features)`` in the dtype of x; under autocast in autocast's dtype.

    Raises:
        ValueError: If x has another width than the layer.
    """
    left_IR, right_RO = merge_halves(cores, split, gates, threshold)
    left_IR = left_IR[0, :in_features]
    right_RO = right_RO[:, :out_features, 0]
    if x_BI.shape[-1] != left_IR.shape[0]:
        raise ValueError(
            f"the input has width {x_BI.shape[-1]} (shape {tuple(x_BI.shape)}), "
            f"but this layer takes {left_IR.shape[0]}"
        )
    return thin_linear(x_BI, left_IR, right_RO, bias_O)


def merge_halves(
    cores: Sequence[Tensor], split: int, gates: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Join the first ``split`` cores and the rest; the gate between them goes to the left."""
    left = merge_chain(cores[:split], gates[:split], threshold)
    right = merge_chain(cores[split:], gates[split:], threshold)
    return left, right


def thin_linear(x_BI: Tensor, left_IR: Tensor, right_RO: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ left @ right + bias``, at autocast's dtype where autocast is on.

    As in torch's own products, float64 is left as it is.
    """
    kind = x_BI.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if autocast and left_IR.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x_BI, left_IR, right_RO = x_BI.to(dtype), left_IR.to(dtype), right_RO.to(dtype)
        bias_O = None if bias_O is None else bias_O.to(dtype)
    return _thin_linear(x_BI, left_IR, right_RO, bias_O)[0]


@torch.library.custom_op("comera::thin_linear", mutates_args=())
def _thin_linear(
    x_BI: Tensor, left_IR: Tensor, right_RO: Tensor, bias_O: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(y, t)`` with ``t = x @ left``, followed by a column of ones where there is a bias.

    The ones make the bias one more row of ``right``: it is added, and its gradient summed,
    by a product that runs anyway instead of by one more pass over the output.
    """
    rank, out_features = right_RO.shape
    x = x_BI.reshape(-1, x_BI.shape[-1])
    if bias_O is None:
        t = x @ left_IR
        y = t @ right_RO
    else:
        t = x.new_empty(x.shape[0], rank + 1)
        torch.mm(x, left_IR, out=t[:, :rank])
        t[:, rank] = 1
        y = t @ torch.cat([right_RO, bias_O[None]])
    return y.reshape(*x_BI.shape[:-1], out_features), t


@_thin_linear.register_fake
def _(x_BI: Tensor, left_IR: Tensor, right_RO: Tensor, bias_O: Tensor | None):
    rank, out_features = right_RO.shape
    columns = rank if bias_O is None else rank + 1
    y = x_BI.new_empty(*x_BI.shape[:-1], out_features)
    return y, x_BI.new_empty(math.prod(x_BI.shape[:-1]), columns)


def _setup_context(ctx, inputs, output) -> None:
    x_BI, left_IR, right_RO, bias_O = inputs
    ctx.has_bias = bias_O is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_BI, left_IR, right_RO, output[1])


def _backward(ctx, grad_y: Tensor | None, grad_t: Tensor | None):
    x_BI, left_IR, right_RO, t = ctx.saved_tensors
    if grad_y is None:
        grad_y = x_BI.new_zeros(*x_BI.shape[:-1], right_RO.shape[1])
    with without_autocast(x_BI):
        x = x_BI.reshape(-1, x_BI.shape[-1])
        gy = grad_y.reshape(-1, grad_y.shape[-1]).to(x.dtype)
        u = gy @ right_RO.T
        if grad_t is not None:  # only when this backward pass is itself differentiated
            u = u + grad_t[:, : u.shape[1]]
        need_x, need_left, need_right, _ = ctx.needs_input_grad
        grad_x = (u @ left_IR.T).reshape(x_BI.shape) if need_x else None
        grad_left = (u.T @ x).T if need_left else None  # twice as fast as x.T @ u on a CPU
        grad_right = grad_bias = None
        if need_right or ctx.has_bias:
            below = t.T @ gy
            grad_right = below[: right_RO.shape[0]]
            grad_bias = below[-1] if ctx.has_bias else None
    return grad_x, grad_left, grad_right, grad_bias


_thin_linear.register_autograd(_backward, setup_context=_setup_context)


def tt_to_dense(cores: Sequence[Tensor], split: int) -> Tensor:
    """The ``(out, in)`` matrix of a tensor train, by joining all its cores; differentiable."""
    left, right = merge_halves(cores, split, (), 0.0)
    return (left[0] @ right[..., 0]).T
