"""The kernels that read rows of a table from its two factors; ``kernels/ttm_lookup.cu``.

All sizes are fixed by the arguments, so that a CUDA graph can hold a lookup: rows are neither made
distinct nor counted. Bags are summed in pieces of equally many entries, by as many blocks, however
the entries are shared out among the bags. The backward pass sorts the entries and sums gradients of
equal rows before they meet a factor, which is what frequent rows need.
"""

import ctypes

import torch
from torch import Tensor

from comera.ops.kernels.choose import DTYPES, kernel_refuses
from comera.ops.kernels.launch import launch

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
    """Say why kernels read no rows of a table with these factors, or None.

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
    """Say why kernels do not sum the gradients, or None: also where their order must be fixed."""
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
    grads = _zeros_like(left_VPR, right_WRQ, hot_HD)
    launch(
        _FILE, f"ttm_back_rows_{DTYPES[left_VPR.dtype]}", keys_N.device, -(-entries // _CHUNK),
        _BACK_THREADS, _shared_of_grads(left_VPR, right_WRQ), table,
        keys_N, at_N, order_N,
        *map(_dense, (offsets_B, weights_N, grad_BD, left_VPR, right_WRQ)), *grads, entries, bags,
    )  # fmt: skip
    return grads


def _zeros_like(
    left_VPR: Tensor, right_WRQ: Tensor, hot_HD: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    sizes = [0 if like is None else like.numel() for like in (left_VPR, right_WRQ, hot_HD)]
    left, right, hot = left_VPR.new_zeros(sum(sizes), dtype=torch.float64).split(sizes)
    return (
        left.view(left_VPR.shape),
        right.view(right_WRQ.shape),
        None if hot_HD is None else hot.view(hot_HD.shape),
    )


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
