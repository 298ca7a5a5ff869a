"""Multiply matrices by whichever library is faster on this machine.

On a CPU with AVX-512 that is not Intel's, oneDNN takes half the time of torch's default, MKL.
"""

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from comera.ops.context import autocast_together, machine_of, without_autocast
from comera.ops.dispatch import is_eager, is_on_cpu
from comera.ops.operator import is_batched, is_concrete, is_recorded, operator
from comera.planning.machine import ONEDNN_FROM, cpu_info

_MOST_SHAPES = 128
"""Shapes that oneDNN multiplies whole, batched ones up to half of it: for each it takes a
millisecond once, and 0.6 MiB from then on. Batches of many lengths make thousands, after a cut of
ranks above all."""

_PANEL = 512
"""Rows, or depth, of the parts in which it multiplies others: a fifth slower, but of few shapes."""

onednn_shapes: set[tuple[int, ...]] = set()
"""Sizes of the products whole by oneDNN since training began. Checkpoints hold them, so that a
resumed run goes on in the same way."""

BATCHED_FROM = 1 << 20
"""Multiply-adds from which oneDNN is faster at batched products of contiguous matrices."""

NODE_FROM = 2 * ONEDNN_FROM
"""Multiply-adds from which oneDNN saves more than a node of autograd in Python takes: at widths 768
and rank 30 from 512 rows on, measured on one thread of an EPYC."""

_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _OneDnn:
    """Context in which oneDNN computes torch's float32 products on a CPU, in float32.

    Torch gives it those that may be rounded to bfloat16, which it does with Intel's AMX alone;
    :func:`has_onednn` checks that. Other threads get oneDNN meanwhile, too.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, "none"

    def __enter__(self) -> bool:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = _MATMUL.fp32_precision
                _MATMUL.fp32_precision = "bf16"
        return True

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _MATMUL.fp32_precision = self._before


onednn = _OneDnn()


def prefers_onednn() -> bool:
    """Return whether float32 products on a CPU use oneDNN: by measurement, or else by CPU type."""
    if not has_onednn() or not torch.backends.mkldnn.enabled:
        return False
    machine = machine_of(torch.device("cpu"))
    return machine.prefers_onednn if machine.measured else _mkl_leaves_avx512_unused()


# A graph is compiled for this machine, as it is then: the files about it are no part of it. This is
# what torch.compiler.assume_constant_result does, without importing the compiler.
prefers_onednn._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def has_onednn() -> bool:
    """Return whether torch has oneDNN, and that computes in float32 as it is asked to here."""
    if not torch.backends.mkldnn.is_available():
        return False
    with _disable_current_modes(), torch.no_grad(), onednn:
        a = torch.linspace(1, 2, 64 * 64, dtype=torch.float32, device="cpu").view(64, 64)
        error = (a @ a).double() - a.double() @ a.double()
        return float(error.abs().max()) < 1e-3  # of numbers near 150


@functools.cache
def _mkl_leaves_avx512_unused() -> bool:
    vendor = cpu_info("vendor_id")
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return avx512 and vendor is not None and vendor != "GenuineIntel"


def _suits_onednn(a: Tensor, columns: int, fewest: int) -> bool:
    """Return whether oneDNN suits a product; sizes count only outside of traced graphs."""
    if a.dtype != torch.float32 or not is_on_cpu(a):
        return False
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # for other machines too
        return False
    if is_concrete(a) and a.numel() * columns < fewest:
        return False
    if not (prefers_onednn() and is_eager() and is_concrete(a)):
        return prefers_onednn()
    if len(onednn_shapes) < _MOST_SHAPES // (a.dim() - 1):
        onednn_shapes.add((*a.shape, columns))
    return (*a.shape, columns) in onednn_shapes or (a.dim() == 2 and max(a.shape) >= _PANEL)


def _is_onednns(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN multiplies two matrices; torch does if a gradient is wanted."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return False
    return b.dtype == torch.float32 and _suits_onednn(a, b.shape[-1], ONEDNN_FROM)


def _onednn_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` by oneDNN: whole, or as products of one shape."""
    (rows, depth), columns = a.shape, b.shape[1]
    with onednn:
        whole = not is_eager() or (rows, depth, columns) in onednn_shapes
        if whole or is_batched(a) or is_batched(b):
            return torch.mm(a, b, out=out)
        out = a.new_empty(rows, columns) if out is None else out
        if depth <= rows:
            for first in range(0, rows, _PANEL):
                first = min(first, rows - _PANEL)  # the last panel overlaps the one before
                torch.mm(a[first : first + _PANEL], b, out=out[first : first + _PANEL])
            return out
        rest, _ = depth % _PANEL, out.zero_()
        for first in range(0, depth - rest, _PANEL):
            out.addmm_(a[:, first : first + _PANEL], b[first : first + _PANEL])
    return out.addmm_(a[:, depth - rest :], b[depth - rest :])


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of two matrices; torch runs it for autograd."""
    if not _is_onednns(a, b):
        return a @ b
    # The library depends on sizes, which a graph may find only when it runs.
    return _onednn_product(a, b) if is_concrete(a) else _product_in_a_graph(a, b)


@torch.library.custom_op("comera::product", mutates_args=())
def _product_in_a_graph(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b)


_product_in_a_graph.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))


def affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight + bias`` of a matrix, under autocast if on; differentiable repeatedly."""
    x_BI, weight_IO, bias_O = autocast_together(x_BI, weight_IO, bias_O)
    if not is_recorded() and _suits_onednn(x_BI, weight_IO.shape[1], NODE_FROM):
        return _affine(x_BI, weight_IO, bias_O)
    return _torch_affine(x_BI, weight_IO, bias_O)


