"""Matrix products by the library that is faster at them on this machine.

torch multiplies float32 matrices on a CPU with MKL, which keeps to AVX2 on processors that are
not Intel's; oneDNN, which torch carries as well, uses AVX-512 wherever it is and takes half the
time there.
"""

import functools

import torch
from torch import Tensor

from comera.ops.context import autocast_together, machine_of, without_autocast
from comera.ops.dispatch import Ways, on_cpu_alone, without_values
from comera.ops.operator import is_concrete, operator
from comera.planning.machine import ONEDNN_FROM, cpu_info

_CPU = torch.device("cpu")
_SMALL = "the product is small"
TORCH = "torch's own is as fast here"


def prefers_onednn() -> bool:
    """Say whether float32 products on a CPU go to oneDNN: as measured, else by a rule of thumb."""
    if not has_onednn() or not torch.backends.mkldnn.enabled:
        return False
    machine = machine_of(_CPU)
    return machine.prefers_onednn if machine.measured else _mkl_leaves_avx512_unused()


# A graph is compiled for this machine, as it is then: the files about it are no part of it. This is
# what torch.compiler.assume_constant_result does, without importing the compiler.
prefers_onednn._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def has_onednn() -> bool:
    """Say whether torch was built with it."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _mkl_leaves_avx512_unused() -> bool:
    vendor = cpu_info("vendor_id")
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return avx512 and vendor is not None and vendor != "GenuineIntel"


def by_onednn(a: Tensor, b: Tensor, row: Tensor | None = None) -> Tensor:
    """Return ``a @ b + row`` of float32 matrices on a CPU, by oneDNN."""
    if not b.is_contiguous() and not b.T.is_contiguous():
        b = b.contiguous()  # at a slice or an expanded row oneDNN is a thousand times slower
    return torch.ops.mkldnn._linear_pointwise(a, b.T, row, "none", [], "")


_LIBRARY = Ways("product", lambda new: (new(1024, 768), new(768, 768)))


def _not_onednns(a: Tensor, b: Tensor) -> str | None:
    """Refuse what oneDNN multiplies on no machine."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return "autograd knows torch's own product"
    if not a.dtype == b.dtype == torch.float32:
        return "the dtype is not float32"
    return on_cpu_alone(a)


def is_torchs(a: Tensor, columns: int) -> bool:
    """Say whether torch multiplies a matrix by one of so many columns, so that autograd knows it.

    In a graph, where sizes may be unknown, it does so unless oneDNN might be faster.
    """
    if a.dtype != torch.float32 or on_cpu_alone(a) is not None:
        return True
    if is_concrete(a) and a.numel() * columns < ONEDNN_FROM:
        return True
    return not prefers_onednn()


def _not_in_a_graph(a: Tensor, b: Tensor) -> str | None:
    return without_values(a) or _not_onednns(a, b) or (None if prefers_onednn() else TORCH)


def _not_onednns_here(a: Tensor, b: Tensor) -> str | None:
    if a.numel() * b.shape[-1] < ONEDNN_FROM:
        return _SMALL
    return _not_onednns(a, b) or (None if prefers_onednn() else TORCH)


class _Torch:
    """Products of torch."""

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b, out=out)

    @staticmethod
    def add_(total: Tensor, a: Tensor, b: Tensor) -> None:
        if total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total += a @ b


@_LIBRARY.way("one node of a graph", _not_in_a_graph)
class _Node(_Torch):
    """A product whose library is found when the graph runs: that depends on sizes."""

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        return _product_in_a_graph(a, b)


@_LIBRARY.way("oneDNN", _not_onednns_here)
class _OneDNN(_Torch):
    """Products of oneDNN, some of which lie transposed in memory."""

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        if a.is_contiguous() or a.numel() <= b.numel():
            return by_onednn(a, b)
        return by_onednn(b.T, a.T).T  # it copies a left factor whose rows are not contiguous

    @staticmethod
    def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return by_onednn(x, weight, bias)

    @staticmethod
    def into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return _OneDNN.product(a, b)

    @staticmethod
    def add_(total: Tensor, a: Tensor, b: Tensor) -> None:
        total += _OneDNN.product(a, b)


_LIBRARY.way("torch")(_Torch)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of two matrices, which may lie transposed in memory.

    Where a gradient is wanted, it is torch's own product, which autograd knows.
    """
    return _LIBRARY.choose(a, b).product(a, b)


@torch.library.custom_op("comera::product", mutates_args=())
def _product_in_a_graph(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b).contiguous()


@_product_in_a_graph.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight + bias`` of a matrix x, at autocast's dtype where that is on.

    It can be differentiated as often as one likes.
    """
    x_BI, (weight_IO, *biases), _ = autocast_together(
        x_BI, [weight_IO] if bias_O is None else [weight_IO, bias_O]
    )
    bias_O = biases[0] if biases else None
    if is_torchs(x_BI, weight_IO.shape[1]):
        return _Torch.affine(x_BI, weight_IO, bias_O)
    return _affine(x_BI, weight_IO, bias_O)


@operator("comera::affine")
def _affine(x_BI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    with without_autocast(x_BI):
        return _LIBRARY.choose(x_BI, weight_IO).affine(x_BI, weight_IO, bias_O)


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
    """Add ``a @ b`` to ``total`` in place, which may be of a wider dtype; None is zero."""
    if total is None:
        return product(a, b).to(dtype)
    _LIBRARY.choose(a, b).add_(total, a, b)
    return total


def product_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, written to ``out`` where that saves memory."""
    return _LIBRARY.choose(a, b).into(out, a, b)


def store_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write ``a @ b`` to ``out``."""
    made = product_into(out, a, b)
    if made is not out:
        out.copy_(made)


_STACKED = Ways("stacked_product", lambda new: (new(1, 1024, 768), new(1, 768, 768)))


def _not_one_pair(a_GMK: Tensor, b_GKN: Tensor) -> str | None:
    if a_GMK.shape[0] != 1:
        return "there are several pairs"
    return without_values(a_GMK) and _not_onednns_here(a_GMK, b_GKN)


@_STACKED.way("as a product of two matrices", _not_one_pair)
def _one_product(a_GMK: Tensor, b_GKN: Tensor) -> Tensor:
    return product(a_GMK[0], b_GKN[0]).contiguous().unsqueeze(0)


_STACKED.way("torch")(torch.bmm)


def stacked_product(a_GMK: Tensor, b_GKN: Tensor) -> Tensor:
    """Return ``a @ b`` of equally many matrices, contiguous; for use inside of operators."""
    return _STACKED(a_GMK, b_GKN)
