"""The kernels that read rows of a table from its two factors, and sum the factors' gradients.

``kernels/ttm_lookup.cu`` takes rows and bags, hot rows and weights, a block of threads for each
row. All sizes are fixed by the arguments, so that a CUDA graph can hold a lookup: rows are neither
made distinct nor counted. Bags are summed in pieces of equally many entries, by as many blocks,
however the entries are shared out among the bags. The backward pass sorts the entries and sums
gradients of equal rows before they meet a factor, which is what frequent rows need.

``kernels/ttm_warps.cu`` takes rows alone, in 16 bits, and multiplies by the tensor cores, a warp a
row. Gradients are summed in one order: entries are sorted by their slices of either factor, and
added up in pieces of equally many.
"""

import ctypes

import torch
from torch import Tensor

from comera.ops.kernels.choose import BAGS, DTYPES, WIDE, kernel_refuses, off_card
from comera.ops.kernels.launch import dense, launch

_FILE = "ttm_lookup"

# As in ttm_lookup.cu.
_DEPTH, _PIECE, _CHUNK = 32, 32, 16
_MOST_THREADS, _BACK_THREADS = 256, 128

_MOST_SHARED = 96 * 1024
"""Bytes of shared memory a block may have on every card that kernels run on."""


class _Table(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_hot", "V", "W", "P", "Q", "R", "D")),
    )


def refuses(left_VPR: Tensor, right_WRQ: Tensor, *others: Tensor | None) -> str | None:
    """Return why kernels read no rows of a table with these factors, or None.

    Args:
        left_VPR: Left factor.
        right_WRQ: Right factor.
        others: What is read along: hot rows, their basis, weights.
    """
    return kernel_refuses(_FILE, left_VPR) or _unfit(left_VPR, right_WRQ, *others)


def _unfit(left_VPR: Tensor, right_WRQ: Tensor, *others: Tensor | None) -> str | None:
    if left_VPR.dtype == torch.float16:
        return "kernels of lookups take float32 and bfloat16, not float16"
    tensors = (right_WRQ, *(other for other in others if other is not None))
    if any(t.dtype != left_VPR.dtype or t.device != left_VPR.device for t in tensors):
        return "factors, hot rows and weights are of several dtypes or devices"
    needed = max(_shared_of_rows(left_VPR, right_WRQ), _shared_of_grads(left_VPR, right_WRQ))
    if needed > _MOST_SHARED:
        shown = f"{tuple(left_VPR.shape)} and {tuple(right_WRQ.shape)}"
        return f"factors of {shown} need {needed} bytes of shared memory, over {_MOST_SHARED}"
    return None


def refuses_backward(left_VPR: Tensor, right_WRQ: Tensor, *others: Tensor | None) -> str | None:
    """Return why kernels do not sum the gradients, such as in a fixed order; or None."""
    reason = refuses(left_VPR, right_WRQ, *others)
    if reason is None and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and gradients would be added in no order"
    return reason


