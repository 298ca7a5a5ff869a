"""The operator that reads rows of a table from its two factors, and sums of rows over bags.

Every distinct row is made once however often it is read, and cores are contracted to factors once
for all rows (CoMERA, arXiv 2405.14377, section 4.2). Bags are summed from the distinct rows,
without a row for each of their entries. Shape suffixes are those of
:mod:`~comera.ops.table.distinct_rows`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import shapes_are_static
from comera.ops.dispatch import Case, Ways
from comera.ops.kernels import lookup_kernel
from comera.ops.operator import operator
from comera.ops.table.distinct_rows import (
    Lookup,
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


def _sample(new: Callable[..., Any]) -> Lookup:
    factors = new(320, 8, 32), new(100, 32, 8)
    return Lookup(new(1024), *factors, None, None, None, None, 32_000, 64)


def _case(given: Lookup, *_: Any) -> Case:
    """Time depends on the number of entries, and on which kernel there is for them."""
    kinds = list[str]()
    if lookup_kernel.warps_unfit(given) is not None:
        kinds.append("a block a row")
        kinds += ["hot rows"] if given.hot_HK is not None else []
        kinds += ["bags"] if given.offsets_B is not None else []
    return given.left_VPR, given.left_VPR.dtype, (given.indices_N.shape[0], *kinds)


def _case_if_static(given: Lookup, checked: bool) -> Case | None:
    """Return the case with static shapes, where torch computes every row; else None."""
    return _case(given) if shapes_are_static(given.indices_N) else None


ROWS = Ways("rows_of_a_table", "lookup", _case_if_static, lambda new: (_sample(new), True))
"""Read rows, or sums of rows over bags; takes a :class:`Lookup`, and whether it was checked."""


def _refuses_distinct_rows(given: Lookup, checked: bool) -> str | None:
    """Refuse them where shapes are static; with kernels no size depends on the rows."""
    if not shapes_are_static(given.indices_N) or lookup_kernel.warps_refuse(given) is None:
        return None
    return lookup_kernel.refuses_backward(given)


@ROWS.way("lookup", _refuses_distinct_rows, kernel="ttm_lookup")
def _looked_up(given: Lookup, checked: bool) -> Tensor:
    return lookup(*given, checked)[0]


@ROWS.way("every row for itself")
def _each_by_itself(given: Lookup, checked: bool) -> Tensor:
    rows, offsets_B = every_row(given), given.offsets_B
    if offsets_B is None:
        return rows
    each = torch.arange(rows.shape[0], device=rows.device)
    return F.embedding_bag(each, rows, offsets_B, mode="sum", per_sample_weights=given.weights_N)


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
    """Read rows, or sums over bags of rows: the attributes of a :class:`Lookup`.

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
    others = hot_HK, basis_KD, weights_N, offsets_B
    return LOOKUP(Lookup(indices_N, left_VPR, right_WRQ, *others, num_embeddings, embedding_dim))


LOOKUP = Ways("ttm_lookup", "lookup", _case, lambda new: (_sample(new),))
LOOKUP.way("kernel, a warp a row", lookup_kernel.warps_refuse, kernel="ttm_warps")(
    lookup_kernel.read_by_warps
)
LOOKUP.way("kernel", lookup_kernel.refuses, kernel="ttm_lookup")(lookup_kernel.read)


