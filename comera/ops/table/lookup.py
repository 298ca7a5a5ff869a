"""The operator that reads rows of a table from its two factors, and sums of rows over bags.

Two redundancies go: every distinct row is made once however often it is read, and cores are
contracted to factors once for all rows (CoMERA, arXiv 2405.14377, section 4.2). Bags are summed
from the distinct rows, without a row for each of their entries.

Shape suffixes: N = entries, B = bags (or entries, where there are none), V = left and W = right
part of a row's number, P and Q = left and right part of the width, R = the bond between them, D =
width, H = hot rows, K = their coordinates: D where they are dense, fewer where they are
coordinates in a basis.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import shapes_are_static, without_autocast
from comera.ops.dispatch import Case, Times, Ways
from comera.ops.kernels import lookup_kernel
from comera.ops.operator import operator
from comera.ops.table.distinct_rows import (
    TableFactors,
    bag_of_entries,
    check_range,
    empty_like,
    every_row,
    factor_grads,
    hot_grads,
    lying_as,
    make_rows,
    make_slots,
    sorted_rows,
    sum_by_sorted,
)


class Lookup(NamedTuple):
    """Rows to read, or sums of rows over bags.

    Attributes:
        indices_N: Rows to read.
        factors: Factors of the table.
        weights_N: Weight of every entry in its bag; None for ones.
        offsets_B: First entry of each bag; None for rows instead of bags.
        num_embeddings: Rows of the table.
        embedding_dim: D.
    """

    indices_N: Tensor
    factors: TableFactors
    weights_N: Tensor | None
    offsets_B: Tensor | None
    num_embeddings: int
    embedding_dim: int


def _sample(new: Callable[..., Any]) -> Lookup:
    factors = TableFactors(new(320, 8, 32), new(100, 32, 8), None, None)
    return Lookup(new(1024), factors, None, None, 32_000, 64)


def _warps_refuse(given: Lookup, *_: Any) -> str | None:
    return lookup_kernel.warps_refuse(*_of_warps(given))


def _of_warps(given: Lookup) -> tuple[Any, ...]:
    left_VPR, right_WRQ, *hot = given.factors
    return left_VPR, right_WRQ, given.embedding_dim, *hot, given.weights_N, given.offsets_B


def _kernel_refuses(given: Lookup, *_: Any) -> str | None:
    return lookup_kernel.refuses(*given.factors, given.weights_N)


def _kernel_refuses_back(given: Lookup, *_: Any) -> str | None:
    return lookup_kernel.refuses_backward(*given.factors, given.weights_N)


def _case(given: Lookup, *_: Any) -> Case:
    """Return what times depend on: the number of entries, and which kernel there is for them."""
    left_VPR, kinds = given.factors.left_VPR, list[str]()
    if lookup_kernel.warps_unfit(*_of_warps(given)) is not None:
        kinds.append("a block a row")
        kinds += ["hot rows"] if given.factors.hot_HK is not None else []
        kinds += ["bags"] if given.offsets_B is not None else []
    return left_VPR, left_VPR.dtype, (given.indices_N.shape[0], *kinds)


def _case_if_static(given: Lookup, checked: bool) -> Case | None:
    """Return the case with static shapes, where torch computes every row; else None."""
    return _case(given) if shapes_are_static(given.indices_N) else None


ROWS = Ways("rows_of_a_table", lambda new: (_sample(new), True), Times("lookup", _case_if_static))
"""Read rows, or sums of rows over bags; takes a :class:`Lookup`, and whether it was checked."""


def _refuses_distinct_rows(given: Lookup, checked: bool) -> str | None:
    """Refuse them where shapes are static; with kernels no size depends on the rows."""
    if not shapes_are_static(given.indices_N) or _warps_refuse(given) is None:
        return None
    return _kernel_refuses_back(given)


@ROWS.way("lookup", _refuses_distinct_rows, kernel="ttm_lookup")
def _looked_up(given: Lookup, checked: bool) -> Tensor:
    indices_N, factors, *rest = given
    return lookup(indices_N, *factors, *rest, checked)[0]


@ROWS.way("every row for itself")
def _each_by_itself(given: Lookup, checked: bool) -> Tensor:
    indices_N = given.indices_N
    rows = every_row(indices_N, given.factors, given.embedding_dim)
    if given.offsets_B is None:
        return rows
    each = torch.arange(indices_N.shape[0], device=indices_N.device)
    return F.embedding_bag(
        each, rows, given.offsets_B, mode="sum", per_sample_weights=given.weights_N
    )


@operator("comera::ttm_lookup")
def lookup(
    indices_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HK: Tensor | None,
    basis_KD: Tensor | None,
    weights_N: Tensor | None,
    offsets_B: Tensor | None,
    num_embeddings: int,
    embedding_dim: int,
    checked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read rows, or sums over bags of rows, as :class:`Lookup` and its factors name them.

    Args:
        checked: Whether the indices were checked before.

    Returns:
        ``(B, D)``; and for the backward pass keys and the entries that have them, ``(N,)`` each.
        They are sorted where torch has read the rows, and not yet where a kernel has.

    Raises:
        IndexError: If an index is out of range (checked on the CPU).
    """
    if not checked:
        check_range(indices_N, num_embeddings)
    factors = TableFactors(left_VPR, right_WRQ, hot_HK, basis_KD)
    given = Lookup(indices_N, factors, weights_N, offsets_B, num_embeddings, embedding_dim)
    return LOOKUP(given)