def read(
    indices_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HD: Tensor | None,
    weights_N: Tensor | None,
    offsets_B: Tensor | None,
    num_embeddings: int,
    embedding_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read as :func:`~comera.ops.table.lookup.lookup`, by int64 indices; keys are not sorted."""
    entries = indices_N.shape[0]
    bags = entries if offsets_B is None else offsets_B.shape[0]
    out = left_VPR.new_empty(bags, embedding_dim)
    keys_N, order_N = torch.empty_like(indices_N), torch.empty_like(indices_N)
    kind, threads = DTYPES[out.dtype], _threads(left_VPR, right_WRQ)
    shared = _shared_of_rows(left_VPR, right_WRQ)
    table = _table(left_VPR, right_WRQ, hot_HD, num_embeddings, embedding_dim)
    given = (indices_N, *map(_dense, (offsets_B, weights_N, left_VPR, right_WRQ, hot_HD)))
    partial: Tensor | None = None
    pieces = (entries - 1) // _PIECE
    if offsets_B is not None and bags and pieces > 0:
        partial = torch.empty(pieces, embedding_dim, device=out.device)
        launch(
            _FILE, f"ttm_pieces_{kind}", out.device, pieces, threads, shared, table, *given,
            partial, entries, bags,
        )  # fmt: skip
    launch(
        _FILE, f"ttm_rows_{kind}", out.device, bags, threads, shared, table, *given, partial, out,
        keys_N, order_N, entries, bags,
    )  # fmt: skip
    return out, keys_N, order_N


def weight_grads(
    grad_BD: Tensor,
    indices_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HD: Tensor | None,
    offsets_B: Tensor,
    num_embeddings: int,
) -> Tensor:
    """Return ``(N,)``: the dot product of every entry's row and the gradient of its bag."""
    bags, width = grad_BD.shape
    out = grad_BD.new_empty(indices_N.shape[0])
    launch(
        _FILE, f"ttm_back_weights_{DTYPES[out.dtype]}", out.device, out.shape[0],
        _threads(left_VPR, right_WRQ), _shared_of_rows(left_VPR, right_WRQ),
        _table(left_VPR, right_WRQ, hot_HD, num_embeddings, width),
        indices_N, *map(_dense, (offsets_B, grad_BD, left_VPR, right_WRQ, hot_HD)), out, bags,
    )  # fmt: skip
    return out


def row_grads(
    grad_BD: Tensor,
    keys_N: Tensor,
    order_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    hot_HD: Tensor | None,
    weights_N: Tensor | None,
    offsets_B: Tensor | None,
    num_embeddings: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients of left factor, right factor and hot rows, from keys and their entries.

    In float64, in which they were summed, and parts of one tensor.
    """
    bags, width = grad_BD.shape
    entries = keys_N.shape[0] if bags else 0
    table = _table(left_VPR, right_WRQ, hot_HD, num_embeddings, width)
    keys_N, at_N = keys_N.sort()
    parts = [part for part in (left_VPR, right_WRQ, hot_HD) if part is not None]
    sizes = [part.numel() for part in parts]
    zeros = left_VPR.new_zeros(sum(sizes), dtype=torch.float64).split(sizes)
    left, right, *hot = (zero.view(like.shape) for zero, like in zip(zeros, parts, strict=True))
    grads = left, right, hot[0] if hot else None
    launch(
        _FILE, f"ttm_back_rows_{DTYPES[left_VPR.dtype]}", keys_N.device, -(-entries // _CHUNK),
        _BACK_THREADS, _shared_of_grads(left_VPR, right_WRQ), table,
        keys_N, at_N, order_N,
        *map(_dense, (offsets_B, weights_N, grad_BD, left_VPR, right_WRQ)), *grads, entries, bags,
    )  # fmt: skip
    return grads


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _table(
    left_VPR: Tensor, right_WRQ: Tensor, hot_HD: Tensor | None, num_embeddings: int, width: int
) -> _Table:
    (V, P, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    return _Table(num_embeddings, 0 if hot_HD is None else hot_HD.shape[0], V, W, P, Q, R, width)


def _threads(left_VPR: Tensor, right_WRQ: Tensor) -> int:
    """Count threads: one for each tile of four by four numbers of a row, in whole warps."""
    tiles = -(-left_VPR.shape[1] // 4) * -(-right_WRQ.shape[2] // 4)
    return min(_MOST_THREADS, max(32, -(-tiles // 32) * 32))


def _shared_of_rows(left_VPR: Tensor, right_WRQ: Tensor) -> int:
    return 4 * _DEPTH * (_stride(left_VPR.shape[1]) + _stride(right_WRQ.shape[2]))


def _shared_of_grads(left_VPR: Tensor, right_WRQ: Tensor) -> int:
    _, P, R = left_VPR.shape
    Q = right_WRQ.shape[2]
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
    """Return whether warps read numbers of that dtype: the right factor lies turned for them."""
    return dtype in DTYPES and dtype.itemsize == 2


def warps_refuse(
    left_VPR: Tensor, right_WRQ: Tensor, embedding_dim: int, *others: Tensor | None
) -> str | None:
    """Return why no warp reads a row of such a table here, or None; see :func:`warps_unfit`."""
    return (
        off_card(_WARPS_FILE, left_VPR)
        or warps_unfit(left_VPR, right_WRQ, embedding_dim, *others)
        or kernel_refuses(_WARPS_FILE, left_VPR)
    )


def warps_unfit(
    left_VPR: Tensor, right_WRQ: Tensor, embedding_dim: int, *others: Tensor | None
) -> str | None:
    """Return why no warp reads a row of such a table on any card, or None.

    Args:
        left_VPR: Left factor.
        right_WRQ: Right factor.
        embedding_dim: Width of a row.
        others: Hot rows, their basis, weights and offsets: with any of them other ways are taken.
    """
    if any(other is not None for other in others):
        return BAGS
    if not warps_take(left_VPR.dtype) or right_WRQ.dtype != left_VPR.dtype:
        return WIDE
    (V, _, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    if not 0 < R <= _MOST_RANK:
        return f"the bond between the factors is {R} wide, not 1 to {_MOST_RANK}"
    if any(size % _MULTIPLE for size in (Q, R, embedding_dim)):
        return f"sizes {Q}, {R} and {embedding_dim} are not all multiples of {_MULTIPLE}"
    if V * W >= 1 << 31:
        return f"{V * W:,} rows are more than 32 bits count"
    return None


def read_by_warps(
    indices_N: Tensor,
    left_VPR: Tensor,
    right_WRQ: Tensor,
    num_embeddings: int,
    embedding_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read rows by int64 indices; return them, and keys and entries, which are not sorted."""
    out = left_VPR.new_empty(indices_N.shape[0], embedding_dim)
    keys_N, order_N = torch.empty_like(indices_N), torch.empty_like(indices_N)
    narrow = left_VPR.shape[2] <= _NARROW_RANK
    launch(
        _WARPS_FILE, f"ttm_warps_{'rows' if narrow else 'wide_rows'}_{DTYPES[out.dtype]}",
        out.device, -(-indices_N.shape[0] // (_ROW_THREADS // 32)), _ROW_THREADS, 0,
        _warp_table(left_VPR, right_WRQ, num_embeddings, embedding_dim), indices_N,
        dense(left_VPR), dense(right_WRQ.mT), out, keys_N, order_N, out.shape[0],
    )  # fmt: skip
    return out, keys_N, order_N


def row_grads_by_warps(
    grad_ND: Tensor, indices_N: Tensor, left_VPR: Tensor, right_WRQ: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the left and of the right factor, which lies turned.

    Args:
        grad_ND: Of the rows, in the dtype of the factors.
        indices_N: The rows, int64.
        left_VPR: Left factor.
        right_WRQ: Right factor.
    """
    entries, width = grad_ND.shape
    (V, P, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    table, kind = _warp_table(left_VPR, right_WRQ, V * W, width), DTYPES[grad_ND.dtype]
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


def _warp_table(left_VPR: Tensor, right_WRQ: Tensor, num_embeddings: int, width: int) -> _WarpTable:
    (V, P, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    return _WarpTable(num_embeddings, V, W, P, Q, R, width)
