"""Compute plain and gated feed-forwards of tensor-train layers without storing hidden activations.

Hidden activations exist for a few hundred rows at a time, which stay in the processor's cache. The
backward pass computes them again from the narrow ``x @ left``. One operator computes a whole plain
feed-forward; in a gated one, an operator computes the steps between the narrow products.

Shape suffixes: B = batch, I = input width, F = hidden width, O = output width, R = padded bonds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import autocast_together, products_are_tf32
from comera.ops.dispatch import Case, Way, Ways, is_on_cpu
from comera.ops.kernels import feed_forward_kernel as kernels
from comera.ops.linear.tt_linear import Factors, set_ones_, times_left
from comera.ops.operator import operator
from comera.ops.product import add_product, affine, product, store_product_

_aten = torch.ops.aten

ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gelu": (_aten.gelu.out, _aten.gelu_backward.grad_input),
    "relu": (_aten.relu.out, lambda g, h, grad_input: _aten.threshold_backward.grad_input(
        g, h, 0, grad_input=grad_input)),
    "silu": (_aten.silu.out, _aten.silu_backward.grad_input),
}  # fmt: skip
"""Value, written to ``out=``, and gradient from that of the output and the input, to
``grad_input=``."""

_HIDDEN_NUMBERS = 1 << 21
"""Numbers of the hidden activation at a time on a CPU: a few megabytes, the size of a cache."""


def factorized_feed_forward_reference(
    x_BI: Tensor, factors1: Factors, factors2: Factors, activation: str
) -> Tensor:
    return _plainly(getattr(F, activation)(_plainly(x_BI, factors1)), factors2)


def _plainly(x: Tensor, factors: Factors) -> Tensor:
    """Compute ``x @ left @ right``, plus the bias, product by product."""
    y = x @ factors.left @ factors.right
    return y + factors.right[-1] if factors.has_bias else y


def factorized_feed_forward(
    x_BI: Tensor, factors1: Factors, factors2: Factors, activation: str
) -> Tensor:
    """Compute ``act(x @ W1 + b1) @ W2 + b2``; either both layers have a bias or neither.

    The factors, as ``contract_groups`` makes them, are ``(I, R)`` and ``(R, F)`` of the first
    layer, ``(F, R)`` and ``(R, O)`` of the second; the activation is a key of ``ACTIVATIONS``. The
    result, ``(*, O)``, can be differentiated any number of times.
    """
    x_BI, *factors = autocast_together(x_BI, *factors1[:2], *factors2[:2])
    return _feed_forward(x_BI, factors, factors1.has_bias, activation)[0]


@operator("comera::factorized_feed_forward")
def _feed_forward(
    x_BI: Tensor, factors: Sequence[Tensor], bias: bool, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y``, and the ``x @ left`` of both layers; if ``bias``, with a column of ones."""
    y, t1, t2 = _FORWARD(x_BI.reshape(-1, x_BI.shape[-1]), factors, bias, activation)
    return _aten._unsafe_view(y.contiguous(), [*x_BI.shape[:-1], y.shape[1]]), t1, t2  # no view


def _sample(new: Callable[..., Any]) -> tuple[Any, ...]:
    factors = [new(768, 32), new(32, 3072), new(3072, 32), new(32, 768)]
    return new(1024, 768), factors, True, "gelu"


def _case(x: Tensor, factors: Sequence[Tensor], *_: Any) -> Case:
    left1, right1, left2, _right2 = factors
    bond = max(left1.shape[1], left2.shape[1])
    wide = ("wide",) if bond in kernels.WIDE_BONDS else ()
    rounding = ("tf32",) if products_are_tf32(x) else ()
    sizes = x.shape[0], x.shape[1], right1.shape[1], bond
    return x, x.dtype, (*sizes, *rounding, *wide)


