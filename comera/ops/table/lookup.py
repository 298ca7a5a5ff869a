"""Define the operator that reads rows of a table, or sums of rows over bags, from two factors.

Every distinct row is computed once, however often it is read (CoMERA, arXiv 2405.14377, section
4.2). Shape suffixes are those of :mod:`~comera.ops.table.distinct_rows`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import shapes_are_static
from comera.ops.dispatch import Case, Way, Ways
from comera.ops.kernels import choose, lookup_kernel
from comera.ops.operator import gradients_again, is_batched, is_recorded, operator
from comera.ops.table.distinct_rows import (
    Lookup,
    Sorted,
    bag_of_entries,
    check_range,
    every_row,
    factor_grads,
    hot_grads,
    lying_as,
    make_rows,
    make_slots,
    sorted_rows,
    sum_by_sorted,
)


def _case(given: Lookup, *_: Any) -> Case:
    kinds = list[str]()
    if lookup_kernel.warps_unfit(given) is not None:
        kinds.append("a block a row")
        kinds += ["hot rows"] if given.hot_HK is not None else []
        kinds += ["bags"] if given.offsets_B is not None else []
    return given.left_VPR, given.left_VPR.dtype, (given.indices_N.shape[0], *kinds)


def _refuses_distinct_rows(given: Lookup) -> str | None:
    """Return why distinct rows, whose number varies, cannot be read at static shapes; or None."""
    if not shapes_are_static(given.indices_N) or lookup_kernel.warps_refuse(given) is None:
        return None
    return lookup_kernel.refuses_backward(given)


def _refuses_slots(given: Lookup, *_: Any) -> str | None:
    """Return why slots cannot be used in a graph: their number is that of distinct rows."""
    if _refuses_distinct_rows(given) is None and shapes_are_static(given.indices_N):
        return "the number of distinct rows is not known in a CUDA graph"
    return None


def _rows_or_sums(given: Lookup) -> Tensor:
    """Compute the lookup by operations that torch differentiates, batches and traces any way."""
    rows_ND = every_row(given)
    if given.offsets_B is None:
        return rows_ND
    if given.weights_N is not None:
        rows_ND = rows_ND * given.weights_N[:, None]
    bag_N = bag_of_entries(given.offsets_B, rows_ND.shape[0])
    sums_BD = rows_ND.new_zeros(given.offsets_B.shape[0], rows_ND.shape[1])
    return sums_BD.index_add(0, bag_N, rows_ND)


def _each_by_itself(given: Lookup, checked: bool) -> Tensor:
    if is_recorded():
        indices_N, (hot, left, right) = given.indices_N, given.sizes
        outside = (indices_N < 0) | (indices_N >= given.num_embeddings)
        refused_N = torch.where(outside, hot + left * right, indices_N)  # by index_select
        return _rows_or_sums(given._replace(indices_N=refused_N))
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
    """Read rows, or sums of rows over bags; all but ``checked`` is a :class:`Lookup`.

    Returns the rows or sums ``(B, D)`` and, for the backward pass, the key of every entry and the
    entry's number, ``(N,)`` each, sorted by key unless a kernel has read the rows. Raises
    ``IndexError`` if an index is out of range, on a CPU, unless it was ``checked`` before.
    """
    if not checked:
        check_range(indices_N, num_embeddings)
    tensors = indices_N, left_VPR, right_WRQ, hot_HK, basis_KD, weights_N, offsets_B
    return LOOKUP(Lookup(*tensors, num_embeddings, embedding_dim))


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
def _(*arguments):
    given = Lookup(*arguments[:-1])
    bags_or_rows = given.indices_N if given.offsets_B is None else given.offsets_B
    rows = given.left_VPR.new_empty(bags_or_rows.shape[0], given.embedding_dim)
    return rows, *(torch.empty_like(given.indices_N, dtype=torch.int64) for _ in range(2))


@operator("comera::ttm_lookup_backward")
def lookup_backward(
    grad_BD: Tensor,
    keys_N: Tensor,
    order_N: Tensor,
    with_weights: bool,
    indices_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HK: Tensor | None,
    basis_KD: Tensor | None,
    weights_N: Tensor | None,
    offsets_B: Tensor | None,
    num_embeddings: int,
    embedding_dim: int,
) -> list[Tensor]:
    """Return the gradients of both factors, then those of hot rows, basis and weights if given."""
    tensors = indices_N, left_VPR, right_WRQ, hot_HK, basis_KD, weights_N, offsets_B
    given = Lookup(*tensors, num_embeddings, embedding_dim)
    left, right, *others = LOOKUP_BACKWARD(given, Sorted(grad_BD, keys_N, order_N, with_weights))
    factors = lying_as(given.left_VPR, left), lying_as(given.right_WRQ, right)
    return [*factors, *(grad for grad in others if grad is not None)]


@lookup_backward.register_fake
def _(grad_BD, keys_N, order_N, with_weights, *arguments):
    wanted = *arguments[1:5], arguments[5] if with_weights else None
    return [torch.empty_like(tensor) for tensor in wanted if tensor is not None]


def _back_sorted(given: Lookup, back: Sorted) -> tuple[Tensor | None, ...]:
    keys_N, at_N = back.keys_N.sort(stable=True)  # torch has sorted them, if it has read the rows
    order_N = back.order_N.index_select(0, at_N)
    return _back_by_slots(given, back._replace(keys_N=keys_N, order_N=order_N))


def _back_by_slots(given: Lookup, back: Sorted) -> tuple[Tensor | None, ...]:
    _, left_VPR, right_WRQ, _, _, weights_N, offsets_B, *_ = given
    grad_BD, order_N = back.grad_BD.contiguous(), back.order_N
    slots = make_slots(back.keys_N, *given.sizes)
    from_N, grad_weights = order_N, None
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
    factors = factor_grads(slots, cold, given)
    return *factors, *hot_grads(hot, slots.hot, given), grad_weights


def _setup_context(ctx, inputs, output) -> None:
    ctx.sizes = inputs[7:9]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], *output[1:])


def _backward(ctx, grad_BD: Tensor | None, *_):
    *tensors, keys_N, order_N = ctx.saved_tensors
    grads = list[Tensor | None]([None] * 10)
    if grad_BD is None:
        return tuple(grads)
    given = Lookup._make([*tensors, *ctx.sizes])
    if torch.is_grad_enabled() or is_batched(grad_BD):  # it is itself differentiated

        def plainly(*tensors: Tensor | None) -> Tensor:
            return _rows_or_sums(Lookup._make([given.indices_N, *tensors, *given[6:]]))

        grads[1:6] = gradients_again(plainly, given[1:6], grad_BD)
    else:
        with_weights = ctx.needs_input_grad[5]
        found = iter(lookup_backward(grad_BD, keys_N, order_N, with_weights, *given))
        wanted = *(tensor is not None for tensor in given[1:5]), with_weights
        grads[1:6] = [next(found) if is_wanted else None for is_wanted in wanted]
    return tuple(grads)


lookup.register_autograd(_backward, setup_context=_setup_context)


def _sample(new: Callable[..., Any]) -> Lookup:
    factors = new(320, 8, 32), new(100, 32, 8)
    return Lookup(new(1024), *factors, None, None, None, None, 32_000, 64)


ROWS = Ways(
    "rows_of_a_table", "lookup",
    lambda given, _: _case(given) if shapes_are_static(given.indices_N) else None,
    lambda new: (_sample(new), True),
    Way("lookup", lambda given, checked: lookup(*given, checked)[0],
        lambda given, _: choose.RECORDED if is_recorded() else _refuses_distinct_rows(given),
        "ttm_lookup"),
    Way("every row for itself", _each_by_itself),
)  # fmt: skip
"""Read rows, or sums of rows over bags; takes a :class:`Lookup`, and whether it was checked."""

LOOKUP = Ways(
    "ttm_lookup", "lookup", _case, lambda new: (_sample(new),),
    Way("kernel, a warp a row", lookup_kernel.read_by_warps, lookup_kernel.warps_refuse,
        "ttm_warps"),
    Way("kernel", lookup_kernel.read, lookup_kernel.refuses, "ttm_lookup"),
    Way("distinct rows", _by_slots, _refuses_slots),
)  # fmt: skip

LOOKUP_BACKWARD = Ways(
    "ttm_lookup_backward", "lookup", _case,
    lambda new: (_sample(new), Sorted(new(1024, 64), new(1024), new(1024), False)),
    Way("kernel, a warp a row", lookup_kernel.grads_by_warps, lookup_kernel.warps_refuse,
        "ttm_warps"),
    Way("kernel", lookup_kernel.grads_of, lookup_kernel.refuses_backward, "ttm_lookup"),
    # Where no kernel can have read the rows, the keys are sorted already.
    Way("sort what a kernel may have read, then by slots", _back_sorted,
        lambda given, back: (lookup_kernel.refuses(given) and lookup_kernel.warps_refuse(given))
        or _refuses_slots(given)),
    Way("by slots", _back_by_slots, _refuses_slots),
)  # fmt: skip
