"""Two tensor-train layers with an activation between them, without keeping what lies between.

The wide hidden activation is the largest tensor of a transformer block. Here it exists for a few
hundred rows at a time, which stay in the processor's cache, and is computed once more in the
backward pass from the narrow ``t1 = x @ left1``: one narrow product more, three wide tensors less.

Shape suffixes: B = batch, I = input width, F = hidden width, O = output width, R = padded bonds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import autocast_together, products_are_tf32, without_autocast
from comera.ops.dispatch import Case, Times, Ways, on_cpu_alone
from comera.ops.factors import Factors, set_ones_
from comera.ops.kernels import feed_forward_kernel
from comera.ops.operator import operator
from comera.ops.product import add_product, product, product_into, store_product_

_aten = torch.ops.aten

ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gelu": (_aten.gelu.out, _aten.gelu_backward.grad_input),
    "relu": (_aten.relu.out, lambda g, h, grad_input: _aten.threshold_backward.grad_input(
        g, h, 0, grad_input=grad_input)),
    "silu": (_aten.silu.out, _aten.silu_backward.grad_input),
}  # fmt: skip
"""Value into ``out=``, and gradient from that of the output and the input into ``grad_input=``."""

_HIDDEN_NUMBERS = 1 << 21
"""Numbers of the hidden activation at a time on a CPU: a few megabytes, the size of a cache."""


def factorized_feed_forward_reference(
    x_BI: Tensor, factors1: Factors, factors2: Factors, activation: str
) -> Tensor:
    """Do the same as :func:`factorized_feed_forward` in plain products."""
    hidden = getattr(torch.nn.functional, activation)(plainly(x_BI, factors1))
    return plainly(hidden, factors2)


def plainly(x: Tensor, factors: Factors) -> Tensor:
    """Multiply by a left and a right factor, and add a bias, one after the other."""
    y = x @ factors.left @ factors.right
    return y + factors.right[-1] if factors.has_bias else y


def factorized_feed_forward(
    x_BI: Tensor, factors1: Factors, factors2: Factors, activation: str
) -> Tensor:
    """Compute ``act(x @ W1 + b1) @ W2 + b2`` of two layers, both with a bias or neither.

    Args:
        x_BI: ``(*, I)``.
        factors1: ``(I, R)`` and ``(R, F)``, those of
            :func:`~comera.ops.contract_cores.contract_cores`.
        factors2: ``(F, R)`` and ``(R, O)``.
        activation: A key of ``ACTIVATIONS``.

    Returns:
        ``(*, O)``. It can be differentiated as often as one likes.
    """
    x_BI, lefts, rights = autocast_together(
        x_BI, [factors1.left, factors2.left], [factors1.right, factors2.right]
    )
    return _feed_forward(
        x_BI, lefts[0], rights[0], lefts[1], rights[1], factors1.has_bias, activation
    )[0]


@operator("comera::factorized_feed_forward")
def _feed_forward(
    x_BI: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    bias: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y`` and the products with both left factors, a bias' columns of ones in them."""
    x = x_BI.reshape(-1, x_BI.shape[-1])
    y, t1, t2 = _FORWARD(x, left1, right1, left2, right2, bias, activation)
    return y.reshape(*x_BI.shape[:-1], right2.shape[1]), t1, t2


def _sample(new: Callable[..., Any]) -> tuple[Any, ...]:
    factors = new(768, 32), new(32, 3072), new(3072, 32), new(32, 768)
    return new(1024, 768), *factors, True, "gelu"


def _case(x: Tensor, left1: Tensor, right1: Tensor, left2: Tensor, *_: Any) -> Case:
    """Time depends on rows, both widths, the wider bond, rounding, and which kernels there are."""
    bond = max(left1.shape[1], left2.shape[1])
    kernels = ("wide",) if bond in feed_forward_kernel.WIDE_BONDS else ()
    sizes = x.shape[0], x.shape[1], right1.shape[1], bond
    return x, x.dtype, (*sizes, *rounding(x), *kernels)


