"""Launch the kernels that read rows of a table from its factors, and sum the gradients.

``kernels/ttm_lookup.cu`` reads rows and bags, with hot rows and weights: a thread block computes
each row. ``kernels/ttm_warps.cu`` reads only rows in 16 bits: a warp computes each row on the
tensor cores. All sizes follow from the arguments' shapes, so that a CUDA graph can hold a lookup.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.ops.kernels.choose import BAGS, DTYPES, WIDE, kernel_refuses, off_card
from comera.ops.kernels.launch import MOST_SHARED, dense, launch
from comera.ops.table.distinct_rows import Lookup, Sorted

_FILE = "ttm_lookup"

# As in ttm_lookup.cu.
_DEPTH, _PIECE, _CHUNK = 32, 32, 16
_MOST_THREADS, _BACK_THREADS = 256, 128


class _Table(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_hot", "V", "W", "P", "Q", "R", "D")),
    )


def refuses(given: Lookup, *_: object) -> str | None:
    """Return why ``ttm_lookup.cu`` cannot read these rows, or None."""
    left_VPR, right_WRQ, *others = given[1:6]
    reason = kernel_refuses(_FILE, left_VPR)
    if reason is not None:
        return reason
    if left_VPR.dtype == torch.float16:
        return "kernels of lookups take float32 and bfloat16, not float16"
    tensors = (right_WRQ, *(other for other in others if other is not None))
    if any(t.dtype != left_VPR.dtype or t.device != left_VPR.device for t in tensors):
        return "factors, hot rows and weights are of several dtypes or devices"
    needed = max(_shared_of_rows(given), _shared_of_grads(given))
    if needed > MOST_SHARED:
        shown = f"{tuple(left_VPR.shape)} and {tuple(right_WRQ.shape)}"
        return f"factors of {shown} need {needed} bytes of shared memory, over {MOST_SHARED}"
    return None


def refuses_backward(given: Lookup, *_: object) -> str | None:
    """Return why ``ttm_lookup.cu`` cannot sum gradients, such as deterministically; or None."""
    reason = refuses(given)
    if reason is None and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and gradients would be added in no order"
    return reason


def read(given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`~comera.ops.table.lookup.lookup` by the kernel, without sorting the keys."""
    given = _laid_out(given)
    indices_N, left_VPR, right_WRQ, hot_HD, _, weights_N, offsets_B, *_ = given
    entries = indices_N.shape[0]
    bags = entries if offsets_B is None else offsets_B.shape[0]
    out = left_VPR.new_empty(bags, given.embedding_dim)
    keys_N, order_N = torch.empty_like(indices_N), torch.empty_like(indices_N)
    kind, threads, shared = DTYPES[out.dtype], _threads(given), _shared_of_rows(given)
    table, tensors = _table(given), (indices_N, offsets_B, weights_N, left_VPR, right_WRQ, hot_HD)
    partial: Tensor | None = None
    pieces = (entries - 1) // _PIECE
    if offsets_B is not None and bags and pieces > 0:
        partial = out.new_empty(pieces, given.embedding_dim, dtype=torch.float32)
        launch(
            _FILE, f"ttm_pieces_{kind}", out.device, pieces, threads, shared, table, *tensors,
            partial, entries, bags,
        )  # fmt: skip
    launch(
        _FILE, f"ttm_rows_{kind}", out.device, bags, threads, shared, table, *tensors, partial, out,
        keys_N, order_N, entries, bags,
    )  # fmt: skip
    return out, keys_N, order_N


