"""Matrix products by the library that is faster at them on this machine.

torch multiplies float32 matrices on a CPU with MKL, which keeps to AVX2 on processors that are
not Intel's; oneDNN, which torch carries as well, uses AVX-512 wherever it is and takes half the
time there.
"""

import functools

import torch
from torch import Tensor

from comera.ops.context import autocast_together, machine_of, without_autocast
from comera.ops.dispatch import may_read_values
from comera.ops.operator import is_concrete, operator
from comera.planning.machine import ONEDNN_FROM, cpu_info

_CPU = torch.device("cpu")


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices.

    The result may lie transposed in memory. Where a gradient is wanted, torch's own product is
    what autograd knows.
    """
    if not is_concrete(a) and _may_be_onednns(a, b):
        return _product_in_a_graph(a, b)
    return _product(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _by_onednn_turned(a, b) if _onednn_takes(a, b) else a @ b


def _by_onednn_turned(a: Tensor, b: Tensor) -> Tensor:
    if a.is_contiguous() or a.numel() <= b.numel():
        return by_onednn(a, b)
    return by_onednn(b.T, a.T).T  # oneDNN copies a left factor whose rows are not contiguous


@torch.library.custom_op("comera::product", mutates_args=())
def _product_in_a_graph(a: Tensor, b: Tensor) -> Tensor:
    """As one node: which library it is depends on sizes, which a graph is not to be tied to."""
    return _product(a, b).contiguous()


@_product_in_a_graph.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight + bias`` of a matrix x, differentiable; at autocast's dtype where it is on."""
    x_BI, (weight_IO, *biases), _ = autocast_together(
        x_BI, [weight_IO] if bias_O is None else [weight_IO, bias_O]
    )
    return _affine(x_BI, weight_IO, biases[0] if biases else None)


@operator("comera::affine")
def _affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    with without_autocast(x_BI):
        if _onednn_takes(x_BI, weight_IO):
            return by_onednn(x_BI, weight_IO, bias_O)
        return x_BI @ weight_IO if bias_O is None else torch.addmm(bias_O, x_BI, weight_IO)


@_affine.register_fake
def _(x_BI, weight_IO, bias_O):
    return x_BI.new_empty(x_BI.shape[0], weight_IO.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, grad_BO: Tensor):
    x_BI, weight_IO = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad
    with without_autocast(grad_BO):
        return (
            product(grad_BO, weight_IO.T) if need_x else None,
            product(x_BI.T, grad_BO) if need_weight else None,
            grad_BO.sum(0) if need_bias else None,
        )


_affine.register_autograd(_backward, setup_context=_setup_context)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + a @ b`` in ``dtype``, which may be wider than theirs; in place, None being zero."""
    if total is None:
        return product(a, b).to(dtype)
    if _onednn_takes(a, b):
        total += _by_onednn_turned(a, b)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
    return total


def product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, written to ``out`` where that saves memory; use what is returned."""
    return _by_onednn_turned(a, b) if _onednn_takes(a, b) else torch.mm(a, b, out=out)


def store_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out[:] = a @ b``."""
    made = product_into(out, a, b)
    if made is not out:
        out.copy_(made)


def stacked_product(a_GMK: Tensor, b_GKN: Tensor) -> Tensor:
    """``a @ b`` of equally many matrices, contiguous; for use inside of operators."""
    if a_GMK.shape[0] == 1 and (not is_concrete(a_GMK) or _onednn_takes(a_GMK[0], b_GKN[0])):
        return product(a_GMK[0], b_GKN[0]).contiguous().unsqueeze(0)
    return torch.bmm(a_GMK, b_GKN)


def prefers_onednn() -> bool:
    """Whether float32 products on the CPU go to oneDNN: as measured, else by a rule of thumb."""
    if not has_onednn() or not torch.backends.mkldnn.enabled:
        return False
    machine = machine_of(_CPU)
    return machine.prefers_onednn if machine.measured else _mkl_leaves_avx512_unused()


@functools.cache
def has_onednn() -> bool:
    """Whether torch was built with it."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def by_onednn(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """``a @ b + row`` of float32 matrices on a CPU, by oneDNN."""
    if not b.is_contiguous() and not b.T.is_contiguous():
        b = b.contiguous()  # at a slice or an expanded row oneDNN is a thousand times slower
    return torch.ops.mkldnn._linear_pointwise(a, b.T, row, "none", [], "")


def _onednn_takes(a: Tensor, b: Tensor) -> bool:
    large = a.numel() * b.shape[1] >= ONEDNN_FROM
    return large and _may_be_onednns(a, b) and prefers_onednn()


def _may_be_onednns(a: Tensor, b: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return may_read_values(a) and a.dtype == b.dtype == torch.float32 and not differentiated


@functools.cache
def _mkl_leaves_avx512_unused() -> bool:
    vendor = cpu_info("vendor_id")
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return avx512 and vendor is not None and vendor != "GenuineIntel"