def _by_torch(
    x: Tensor, factors: Sequence[Tensor], bias: bool, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    (left1, right1, left2, right2), (value, _) = factors, ACTIVATIONS[activation]
    t1 = product(x, left1).contiguous()  # as all results are promised to be
    t2 = x.new_empty(x.shape[0], left2.shape[1])
    set_ones_(t1, bias)
    for rows in _pieces(x, right1.shape[1]):
        h = product(t1[rows], right1)
        store_product_(t2[rows], value(h, out=h), left2)
        del h
    set_ones_(t2, bias)
    return product(t2, right2), t1, t2


@_feed_forward.register_fake
def _(x_BI, factors, bias, activation):
    left1, _, left2, right2 = factors
    rows = math.prod(x_BI.shape[:-1])
    y = x_BI.new_empty(*x_BI.shape[:-1], right2.shape[1])
    return y, x_BI.new_empty(rows, left1.shape[1]), x_BI.new_empty(rows, left2.shape[1])


def _gradients_by_torch(
    x: Tensor, factors: Sequence[Tensor], grad_y: Tensor, t1: Tensor, t2: Tensor, activation: str
) -> list[Tensor]:
    left1, right1, left2, right2 = factors
    value, grad_of = ACTIVATIONS[activation]
    wide = _dtype_of_sums(x, right1.shape[1])
    turned = is_on_cpu(x)  # there a narrow gradient is made faster that way
    u2 = product(grad_y, right2.T)
    u1 = torch.empty_like(t1)
    grad_left2 = grad_right1 = None
    for rows in _pieces(x, right1.shape[1]):
        h = product(t1[rows], right1)
        a = value(h, out=torch.empty_like(h))
        pair = (u2[rows].T, a) if turned else (a.T, u2[rows])
        grad_left2 = add_product(grad_left2, *pair, wide)
        del a, pair  # the gradient takes that memory
        ga = product(u2[rows], left2.T)
        gh = grad_of(ga, h, grad_input=ga)
        grad_right1 = add_product(grad_right1, t1[rows].T, gh, wide)
        store_product_(u1[rows], gh, right1.T)
        del h, ga, gh
    if grad_left2 is None or grad_right1 is None:  # without a row
        grad_left2, grad_right1 = torch.zeros_like(left2), torch.zeros_like(right1)
        turned = False
    return [
        product(u1, left1.T),
        product(u1.T, x).T.contiguous() if turned else product(x.T, u1).contiguous(),
        grad_right1.to(x.dtype).contiguous(),
        (grad_left2.T if turned else grad_left2).to(x.dtype).contiguous(),
        product(t2.T, grad_y).contiguous(),
    ]


def _feed_forward_gradients(
    grads: Sequence[Tensor], kept: Sequence[Tensor], x_BI: Tensor, factors: Sequence[Tensor],
    bias: bool, activation: str, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    x, gy = x_BI.reshape(-1, x_BI.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1])
    grad_x, *found = _BACKWARD(x, factors, gy, *kept, activation)
    return list(compress([grad_x.reshape(x_BI.shape), *found], needs))


def _feed_forward_plainly(
    x: Tensor, factors: Sequence[Tensor], bias: bool, activation: str
) -> list[Tensor]:
    left1, right1, left2, right2 = factors
    pairs = Factors(left1, right1, bias), Factors(left2, right2, bias)
    return [factorized_feed_forward_reference(x, *pairs, activation)]


_feed_forward.register_gradients(_feed_forward_gradients, _feed_forward_plainly, kept=2)


def gated_feed_forward(x_BI: Tensor, gate: Factors, up: Factors, down: Factors) -> Tensor:
    """Compute ``(silu(x @ W_gate) * (x @ W_up)) @ W_down`` of layers that all have a bias or none.

    The factors of ``gate`` and ``up`` are ``(I, R)`` and ``(R, F)``, those of ``down`` ``(F, R)``
    and ``(R, O)``, as ``contract_groups`` makes them; each R may differ. The result,
    ``(*, O)``, can be differentiated any number of times.
    """
    x_BI, *factors = autocast_together(x_BI, *gate[:2], *up[:2], *down[:2])
    lefts, rights = factors[::2], factors[1::2]
    t_gate, t_up = times_left(x_BI.reshape(-1, x_BI.shape[-1]), lefts[:2], gate.has_bias).split(
        [left.shape[1] for left in lefts[:2]], 1
    )
    t2 = _gated_hidden([t_gate, t_up, rights[0], rights[1], lefts[2]])
    y = affine(t2, rights[2], rights[2][-1] if down.has_bias else None)
    return y.view(*x_BI.shape[:-1], y.shape[1])


@operator("comera::gated_hidden")
def _gated_hidden(given: Sequence[Tensor]) -> Tensor:
    """Return ``(silu(t_gate @ right_gate) * (t_up @ right_up)) @ left2``."""
    return _GATED_FORWARD(given)


def _sample_gated(new: Callable[..., Any]) -> tuple[list[Any]]:
    return ([new(1024, 32), new(1024, 32), new(32, 3072), new(32, 3072), new(3072, 32)],)


def _case_gated(given: Sequence[Tensor], *_: Any) -> Case:
    t_gate, _up, right_gate, *_rest = given
    rounding = ("tf32",) if products_are_tf32(t_gate) else ()
    return t_gate, t_gate.dtype, (t_gate.shape[0], right_gate.shape[1], t_gate.shape[1], *rounding)


def _gated_by_torch(given: Sequence[Tensor]) -> Tensor:
    (t_gate, t_up, right_gate, right_up, left2), (silu, _) = given, ACTIVATIONS["silu"]
    t2 = t_gate.new_empty(t_gate.shape[0], left2.shape[1])
    for rows in _pieces(t_gate, right_gate.shape[1]):
        g, u = product(t_gate[rows], right_gate), product(t_up[rows], right_up)
        store_product_(t2[rows], silu(g, out=g).mul_(u), left2)
    return t2


@_gated_hidden.register_fake
def _(given):
    return given[0].new_empty(given[0].shape[0], given[4].shape[1])


def _gated_gradients_by_torch(given: Sequence[Tensor], grad_t2: Tensor) -> list[Tensor]:
    t_gate, t_up, right_gate, right_up, left2 = given
    silu, silu_back = ACTIVATIONS["silu"]
    hidden = right_gate.shape[1]
    dtype = _dtype_of_sums(t_gate, hidden)
    of_gate, of_up = torch.empty_like(t_gate), torch.empty_like(t_up)
    sums: list[Tensor | None] = [None, None, None]
    for rows in _pieces(t_gate, hidden):
        t_g, t_u, dt2 = t_gate[rows], t_up[rows], grad_t2[rows]
        g, u = product(t_g, right_gate), product(t_u, right_up)
        active = silu(g, out=torch.empty_like(g))
        sums[2] = add_product(sums[2], (active * u).T, dt2, dtype)
        dh = product(dt2, left2.T)
        du = active.mul_(dh)
        sums[1] = add_product(sums[1], t_u.T, du, dtype)
        store_product_(of_up[rows], du, right_up.T)
        dg = silu_back(dh.mul_(u), g, grad_input=du)
        sums[0] = add_product(sums[0], t_g.T, dg, dtype)
        store_product_(of_gate[rows], dg, right_gate.T)
        del g, u, active, dh, du, dg
    grads = (
        torch.zeros_like(like) if each is None else each.to(like.dtype).contiguous()
        for each, like in zip(sums, given[2:], strict=True)
    )
    return [of_gate, of_up, *grads]


def _gated_gradients(
    grads: Sequence[Tensor], kept: Sequence[Tensor], given: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    return list(compress(_GATED_BACKWARD(given, grads[0]), needs))


def _gated_plainly(given: Sequence[Tensor]) -> list[Tensor]:
    t_gate, t_up, right_gate, right_up, left2 = given
    return [(F.silu(t_gate @ right_gate) * (t_up @ right_up)) @ left2]


_gated_hidden.register_gradients(_gated_gradients, _gated_plainly)


def _pieces(x: Tensor, hidden: int) -> Iterator[slice]:
    rows = _rows_at_a_time(x, hidden)
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))