@LOOKUP.way("distinct rows")
def _by_slots(given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    keys_N, order_N = sorted_rows(given.indices_N, *given.sizes)
    slots = make_slots(keys_N, *given.sizes)
    rows_SD, at_N, offsets_B = make_rows(slots, given), slots.of_entries(order_N), given.offsets_B
    if offsets_B is None:
        return rows_SD.index_select(0, at_N), keys_N, order_N
    if not at_N.shape[0]:  # torch refuses an empty table
        return rows_SD.new_zeros(offsets_B.shape[0], rows_SD.shape[1]), keys_N, order_N
    weights_N = given.weights_N
    bags_BD = F.embedding_bag(at_N, rows_SD, offsets_B, mode="sum", per_sample_weights=weights_N)
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
    others = hot_HK, basis_KD, weights_N, offsets_B
    given = Lookup(indices_N, left_VPR, right_WRQ, *others, num_embeddings, grad_BD.shape[1])
    return LOOKUP_BACKWARD(given, Sorted(grad_BD, keys_N, order_N, with_weights))


class Sorted(NamedTuple):
    """The gradient of a lookup, and its entries sorted by key."""

    grad_BD: Tensor
    keys_N: Tensor
    order_N: Tensor
    with_weights: bool


_Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of both factors, hot rows, their basis and the weights; empty where there are none."""

LOOKUP_BACKWARD = Ways(
    "ttm_lookup_backward",
    "lookup",
    _case,
    lambda new: (_sample(new), Sorted(new(1024, 64), new(1024), new(1024), False)),
)


@LOOKUP_BACKWARD.way("kernel, a warp a row", lookup_kernel.warps_refuse, kernel="ttm_warps")
def _back_by_warps(given: Lookup, back: Sorted) -> _Grads:
    return _as_given(
        given, *lookup_kernel.row_grads_by_warps(given, back.grad_BD), None, None, None
    )


@LOOKUP_BACKWARD.way("kernel", lookup_kernel.refuses_backward, kernel="ttm_lookup")
def _back_by_kernel(given: Lookup, back: Sorted) -> _Grads:
    return _as_given(given, *lookup_kernel.grads_of(given, *back))


def _as_given(given: Lookup, left: Tensor, right: Tensor, *others: Tensor | None) -> _Grads:
    """Return the gradients that a kernel has made, the factors' in the layout of the factors."""
    hot, basis, weights = (
        empty_like(None, given.left_VPR) if grad is None else grad for grad in others
    )
    return lying_as(given.left_VPR, left), lying_as(given.right_WRQ, right), hot, basis, weights


@LOOKUP_BACKWARD.way(
    "sort what a kernel may have read, then by slots",
    # No kernel can have read the rows: torch's keys are sorted already.
    lambda given, back: lookup_kernel.refuses(given) and lookup_kernel.warps_refuse(given),
)
def _back_sorted(given: Lookup, back: Sorted) -> _Grads:
    keys_N, at_N = back.keys_N.sort(stable=True)  # torch has sorted them, if it has read the rows
    order_N = back.order_N.index_select(0, at_N)
    return _back_by_slots(given, back._replace(keys_N=keys_N, order_N=order_N))


@LOOKUP_BACKWARD.way("by slots")
def _back_by_slots(given: Lookup, back: Sorted) -> _Grads:
    _, left_VPR, right_WRQ, _, _, weights_N, offsets_B, *_ = given
    grad_BD, order_N = back.grad_BD.contiguous(), back.order_N
    slots = make_slots(back.keys_N, *given.sizes)
    from_N, grad_weights = order_N, empty_like(None, grad_BD)
    if offsets_B is not None:
        bag_N = bag_of_entries(offsets_B, order_N.shape[0])
        from_N = bag_N.index_select(0, order_N)
        if back.with_weights:
            rows_SD, at_N, is_sum = make_rows(slots, given), slots.of_entries(order_N), 0
            grad_weights = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                grad_BD, rows_SD, at_N, offsets_B, bag_N, is_sum
            )
    weights = None if weights_N is None else weights_N.index_select(0, order_N)
    per_slot = sum_by_sorted(grad_BD, from_N, slots.of_sorted_N, slots.count, weights)
    hot, cold = per_slot.tensor_split([slots.hot.shape[0]])
    (_, P, _), Q = left_VPR.shape, right_WRQ.shape[2]
    if cold.shape[1] < P * Q:
        cold = F.pad(cold, (0, P * Q - cold.shape[1]))
    cold = cold.reshape(slots.right_T.shape[0], slots.group * P, Q)
    left, right = factor_grads(slots, cold, given)
    return left, lying_as(right_WRQ, right), *hot_grads(hot, slots.hot, given), grad_weights


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
    given = [tensor for tensor in tensors if tensor is not None]
    ctx.save_for_backward(indices_N, *output[1:], *given)


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
    inputs: list[Any] = [None if x is None else x.view_as(x) for x in tensors]
    y_BD = every_row(Lookup._make([indices_N, *inputs, 0, grad_BD.shape[1]]))
    weights, offsets = inputs[4:]
    if offsets is not None:  # torch's own bags can be differentiated once
        rows_ND = y_BD if weights is None else y_BD * weights[:, None]
        bag_N = bag_of_entries(offsets, indices_N.shape[0])
        y_BD = rows_ND.new_zeros(grad_BD.shape).index_add(0, bag_N, rows_ND)
    leaves = [x if x is not None and x.requires_grad else None for x in inputs[:5]]
    wanted = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad(y_BD, wanted, grad_BD, create_graph=True))
    return [None if x is None else next(grads) for x in leaves]


lookup.register_autograd(_backward, setup_context=_setup_context)
