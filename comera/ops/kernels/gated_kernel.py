"""The kernels of a gated feed-forward whose hidden activations are never stored.

``kernels/feed_forward_gated.cuh`` has them: what is of the hidden width, between thin products of
torch's. One launch forward and three backward, of the dtypes and bonds of a feed-forward's.
"""

import ctypes
import functools

import torch
from torch import Tensor

from comera.ops.kernels.choose import kernel_refuses
from comera.ops.kernels.feed_forward_kernel import (
    BOND,
    ENDINGS,
    HIDDEN_BLOCK,
    HIDDEN_THREADS,
    STAGES,
    THREADS,
    block_rows,
    parts_of,
    refuses_dtypes,
    refuses_sizes,
    stage_bytes,
    stage_columns,
    tile_bytes,
)
from comera.ops.kernels.launch import dense, launch


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("M", "H", "rankg", "ranku", "rank2"))


def refuses(t_gate: Tensor, t_up: Tensor, gate: Tensor, up: Tensor, left2: Tensor) -> str | None:
    """Say why no kernel computes a gated feed-forward of these, or None."""
    ranks = t_gate.shape[1], t_up.shape[1], left2.shape[1]
    reason = refuses_dtypes(t_gate, t_up, gate, up, left2)
    reason = reason or refuses_sizes(ranks, left2.shape[:1], t_gate, BOND)
    return reason or kernel_refuses(file_for(t_gate), t_gate)


def file_for(like: Tensor) -> str:
    """Name the source of the kernels for a dtype, without its suffix."""
    return f"feed_forward_gated{ENDINGS[like.dtype]}"


def forward(t_gate: Tensor, t_up: Tensor, gate: Tensor, up: Tensor, left2: Tensor) -> Tensor:
    """Return ``(silu(t_gate @ gate) * (t_up @ up)) @ left2``."""
    rows, high, file = t_gate.shape[0], _block_rows(t_gate), file_for(t_gate)
    t2 = t_gate.new_empty(rows, left2.shape[1])
    given = [dense(t) for t in (t_gate, t_up, gate, up, left2)]
    launch(
        file, f"{file}_{high}", t_gate.device, -(-rows // high), THREADS,
        _shared(high, t_gate.itemsize), _sizes(t_gate, t_up, left2), *given, t2,
    )  # fmt: skip
    return t2


def backward(
    t_gate: Tensor, t_up: Tensor, gate: Tensor, up: Tensor, left2: Tensor, grad_t2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of the arguments of :func:`forward`, in their order."""
    rows, high, file = t_gate.shape[0], _block_rows(t_gate), file_for(t_gate)
    sizes = _sizes(t_gate, t_up, left2)
    t_gate, t_up, gate, up, left2, u2 = (dense(t) for t in (t_gate, t_up, gate, up, left2, grad_t2))
    u_gate, u_up = torch.empty_like(t_gate), torch.empty_like(t_up)
    launch(
        file, f"{file}_back_rows_{high}", t_gate.device, -(-rows // high), THREADS,
        _shared(high, t_gate.itemsize), sizes, t_gate, t_up, u2, gate, up, left2, u_gate, u_up,
    )  # fmt: skip
    blocks = sizes.H // HIDDEN_BLOCK
    parts = parts_of(blocks, rows)
    shares = t_gate.new_empty(parts, 3, sizes.H, BOND, dtype=torch.float32)
    launch(
        file, f"{file}_back_hidden", t_gate.device, (blocks, parts), HIDDEN_THREADS,
        _hidden_shared(t_gate.itemsize), sizes, t_gate, t_up, u2, gate, up, left2, shares,
    )  # fmt: skip
    grad_left2, grad_gate, grad_up = map(torch.empty_like, (left2, gate, up))
    launch(
        file, f"{file}_back_sums", t_gate.device, -(-3 * sizes.H * BOND // THREADS), THREADS, 0,
        sizes, shares, grad_left2, grad_gate, grad_up, parts,
    )  # fmt: skip
    return u_gate, u_up, grad_gate, grad_up, grad_left2


def _sizes(t_gate: Tensor, t_up: Tensor, left2: Tensor) -> _Sizes:
    return _Sizes(t_gate.shape[0], left2.shape[0], t_gate.shape[1], t_up.shape[1], left2.shape[1])


def _block_rows(like: Tensor) -> int:
    """Say how many rows a block has; three tiles of 64 rows of float32 are too much for some."""
    high = block_rows(like)
    return min(high, 32) if like.dtype == torch.float32 else high


@functools.cache
def _shared(rows: int, itemsize: int) -> int:
    """Count bytes of shared memory: three thin tiles, and the stages behind them."""
    return 3 * tile_bytes(rows, BOND, itemsize) + stage_bytes(itemsize, BOND, 2)


@functools.cache
def _hidden_shared(itemsize: int) -> int:
    """Count bytes of shared memory of sums over the batch: stages, and factors of a block.

    In float32 those are gone when the stages come.
    """
    right, left = (tile_bytes(*of, itemsize) for of in ((BOND, HIDDEN_BLOCK), (HIDDEN_BLOCK, BOND)))
    stages = STAGES * 3 * tile_bytes(stage_columns(itemsize) // 2, BOND, itemsize)
    factors = 2 * right + left
    return max(factors, stages) if itemsize == 4 else factors + stages