def rounding(x: Tensor) -> tuple[str, ...]:
    """Name what products round to, where that is not told by the dtype."""
    return ("tf32",) if products_are_tf32(x) else ()


_TIMES = Times("feed_forward", _case)
_FORWARD = Ways("factorized_feed_forward", _sample, _TIMES)


def _kernel_refuses(
    x: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    bias: bool,
    activation: str,
) -> str | None:
    return feed_forward_kernel.refuses(x, left1, right1, left2, right2, activation)


_FORWARD.way("kernel", _kernel_refuses, kernel="factorized_feed_forward")(
    feed_forward_kernel.forward
)


@_FORWARD.way("torch")
def _by_torch(
    x: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    bias: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    value, _ = ACTIVATIONS[activation]
    t1 = product(x, left1).contiguous()  # as all results are promised to be
    t2 = x.new_empty(x.shape[0], left2.shape[1])
    set_ones_(t1, bias)
    (hidden,) = hidden_buffers(x, right1.shape[1], 1)
    for rows in hidden_slices(x, right1.shape[1]):
        h = product_into(hidden[: t1[rows].shape[0]], t1[rows], right1)
        store_product_(t2[rows], value(h, out=h), left2)
    set_ones_(t2, bias)
    return product(t2, right2), t1, t2


@_feed_forward.register_fake
def _(x_BI, left1, right1, left2, right2, bias, activation):
    rows = math.prod(x_BI.shape[:-1])
    y = x_BI.new_empty(*x_BI.shape[:-1], right2.shape[1])
    return y, x_BI.new_empty(rows, left1.shape[1]), x_BI.new_empty(rows, left2.shape[1])


@torch.library.custom_op("comera::factorized_feed_forward_backward", mutates_args=())
def _feed_forward_backward(
    grad_y: Tensor,
    x: Tensor,
    t1: Tensor,
    t2: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _BACKWARD(x, left1, right1, left2, right2, grad_y, t1, t2, activation)


def _sample_backward(new: Callable[..., Any]) -> tuple[Any, ...]:
    x, left1, right1, left2, right2, _, activation = _sample(new)
    t1, t2 = new(1024, 32), new(1024, 32)
    return x, left1, right1, left2, right2, new(1024, 768), t1, t2, activation


_BACKWARD = Ways("factorized_feed_forward_backward", _sample_backward, _TIMES)


def _back_refuses(x: Tensor, left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor,
                  *given: Any) -> str | None:  # fmt: skip
    return feed_forward_kernel.refuses(x, left1, right1, left2, right2, given[-1])


_BACKWARD.way("kernel", _back_refuses, kernel="factorized_feed_forward")(
    feed_forward_kernel.backward
)


@_BACKWARD.way("torch")
def _gradients_by_torch(
    x: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    grad_y: Tensor,
    t1: Tensor,
    t2: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value, grad_of = ACTIVATIONS[activation]
    slices = list(hidden_slices(x, right1.shape[1]))
    # What several pieces are summed up in; one is not worth a cast there and back.
    wide = x.dtype if len(slices) == 1 else torch.promote_types(x.dtype, torch.float32)
    turned = on_cpu_alone(x) is None  # there a narrow gradient is made faster that way
    u2 = product(grad_y, right2.T)
    u1 = torch.empty_like(t1)
    grad_left2 = grad_right1 = None
    hidden, active, grad = hidden_buffers(x, right1.shape[1], 3)
    for rows in slices:
        count = t1[rows].shape[0]
        h = product_into(hidden[:count], t1[rows], right1)
        a = value(h, out=active[:count])
        pair = (u2[rows].T, a) if turned else (a.T, u2[rows])
        grad_left2 = add_product(grad_left2, *pair, wide)
        ga = product_into(grad[:count], u2[rows], left2.T)
        gh = grad_of(ga, h, grad_input=ga)
        grad_right1 = add_product(grad_right1, t1[rows].T, gh, wide)
        store_product_(u1[rows], gh, right1.T)
    if grad_left2 is None or grad_right1 is None:  # without a row
        grad_left2, grad_right1 = torch.zeros_like(left2), torch.zeros_like(right1)
        turned = False
    return (
        product(u1, left1.T),
        product(u1.T, x).T.contiguous() if turned else product(x.T, u1).contiguous(),
        grad_right1.to(x.dtype).contiguous(),
        (grad_left2.T if turned else grad_left2).to(x.dtype).contiguous(),
        product(t2.T, grad_y).contiguous(),
    )


@_feed_forward_backward.register_fake
def _(grad_y, x, t1, t2, left1, right1, left2, right2, activation):
    return tuple(map(torch.empty_like, (x, left1, right1, left2, right2)))


def _setup_context(ctx, inputs, output) -> None:
    x_BI, left1, right1, left2, right2, ctx.bias, ctx.activation = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_BI, output[1], output[2], left1, right1, left2, right2)


def _backward(ctx, grad_y: Tensor | None, *_):
    if grad_y is None:
        return (None,) * 7
    x_BI, *saved = ctx.saved_tensors
    if torch.is_grad_enabled():
        return *_gradients_again(ctx, grad_y, x_BI, *saved[2:]), None, None
    with without_autocast(x_BI):
        x = x_BI.reshape(-1, x_BI.shape[-1])
        gy = grad_y.reshape(-1, grad_y.shape[-1]).to(x.dtype)
        grad_x, *grads = _feed_forward_backward(gy, x, *saved, ctx.activation)
    return grad_x.reshape(x_BI.shape), *grads, None, None


def _gradients_again(ctx, grad_y: Tensor, x_BI: Tensor, *halves: Tensor) -> list[Tensor | None]:
    def reference(
        x: Tensor, left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor
    ) -> Tensor:
        factors = Factors(left1, right1, ctx.bias), Factors(left2, right2, ctx.bias)
        return factorized_feed_forward_reference(x, *factors, ctx.activation)

    with without_autocast(x_BI):
        return gradients_again(reference, [x_BI, *halves], grad_y.to(x_BI.dtype))


_feed_forward.register_autograd(_backward, setup_context=_setup_context)


def gradients_again(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """Return gradients that can be differentiated, for a backward pass that is itself.

    Args:
        function: A reference for an operator, in operations that autograd knows.
        inputs: The operator's saved inputs.
        grad: Gradient of what it returns.

    Returns:
        Gradients of the inputs; None for those that need none.
    """
    # Of views: one input may depend on another, as the second pass through a layer's factors does
    # on the first, and what it gets by way of that one is not for here.
    inputs = [each.view_as(each) for each in inputs]
    wanted = [each for each in inputs if each.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return [next(found) if each.requires_grad else None for each in inputs]


def hidden_slices(x: Tensor, hidden: int) -> Iterator[slice]:
    """Cut the rows of a batch into the pieces of which a hidden activation exists at a time."""
    rows = _rows_at_a_time(x, hidden)
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))


def hidden_buffers(x: Tensor, hidden: int, count: int) -> list[Tensor]:
    """Return tensors of the hidden width that hold the largest of these pieces."""
    rows = _rows_at_a_time(x, hidden)
    return [x.new_empty(rows, hidden) for _ in range(count)]


_rows_at_a_time = Ways("hidden_rows_at_a_time", lambda new: (new(1024, 768), 3072))


@_rows_at_a_time.way("as many as stay in the cache", lambda x, _: on_cpu_alone(x))
def _rows_in_cache(x: Tensor, hidden: int) -> int:
    """Cut into pieces of equal size, none much below 64 rows."""
    rows = max(1, x.shape[0])
    pieces = min(-(-rows * hidden // _HIDDEN_NUMBERS), -(-rows // 64))
    return -(-rows // max(1, pieces))


@_rows_at_a_time.way("all")
def _all_rows(x: Tensor, hidden: int) -> int:
    return max(1, x.shape[0])