def _dtype_of_sums(x: Tensor, hidden: int) -> torch.dtype:
    """Return the dtype of sums over pieces: x's for a single piece, else float32 or wider."""
    one = x.shape[0] > 0 and _rows_at_a_time(x, hidden) >= x.shape[0]
    return x.dtype if one else torch.promote_types(x.dtype, torch.float32)


def _rows_at_a_time(x: Tensor, hidden: int) -> int:
    """Return the rows of a piece: all, or on a CPU what fits the cache, but more than 32."""
    rows = max(1, x.shape[0])
    if not is_on_cpu(x):
        return rows
    pieces = min(-(-rows * hidden // _HIDDEN_NUMBERS), -(-rows // 64))
    return -(-rows // max(1, pieces))


_FORWARD = Ways(
    "factorized_feed_forward", "feed_forward", _case, _sample,
    Way("kernel", kernels.forward, kernels.refuses, "factorized_feed_forward"),
    Way("torch", _by_torch),
)  # fmt: skip
_BACKWARD = Ways(
    "factorized_feed_forward_backward", "feed_forward", _case,
    lambda new: (*_sample(new)[:2], new(1024, 768), new(1024, 32), new(1024, 32), "gelu"),
    Way("kernel", kernels.backward, kernels.refuses, "factorized_feed_forward"),
    Way("torch", _gradients_by_torch),
)  # fmt: skip
_GATED_FORWARD = Ways(
    "gated_hidden", "gated_feed_forward", _case_gated, _sample_gated,
    Way("kernel", kernels.gated_forward, kernels.gated_refuses, "gated_feed_forward"),
    Way("torch", _gated_by_torch),
)  # fmt: skip
_GATED_BACKWARD = Ways(
    "gated_hidden_backward", "gated_feed_forward", _case_gated,
    lambda new: (*_sample_gated(new), new(1024, 32)),
    Way("kernel", kernels.gated_backward, kernels.gated_refuses, "gated_feed_forward"),
    Way("torch", _gated_gradients_by_torch),
)  # fmt: skip