def grads_of(
    given: Lookup, back: Sorted
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of both factors, hot rows, their basis and the weights of entries.

    Gradients of factors are float64 and share the memory of one tensor. The gradient of a weight is
    the dot product of its row and the gradient of its bag.
    """
    hot_HK, basis_KD = given.hot_HK, given.basis_KD
    given = _laid_out(given)
    indices_N, left_VPR, right_WRQ, hot_HD, _, weights_N, offsets_B, *_ = given
    grad_BD, order_N = back.grad_BD.to(left_VPR.dtype).contiguous(), back.order_N
    bags, kind, table = grad_BD.shape[0], DTYPES[left_VPR.dtype], _table(given)
    entries = order_N.shape[0] if bags else 0
    keys_N, at_N = back.keys_N.sort()
    parts = [part for part in (left_VPR, right_WRQ, hot_HD) if part is not None]
    sizes = [part.numel() for part in parts]
    zeros = left_VPR.new_zeros(sum(sizes), dtype=torch.float64).split(sizes)
    left, right, *rest = (zero.view(like.shape) for zero, like in zip(zeros, parts, strict=True))
    hot = rest[0] if rest else None
    basis = to_weights = None
    launch(
        _FILE, f"ttm_back_rows_{kind}", keys_N.device, -(-entries // _CHUNK), _BACK_THREADS,
        _shared_of_grads(given), table, keys_N, at_N, order_N, offsets_B, weights_N, grad_BD,
        left_VPR, right_WRQ, left, right, hot, entries, bags,
    )  # fmt: skip
    if hot is not None and hot_HK is not None:
        hot = hot.to(grad_BD.dtype)
        if basis_KD is not None:
            with without_autocast(hot):
                hot, basis = hot @ basis_KD.T, hot_HK.T @ hot
    if back.with_weights and offsets_B is not None:
        to_weights = grad_BD.new_empty(indices_N.shape[0])
        launch(
            _FILE, f"ttm_back_weights_{kind}", grad_BD.device, to_weights.shape[0],
            _threads(given), _shared_of_rows(given), table, indices_N, offsets_B, grad_BD, left_VPR,
            right_WRQ, hot_HD, to_weights, bags,
        )  # fmt: skip
    return left, right, hot, basis, to_weights


def _laid_out(given: Lookup) -> Lookup:
    """Return the lookup with int64 indices, dense hot rows and contiguous tensors, for kernels."""
    indices_N, left_VPR, right_WRQ, hot, basis, weights_N, offsets_B, *sizes = given
    if hot is not None and basis is not None:
        with without_autocast(hot):
            hot = hot @ basis
    tensors = (indices_N.long(), left_VPR, right_WRQ, hot, None, weights_N, offsets_B)
    dense_ones: list[Any] = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    return Lookup(*dense_ones, *sizes)


def _table(given: Lookup) -> _Table:
    (_, P, R), Q, (num_hot, V, W) = given.left_VPR.shape, given.right_WRQ.shape[2], given.sizes
    return _Table(given.num_embeddings, num_hot, V, W, P, Q, R, given.embedding_dim)


def _threads(given: Lookup) -> int:
    """Count the threads for a row: one for each 4 x 4 tile of its numbers, in whole warps."""
    tiles = -(-given.left_VPR.shape[1] // 4) * -(-given.right_WRQ.shape[2] // 4)
    return min(_MOST_THREADS, max(32, -(-tiles // 32) * 32))


def _shared_of_rows(given: Lookup) -> int:
    return 4 * _DEPTH * (_stride(given.left_VPR.shape[1]) + _stride(given.right_WRQ.shape[2]))


def _shared_of_grads(given: Lookup) -> int:
    (_, P, R), Q = given.left_VPR.shape, given.right_WRQ.shape[2]
    wide_P, wide_R = -(-P // 4) * 4, -(-R // 4) * 4
    numbers = wide_P * (_stride(Q) + _stride(R)) + 2 * wide_R * _stride(Q)
    return 4 * (numbers + 2 * _CHUNK)


def _stride(numbers: int) -> int:
    fours = -(-numbers // 4)
    return 4 * (fours + (fours % 2 == 0))


_WARPS_FILE = "ttm_warps"

# As in ttm_warps.cu.
_WARPS, _WARP_PIECE, _TILE_M, _TILE_R = 4, 32, 16, 32
_WARPS_SHARED = _WARPS * 4 * 2 * (16 * 18 + 16 * 36)
_MOST_RANK, _NARROW_RANK, _MULTIPLE = 128, 32, 8
_ROW_THREADS, _SUM_THREADS = 256, 256


class _WarpTable(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("V", "W", "P", "Q", "R", "D")),
    )


def warps_take(dtype: torch.dtype) -> bool:
    """Return whether ``ttm_warps.cu`` reads a dtype; it reads right factors stored transposed."""
    return dtype in DTYPES and dtype.itemsize == 2


def warps_refuse(given: Lookup, *_: object) -> str | None:
    """Return why ``ttm_warps.cu`` cannot read these rows on this machine, or None."""
    like = given.left_VPR
    return off_card(_WARPS_FILE, like) or warps_unfit(given) or kernel_refuses(_WARPS_FILE, like)


def warps_unfit(given: Lookup) -> str | None:
    """Return why ``ttm_warps.cu`` cannot read these rows on any card, or None."""
    _, left_VPR, right_WRQ, *others, _, embedding_dim = given
    if any(other is not None for other in others):
        return BAGS
    if not warps_take(left_VPR.dtype) or right_WRQ.dtype != left_VPR.dtype:
        return WIDE
    (V, _, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    if not 0 < R <= _MOST_RANK:
        return f"the bond between the factors is {R} wide, not 1 to {_MOST_RANK}"
    if any(size % _MULTIPLE for size in (Q, R, embedding_dim)):
        return f"sizes {Q}, {R} and {embedding_dim} are not all multiples of {_MULTIPLE}"
    return f"{V * W:,} rows are more than 32 bits count" if V * W >= 1 << 31 else None


def read_by_warps(given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows by ``ttm_warps.cu``, and their unsorted keys and entries, for backward."""
    indices_N, left_VPR = given.indices_N.long().contiguous(), given.left_VPR
    out = left_VPR.new_empty(indices_N.shape[0], given.embedding_dim)
    keys_N, order_N = torch.empty_like(indices_N), torch.empty_like(indices_N)
    kind = "rows" if left_VPR.shape[2] <= _NARROW_RANK else "wide_rows"
    launch(
        _WARPS_FILE, f"ttm_warps_{kind}_{DTYPES[out.dtype]}", out.device,
        -(-indices_N.shape[0] // (_ROW_THREADS // 32)), _ROW_THREADS, 0,
        _warp_table(given, given.num_embeddings), indices_N, dense(left_VPR),
        dense(given.right_WRQ.mT), out, keys_N, order_N, out.shape[0],
    )  # fmt: skip
    return out, keys_N, order_N


def grads_by_warps(given: Lookup, back: Sorted) -> tuple[Tensor, Tensor]:
    """Return the gradients of both factors by ``ttm_warps.cu``, the right one transposed."""
    left_VPR, right_WRQ = given.left_VPR, given.right_WRQ
    indices_N, grad_ND = given.indices_N.long().contiguous(), back.grad_BD.to(left_VPR.dtype)
    entries, (V, P, R), (W, _, Q) = grad_ND.shape[0], left_VPR.shape, right_WRQ.shape
    table, kind = _warp_table(given, V * W), DTYPES[grad_ND.dtype]
    keys_2N = indices_N.new_empty(2, entries, dtype=torch.int32)
    launch(
        _WARPS_FILE, "ttm_warps_keys", grad_ND.device, -(-entries // _ROW_THREADS), _ROW_THREADS, 0,
        table, indices_N, keys_2N, entries,
    )  # fmt: skip
    keys_2N, order_2N = keys_2N.sort(stable=True)
    sorted_4N = torch.cat([keys_2N, order_2N.int()])
    shares = -(-entries // _WARP_PIECE) * 2 * R * (P + Q)
    shares_S = grad_ND.new_empty(shares, dtype=torch.float32)
    left, right = dense(left_VPR), dense(right_WRQ.mT)
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    tiles = (-(-P // _TILE_M) + -(-Q // _TILE_M)) * -(-R // _TILE_R)
    launch(
        _WARPS_FILE, f"ttm_warps_back_shares_{kind}", grad_ND.device,
        (-(-entries // (_WARPS * _WARP_PIECE)), tiles), 32 * _WARPS, _WARPS_SHARED, table,
        sorted_4N, dense(grad_ND), left, right, grad_left, grad_right, shares_S, entries,
    )  # fmt: skip
    launch(
        _WARPS_FILE, f"ttm_warps_back_sums_{kind}", grad_ND.device, V + W, _SUM_THREADS, 8, table,
        sorted_4N, left, right, grad_left, grad_right, shares_S, entries,
    )  # fmt: skip
    return grad_left, grad_right.mT


def _warp_table(given: Lookup, rows: int) -> _WarpTable:
    (_, P, R), Q, (_, V, W) = given.left_VPR.shape, given.right_WRQ.shape[2], given.sizes
    return _WarpTable(rows, V, W, P, Q, R, given.embedding_dim)