def _torch_affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_BI @ weight_IO if bias_O is None else torch.addmm(bias_O, x_BI, weight_IO)


@operator("comera::affine")
def _affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    with without_autocast(x_BI):
        if not _is_onednns(x_BI, weight_IO):
            return _torch_affine(x_BI, weight_IO, bias_O)
        whole = not is_eager() or (*x_BI.shape, weight_IO.shape[1]) in onednn_shapes
        if bias_O is None or not whole:
            y_BO = _onednn_product(x_BI, weight_IO)
            return y_BO if bias_O is None else y_BO.add_(bias_O)
        # It adds the bias as it writes, and is a thousand times slower at slices and expanded rows.
        weight_OI = weight_IO.T if weight_IO.T.is_contiguous() else weight_IO.contiguous().T
        return torch.ops.mkldnn._linear_pointwise(x_BI, weight_OI, bias_O, "none", [], "")


_affine.register_fake(lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[1]))


def _backward(ctx, grad_BO: Tensor):
    x_BI, weight_IO = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad
    with without_autocast(grad_BO):
        grad_x = product(grad_BO, weight_IO.T) if need_x else None
        if need_weight and need_bias and x_BI.shape[1] < grad_BO.shape[1]:
            # A row of ones sums the gradient within the product: reading it again takes longer.
            with_ones = torch.cat([x_BI.T, x_BI.new_ones(1, x_BI.shape[0])])
            grads = product(with_ones, grad_BO)
            return grad_x, grads[:-1], grads[-1].clone()
        grad_weight = product(x_BI.T, grad_BO) if need_weight else None
        return grad_x, grad_weight, grad_BO.sum(0) if need_bias else None


_affine.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total`` with ``a @ b`` added in place, or ``a @ b`` in ``dtype`` if that is None."""
    if total is None:
        return product(a, b).to(dtype)
    if total.dtype == a.dtype and not (is_concrete(a) and _is_onednns(a, b)):
        return total.addmm_(a, b)
    return total.add_(product(a, b))


def store_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    if is_concrete(a) and _is_onednns(a, b):
        _onednn_product(a, b, out)
    else:
        torch.mm(a, b, out=out)


def computes_by_onednn(x: Tensor) -> bool:
    """Return whether large products of a tensor's kind are faster by oneDNN."""
    return x.dtype == torch.float32 and is_on_cpu(x) and prefers_onednn()


def batched_by(one: Tensor, other: Tensor) -> AbstractContextManager[bool]:
    """Return a context for a batched product without a gradient; it is True if oneDNN is faster."""
    by_onednn = is_eager() and _suits_onednn(one, other.shape[2], BATCHED_FROM)
    return onednn if by_onednn else nullcontext(False)
