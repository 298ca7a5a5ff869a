"""The kernels that read rows of a table by the tensor cores, a warp a row.

``kernels/ttm_warps.cu`` has them. They take rows alone, in 16 bits. Gradients are summed in one
order: entries are sorted by their slices of either factor, and added up in pieces of equally many.
"""

import ctypes

import torch
from torch import Tensor

from comera.ops.kernels.choose import BAGS, DTYPES, WIDE, kernel_refuses, off_card
from comera.ops.kernels.launch import dense, launch

_FILE = "ttm_warps"

# As in ttm_warps.cu.
_WARPS, _PIECE, _TILE_M, _TILE_R = 4, 32, 16, 32
_SHARED = _WARPS * 4 * 2 * (16 * 18 + 16 * 36)
_MOST_RANK, _NARROW_RANK, _MULTIPLE = 128, 32, 8
_ROW_THREADS, _SUM_THREADS = 256, 256


class _Table(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("V", "W", "P", "Q", "R", "D")),
    )


def takes(dtype: torch.dtype) -> bool:
    """Say whether they read numbers of that dtype: the right factor had better lie turned then."""
    return dtype in DTYPES and dtype.itemsize == 2


def refuses(
    left_VPR: Tensor, right_WRQ: Tensor, embedding_dim: int, *others: Tensor | None
) -> str | None:
    """Say why no warp reads a row of such a table here, or None; arguments as of :func:`unfit`."""
    return (
        off_card(_FILE, left_VPR)
        or unfit(left_VPR, right_WRQ, embedding_dim, *others)
        or kernel_refuses(_FILE, left_VPR)
    )


def unfit(
    left_VPR: Tensor, right_WRQ: Tensor, embedding_dim: int, *others: Tensor | None
) -> str | None:
    """Say why no warp reads a row of such a table on any card, or None.

    Args:
        left_VPR: Left factor.
        right_WRQ: Right factor.
        embedding_dim: Width of a row.
        others: Hot rows, their basis, weights and offsets: with any of them other ways are taken.
    """
    if any(other is not None for other in others):
        return BAGS
    if not takes(left_VPR.dtype) or right_WRQ.dtype != left_VPR.dtype:
        return WIDE
    (V, _, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    if not 0 < R <= _MOST_RANK:
        return f"the bond between the factors is {R} wide, not 1 to {_MOST_RANK}"
    if any(size % _MULTIPLE for size in (Q, R, embedding_dim)):
        return f"sizes {Q}, {R} and {embedding_dim} are not all multiples of {_MULTIPLE}"
    if V * W >= 1 << 31:
        return f"{V * W:,} rows are more than 32 bits count"
    return None


def read(
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
        _FILE, f"ttm_warps_{'rows' if narrow else 'wide_rows'}_{DTYPES[out.dtype]}", out.device,
        -(-indices_N.shape[0] // (_ROW_THREADS // 32)), _ROW_THREADS, 0,
        _table(left_VPR, right_WRQ, num_embeddings, embedding_dim), indices_N,
        dense(left_VPR), dense(right_WRQ.mT), out, keys_N, order_N, out.shape[0],
    )  # fmt: skip
    return out, keys_N, order_N


def row_grads(
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
    table, kind = _table(left_VPR, right_WRQ, V * W, width), DTYPES[grad_ND.dtype]
    keys_2N = indices_N.new_empty(2, entries, dtype=torch.int32)
    launch(
        _FILE, "ttm_warps_keys", grad_ND.device, -(-entries // _ROW_THREADS), _ROW_THREADS, 0,
        table, indices_N, keys_2N, entries,
    )  # fmt: skip
    keys_2N, order_2N = keys_2N.sort(stable=True)
    sorted_4N = torch.cat([keys_2N, order_2N.int()])
    shares = -(-entries // _PIECE) * 2 * R * (P + Q)
    shares_S = grad_ND.new_empty(shares, dtype=torch.float32)
    left, right = dense(left_VPR), dense(right_WRQ.mT)
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    tiles = (-(-P // _TILE_M) + -(-Q // _TILE_M)) * -(-R // _TILE_R)
    launch(
        _FILE, f"ttm_warps_back_shares_{kind}", grad_ND.device,
        (-(-entries // (_WARPS * _PIECE)), tiles), 32 * _WARPS, _SHARED, table, sorted_4N,
        dense(grad_ND), left, right, grad_left, grad_right, shares_S, entries,
    )  # fmt: skip
    launch(
        _FILE, f"ttm_warps_back_sums_{kind}", grad_ND.device, V + W, _SUM_THREADS, 8, table,
        sorted_4N, left, right, grad_left, grad_right, shares_S, entries,
    )  # fmt: skip
    return grad_left, grad_right.mT


def _table(left_VPR: Tensor, right_WRQ: Tensor, num_embeddings: int, width: int) -> _Table:
    (V, P, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    return _Table(num_embeddings, V, W, P, Q, R, width)
