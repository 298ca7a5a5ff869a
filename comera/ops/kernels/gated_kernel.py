"""The kernels of a gated feed-forward whose hidden activations are never stored.

``kernels/feed_forward_gated.cu`` has them: what is of the hidden width, between thin products of
torch's. One launch forward and three backward, of bfloat16 and bonds up to 32.
"""

import ctypes

import torch
from torch import Tensor

from comera.ops.kernels.choose import NOT_BF16, kernel_refuses
from comera.ops.kernels.feed_forward_kernel import (
    HIDDEN_BLOCK,
    HIDDEN_THREADS,
    RANK,
    STAGES,
    SUM,
    THIN_ROW,
    THREADS,
    WIDE_ROW,
    block_rows,
    parts_of,
    refuses_sizes,
)
from comera.ops.kernels.launch import launch

FILE = "feed_forward_gated"


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("M", "H", "rankg", "ranku", "rank2"))


def refuses(t_gate: Tensor, t_up: Tensor, gate: Tensor, up: Tensor, left2: Tensor) -> str | None:
    """Say why no kernel computes a gated feed-forward of these, or None."""
    if any(t.dtype != torch.bfloat16 for t in (t_gate, t_up, gate, up, left2)):
        return NOT_BF16
    ranks = t_gate.shape[1], t_up.shape[1], left2.shape[1]
    return refuses_sizes(ranks, left2.shape[:1], t_gate) or kernel_refuses(FILE, t_gate)


def forward(t_gate: Tensor, t_up: Tensor, gate: Tensor, up: Tensor, left2: Tensor) -> Tensor:
    """Return ``(silu(t_gate @ gate) * (t_up @ up)) @ left2``."""
    rows, high = t_gate.shape[0], block_rows(t_gate)
    t2 = t_gate.new_empty(rows, left2.shape[1])
    given = [t.contiguous() for t in (t_gate, t_up, gate, up, left2)]
    launch(
        FILE, f"{FILE}_{high}", t_gate.device, -(-rows // high), THREADS, _shared(high),
        _sizes(t_gate, t_up, left2), *given, t2,
    )  # fmt: skip
    return t2


def backward(
    t_gate: Tensor, t_up: Tensor, gate: Tensor, up: Tensor, left2: Tensor, grad_t2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of the arguments of :func:`forward`, in their order."""
    rows, high, sizes = t_gate.shape[0], block_rows(t_gate), _sizes(t_gate, t_up, left2)
    t_gate, t_up, gate, up, left2, u2 = (
        t.contiguous() for t in (t_gate, t_up, gate, up, left2, grad_t2)
    )
    u_gate, u_up = torch.empty_like(t_gate), torch.empty_like(t_up)
    launch(
        FILE, f"{FILE}_back_rows_{high}", t_gate.device, -(-rows // high), THREADS, _shared(high),
        sizes, t_gate, t_up, u2, gate, up, left2, u_gate, u_up,
    )  # fmt: skip
    blocks = sizes.H // HIDDEN_BLOCK
    parts = parts_of(blocks, rows)
    shares = t_gate.new_empty(parts, 3, sizes.H, RANK, dtype=torch.float32)
    launch(
        FILE, f"{FILE}_back_hidden", t_gate.device, (blocks, parts), HIDDEN_THREADS,
        _hidden_shared(), sizes, t_gate, t_up, u2, gate, up, left2, shares,
    )  # fmt: skip
    grad_left2, grad_gate, grad_up = map(torch.empty_like, (left2, gate, up))
    launch(
        FILE, f"{FILE}_back_sums", t_gate.device, -(-3 * sizes.H * RANK // THREADS), THREADS, 0,
        sizes, shares, grad_left2, grad_gate, grad_up, parts,
    )  # fmt: skip
    return u_gate, u_up, grad_gate, grad_up, grad_left2


def _sizes(t_gate: Tensor, t_up: Tensor, left2: Tensor) -> _Sizes:
    return _Sizes(t_gate.shape[0], left2.shape[0], t_gate.shape[1], t_up.shape[1], left2.shape[1])


def _shared(rows: int) -> int:
    """Count bytes of shared memory: three thin tiles, and the stages behind them."""
    return 2 * (3 * rows * THIN_ROW + STAGES * (2 * RANK * WIDE_ROW + SUM * THIN_ROW))


def _hidden_shared() -> int:
    """Count bytes of shared memory of sums over the batch: factors of a block, then the stages."""
    factors = 2 * RANK * (HIDDEN_BLOCK + THIN_ROW - RANK) + HIDDEN_BLOCK * THIN_ROW
    return 2 * (factors + STAGES * 3 * HIDDEN_BLOCK * THIN_ROW)