LOOKUP = Ways("ttm_lookup", lambda new: (_sample(new),), Times("lookup", _case))


@LOOKUP.way("kernel, a warp a row", _warps_refuse, kernel="ttm_warps")
def _by_warps(given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    left_VPR, right_WRQ, *_ = given.factors
    indices_N = given.indices_N.long().contiguous()
    sizes = given.num_embeddings, given.embedding_dim
    return lookup_kernel.read_by_warps(indices_N, left_VPR, right_WRQ, *sizes)


@LOOKUP.way("kernel", _kernel_refuses, kernel="ttm_lookup")
def _by_kernel(given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    indices_N, factors, weights_N, offsets_B, num_embeddings, embedding_dim = given
    indices_N, right_WRQ = indices_N.long().contiguous(), factors.right_WRQ.contiguous()
    return lookup_kernel.read(
        indices_N, factors.left_VPR, right_WRQ, factors.dense_hot(), weights_N, offsets_B,
        num_embeddings, embedding_dim,
    )  # fmt: skip


@LOOKUP.way("distinct rows")
def _by_slots(given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    factors, offsets_B = given.factors, given.offsets_B
    keys_N, order_N = sorted_rows(given.indices_N, *factors.sizes)
    slots = make_slots(keys_N, *factors.sizes)
    made_SD = make_rows(slots, factors, given.embedding_dim)
    at_N = slots.of_entries(order_N)
    if offsets_B is None:
        return made_SD.index_select(0, at_N), keys_N, order_N
    if not at_N.shape[0]:  # torch refuses an empty table
        return made_SD.new_zeros(offsets_B.shape[0], made_SD.shape[1]), keys_N, order_N
    weights_N = given.weights_N
    bags_BD = F.embedding_bag(at_N, made_SD, offsets_B, mode="sum", per_sample_weights=weights_N)
    return bags_BD, keys_N, order_N


@lookup.register_fake
def _(indices_N, left_VPR, right_WRQ, hot_HK, basis_KD, weights_N, offsets_B, num_embeddings,
      embedding_dim, checked):  # fmt: skip
    count = (indices_N if offsets_B is None else offsets_B).shape[0]
    rows = left_VPR.new_empty(count, embedding_dim)
    return rows, *(torch.empty_like(indices_N, dtype=torch.int64) for _ in range(2))


@torch.library.custom_op("comera::ttm_lookup_backward", mutates_args=())
def lookup_backward(
    grad_BD: Tensor,
    indices_N: Tensor,
    keys_N: Tensor,
    order_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HK: Tensor | None,
    basis_KD: Tensor | None,
    weights_N: Tensor | None,
    offsets_B: Tensor | None,
    num_embeddings: int,
    with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    factors = TableFactors(left_VPR, right_WRQ, hot_HK, basis_KD)
    given = Lookup(indices_N, factors, weights_N, offsets_B, num_embeddings, grad_BD.shape[1])
    return LOOKUP_BACKWARD(given, _Sorted(grad_BD, keys_N, order_N, with_weights))


class _Sorted(NamedTuple):
    """The gradient of a lookup, and its entries sorted by key."""

    grad_BD: Tensor
    keys_N: Tensor
    order_N: Tensor
    with_weights: bool


_Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of both factors, hot rows, their basis and the weights; empty where there are none."""

LOOKUP_BACKWARD = Ways(
    "ttm_lookup_backward",
    lambda new: (_sample(new), _Sorted(new(1024, 64), new(1024), new(1024), False)),
    Times("lookup", _case),
)


@LOOKUP_BACKWARD.way("kernel, a warp a row", _warps_refuse, kernel="ttm_warps")
def _back_by_warps(given: Lookup, back: _Sorted) -> _Grads:
    left_VPR, right_WRQ, *_ = given.factors
    grad_BD, indices_N = back.grad_BD.to(left_VPR.dtype), given.indices_N.long().contiguous()
    left, right = lookup_kernel.row_grads_by_warps(grad_BD, indices_N, left_VPR, right_WRQ)
    nothing = [empty_like(None, grad_BD) for _ in range(3)]
    return lying_as(left_VPR, left), lying_as(right_WRQ, right), *nothing  # type: ignore[return-value]


@LOOKUP_BACKWARD.way("kernel", _kernel_refuses_back, kernel="ttm_lookup")
def _back_by_kernel(given: Lookup, back: _Sorted) -> _Grads:
    indices_N, factors, weights_N, offsets_B, num_embeddings, _ = given
    left_VPR, right_WRQ, hot_HK, basis_KD = factors
    grad_BD = back.grad_BD.to(left_VPR.dtype).contiguous()
    hot_HD, dense_WRQ = factors.dense_hot(), right_WRQ.contiguous()
    left, right, hot = lookup_kernel.row_grads(
        grad_BD, back.keys_N, back.order_N, left_VPR, dense_WRQ, hot_HD, weights_N, offsets_B,
        num_embeddings,
    )  # fmt: skip
    hot = None if hot is None else hot.to(grad_BD.dtype)
    basis: Tensor | None = None
    if hot is not None and hot_HK is not None and basis_KD is not None:
        with without_autocast(hot):
            hot, basis = hot @ basis_KD.T, hot_HK.T @ hot
    to_weights = None
    if back.with_weights and offsets_B is not None:
        indices_N = indices_N.long().contiguous()
        to_weights = lookup_kernel.weight_grads(
            grad_BD, indices_N, left_VPR, dense_WRQ, hot_HD, offsets_B, num_embeddings
        )
    hot, basis, to_weights = (
        empty_like(None, grad_BD) if grad is None else grad for grad in (hot, basis, to_weights)
    )
    return lying_as(left_VPR, left), lying_as(right_WRQ, right), hot, basis, to_weights


def _after_torch(given: Lookup, *_: Any) -> str | None:
    """Refuse where no kernel can have read the rows: torch's keys are sorted already."""
    return _kernel_refuses(given) and _warps_refuse(given)


@LOOKUP_BACKWARD.way("sort what a kernel may have read, then by slots", _after_torch)
def _back_sorted(given: Lookup, back: _Sorted) -> _Grads:
    keys_N, at_N = back.keys_N.sort(stable=True)  # torch has sorted them, if it has read the rows
    order_N = back.order_N.index_select(0, at_N)
    return _back_by_slots(given, back._replace(keys_N=keys_N, order_N=order_N))


@LOOKUP_BACKWARD.way("by slots")
def _back_by_slots(given: Lookup, back: _Sorted) -> _Grads:
    _, factors, weights_N, offsets_B, *_ = given
    left_VPR, right_WRQ, *_ = factors
    grad_BD, order_N = back.grad_BD, back.order_N
    slots = make_slots(back.keys_N, *factors.sizes)
    width = left_VPR.shape[1] * right_WRQ.shape[2]
    from_N, grad_weights = order_N, empty_like(None, grad_BD)
    if offsets_B is not None:
        bag_N = bag_of_entries(offsets_B, order_N.shape[0])
        from_N = bag_N.index_select(0, order_N)
        if back.with_weights:
            made = make_rows(slots, factors, grad_BD.shape[1])
            at_N = slots.of_entries(order_N)
            grad_weights = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                grad_BD.contiguous(), made, at_N, offsets_B, bag_N, _SUM
            )
    weights = None if weights_N is None else weights_N.index_select(0, order_N)
    per_slot = sum_by_sorted(grad_BD.contiguous(), from_N, slots.of_sorted_N, slots.count, weights)
    hot, cold = per_slot.tensor_split([slots.hot.shape[0]])
    if cold.shape[1] < width:
        cold = F.pad(cold, (0, width - cold.shape[1]))
    tall = slots.group * left_VPR.shape[1]
    cold = cold.reshape(slots.right_T.shape[0], tall, right_WRQ.shape[2])
    grad_left, grad_right = factor_grads(slots, cold, factors)
    return (
        grad_left,
        lying_as(right_WRQ, grad_right),
        *hot_grads(hot, slots.hot, factors),
        grad_weights,
    )


_SUM = 0
"""torch's number of that mode of a bag."""


@lookup_backward.register_fake
def _(grad_BD, indices_N, keys_N, order_N, left_VPR, right_WRQ, hot_HK, basis_KD, weights_N,
      offsets_B, num_embeddings, with_weights):  # fmt: skip
    factors = torch.empty_like(left_VPR), torch.empty_like(right_WRQ)
    hot = empty_like(hot_HK, grad_BD), empty_like(basis_KD, grad_BD)
    return *factors, *hot, empty_like(weights_N if with_weights else None, grad_BD)


def _setup_context(ctx, inputs, output) -> None:
    indices_N, *tensors, ctx.num_embeddings, _, _ = inputs
    ctx.given = [tensor is not None for tensor in tensors]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        indices_N, *output[1:], *(tensor for tensor in tensors if tensor is not None)
    )


def _backward(ctx, grad_BD: Tensor | None, *_):
    if grad_BD is None:
        return (None,) * 10
    indices_N, keys_N, order_N, *saved = ctx.saved_tensors
    rest = iter(saved)
    tensors = [next(rest) if given else None for given in ctx.given]
    if torch.is_grad_enabled():  # this backward pass is itself differentiated
        return None, *_differentiable_grads(grad_BD, indices_N, tensors), *(None,) * 4
    with_weights = ctx.given[4] and ctx.needs_input_grad[5]
    grads = lookup_backward(
        grad_BD, indices_N, keys_N, order_N, *tensors, ctx.num_embeddings, with_weights
    )
    given = [*ctx.given[:4], with_weights]
    wanted = [grad if given else None for grad, given in zip(grads, given, strict=True)]
    return None, *wanted, *(None,) * 4


def _differentiable_grads(
    grad_BD: Tensor, indices_N: Tensor, tensors: list[Tensor | None]
) -> list[Tensor | None]:
    """Return gradients of all tensors but the offsets, by operations that autograd knows."""
    # One tensor may have been made from another: aliases, so that this way is not counted here too.
    left, right, hot, basis, weights, offsets = (
        None if x is None else x.view_as(x) for x in tensors
    )
    assert left is not None, "a table has a left factor"
    assert right is not None, "a table has a right factor"
    y_BD = every_row(indices_N, TableFactors(left, right, hot, basis), grad_BD.shape[1])
    if offsets is not None:  # torch's own bags can be differentiated once
        rows_ND = y_BD if weights is None else y_BD * weights[:, None]
        bag_N = bag_of_entries(offsets, indices_N.shape[0])
        y_BD = rows_ND.new_zeros(grad_BD.shape).index_add(0, bag_N, rows_ND)
    given = [left, right, hot, basis, weights]
    wanted = [x for x in given if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(y_BD, wanted, grad_BD, create_graph=True))
    return [next(grads) if x is not None and x.requires_grad else None for x in given]


lookup.register_autograd(_backward, setup_context=_setup_context)
