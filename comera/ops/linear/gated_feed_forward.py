"""A gated feed-forward of tensor-train layers, as LLaMA has it, of which nothing wide is kept.

``silu(x @ W_gate) * (x @ W_up)`` and both its factors are three tensors of the hidden width. As in
``feed_forward`` they exist for a few hundred rows at a time, and are computed once more in the
backward pass from the narrow ``x @ left`` of either layer.

Shape suffixes: B = batch, I = input width, F = hidden width, O = output width, R = padded bonds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import autocast_together, without_autocast
from comera.ops.dispatch import Case, Times, Ways
from comera.ops.factors import Factors
from comera.ops.kernels import choose
from comera.ops.linear.feed_forward import (
    ACTIVATIONS,
    gradients_again,
    hidden_buffers,
    hidden_slices,
    plainly,
    rounding,
)
from comera.ops.linear.tt_linear import times_left
from comera.ops.operator import operator
from comera.ops.product import add_product, affine, product_into, store_product_

_silu, _silu_back = ACTIVATIONS["silu"]


def gated_feed_forward_reference(x_BI: Tensor, gate: Factors, up: Factors, down: Factors) -> Tensor:
    """Do the same as :func:`gated_feed_forward` in plain products."""
    g, u = (plainly(x_BI, factors) for factors in (gate, up))
    return plainly(torch.nn.functional.silu(g) * u, down)


def gated_feed_forward(x_BI: Tensor, gate: Factors, up: Factors, down: Factors) -> Tensor:
    """Compute ``(silu(x @ W_gate) * (x @ W_up)) @ W_down`` of layers that all have a bias or none.

    Args:
        x_BI: ``(*, I)``.
        gate: ``(I, R)`` and ``(R, F)``, those of
            :func:`~comera.ops.contract_cores.contract_cores`.
        up: ``(I, R)`` and ``(R, F)``, of an R of its own.
        down: ``(F, R)`` and ``(R, O)``.

    Returns:
        ``(*, O)``. It can be differentiated as often as one likes.
    """
    x_BI, lefts, rights = autocast_together(
        x_BI, [gate.left, up.left, down.left], [gate.right, up.right, down.right]
    )
    t_gate, t_up = times_left(x_BI.reshape(-1, x_BI.shape[-1]), lefts[:2], gate.has_bias).split(
        [left.shape[1] for left in lefts[:2]], 1
    )
    t2 = _gated_hidden(t_gate, t_up, rights[0], rights[1], lefts[2])
    y = affine(t2, rights[2], rights[2][-1] if down.has_bias else None)
    return y.view(*x_BI.shape[:-1], y.shape[1])


@operator("comera::gated_hidden")
def _gated_hidden(
    t_gate: Tensor, t_up: Tensor, right_gate: Tensor, right_up: Tensor, left2: Tensor
) -> Tensor:
    """Return ``(silu(t_gate @ right_gate) * (t_up @ right_up)) @ left2``."""
    return _FORWARD(t_gate, t_up, right_gate, right_up, left2)


def _sample(new: Callable[..., Any]) -> tuple[Any, ...]:
    return new(1024, 32), new(1024, 32), new(32, 3072), new(32, 3072), new(3072, 32)


def _case(t_gate: Tensor, t_up: Tensor, right_gate: Tensor, *_: Any) -> Case:
    """Time depends on rows, the hidden width, the bond of the first layers, and rounding."""
    sizes = t_gate.shape[0], right_gate.shape[1], t_gate.shape[1]
    return t_gate, t_gate.dtype, (*sizes, *rounding(t_gate))


_TIMES = Times("gated_feed_forward", _case)
_FORWARD = Ways("gated_hidden", _sample, _TIMES)


def _kernel_refuses(t_gate: Tensor, *given: Tensor) -> str | None:
    elsewhere = choose.off_card("feed_forward_gated", t_gate)
    if elsewhere is not None:
        return elsewhere
    from comera.ops.kernels import gated_kernel  # where a kernel may run

    return gated_kernel.refuses(t_gate, *given[:4])


@_FORWARD.way("kernel", _kernel_refuses, kernel="gated_feed_forward")
def _by_kernel(*given: Tensor) -> Tensor:
    from comera.ops.kernels import gated_kernel

    return gated_kernel.forward(*given)


@_FORWARD.way("torch")
def _by_torch(
    t_gate: Tensor, t_up: Tensor, right_gate: Tensor, right_up: Tensor, left2: Tensor
) -> Tensor:
    t2 = t_gate.new_empty(t_gate.shape[0], left2.shape[1])
    wide, gated = hidden_buffers(t_gate, right_gate.shape[1], 2)
    for rows in hidden_slices(t_gate, right_gate.shape[1]):
        count = t_gate[rows].shape[0]
        g = product_into(gated[:count], t_gate[rows], right_gate)
        u = product_into(wide[:count], t_up[rows], right_up)
        store_product_(t2[rows], _silu(g, out=g).mul_(u), left2)
    return t2


@_gated_hidden.register_fake
def _(t_gate, t_up, right_gate, right_up, left2):
    return t_gate.new_empty(t_gate.shape[0], left2.shape[1])


@torch.library.custom_op("comera::gated_hidden_backward", mutates_args=())
def _gated_hidden_backward(
    t_gate: Tensor,
    t_up: Tensor,
    right_gate: Tensor,
    right_up: Tensor,
    left2: Tensor,
    grad_t2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _BACKWARD(t_gate, t_up, right_gate, right_up, left2, grad_t2)


_BACKWARD = Ways("gated_hidden_backward", lambda new: (*_sample(new), new(1024, 32)), _TIMES)


@_BACKWARD.way("kernel", _kernel_refuses, kernel="gated_feed_forward")
def _gradients_by_kernel(*given: Tensor) -> tuple[Tensor, ...]:
    from comera.ops.kernels import gated_kernel

    return gated_kernel.backward(*given)


@_BACKWARD.way("torch")
def _gradients_by_torch(
    t_gate: Tensor,
    t_up: Tensor,
    right_gate: Tensor,
    right_up: Tensor,
    left2: Tensor,
    grad_t2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden = right_gate.shape[1]
    slices = list(hidden_slices(t_gate, hidden))
    # What several pieces are summed up in; one is not worth a cast there and back.
    one = len(slices) == 1
    dtype = t_gate.dtype if one else torch.promote_types(t_gate.dtype, torch.float32)
    of_gate, of_up = torch.empty_like(t_gate), torch.empty_like(t_up)
    sums: list[Tensor | None] = [None, None, None]
    buffers = hidden_buffers(t_gate, hidden, 5)
    for rows in slices:
        t_g, t_u, dt2 = t_gate[rows], t_up[rows], grad_t2[rows]
        into = [buffer[: t_g.shape[0]] for buffer in buffers]
        g, u = product_into(into[0], t_g, right_gate), product_into(into[1], t_u, right_up)
        dh = product_into(into[2], dt2, left2.T)
        active = _silu(g, out=into[3])
        sums[2] = add_product(sums[2], torch.mul(active, u, out=into[4]).T, dt2, dtype)
        du = active.mul_(dh)
        sums[1] = add_product(sums[1], t_u.T, du, dtype)
        store_product_(of_up[rows], du, right_up.T)
        dg = _silu_back(dh.mul_(u), g, grad_input=into[4])
        sums[0] = add_product(sums[0], t_g.T, dg, dtype)
        store_product_(of_gate[rows], dg, right_gate.T)
    likes = right_gate, right_up, left2
    grads = (
        torch.zeros_like(like) if each is None else each.to(like.dtype).contiguous()
        for each, like in zip(sums, likes, strict=True)
    )
    return of_gate, of_up, *grads  # type: ignore[return-value]


@_gated_hidden_backward.register_fake
def _(t_gate, t_up, right_gate, right_up, left2, grad_t2):
    thin = (t.new_empty(t.shape) for t in (t_gate, t_up))
    return *thin, *map(torch.empty_like, (right_gate, right_up, left2))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_t2: Tensor):
    saved = ctx.saved_tensors
    with without_autocast(grad_t2):
        grad_t2 = grad_t2.to(saved[0].dtype)
        if torch.is_grad_enabled():
            return tuple(gradients_again(_plain_hidden, saved, grad_t2))
        return _gated_hidden_backward(*saved, grad_t2)


def _plain_hidden(
    t_gate: Tensor, t_up: Tensor, right_gate: Tensor, right_up: Tensor, left2: Tensor
) -> Tensor:
    return (torch.nn.functional.silu(t_gate @ right_gate) * (t_up @ right_up)) @ left2


_gated_hidden.register_autograd(_backward, setup_context=_setup_context)
