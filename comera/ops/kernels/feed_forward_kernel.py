"""The kernels of a feed-forward whose hidden activation is never stored.

``kernels/feed_forward.cuh`` has them. One launch forward; backward three, and two products of
torch's. They take bfloat16 and bonds up to 32, whose numbers stay in registers from one product to
the next.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.kernels.choose import NOT_BF16, kernel_refuses
from comera.ops.kernels.launch import launch
from comera.ops.product import product

FILES = {name: f"feed_forward_{name}" for name in ("gelu", "relu", "silu")}
"""The sources by activation, without their suffix."""

# As in feed_forward.cuh.
THREADS, HIDDEN_THREADS, HIDDEN_BLOCK, STAGES = 256, 128, 64, 3
RANK, THIN_ROW, WIDE_ROW, SUM = 32, 40, 136, 128
_MULTIPLE_OF_RANKS, _MULTIPLE_OF_WIDTHS = 8, 128

_BLOCKS = 192
"""Blocks that sum gradients over the batch, at least: a card has more than a hundred processors."""


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("M", "I", "H", "O", "rank1", "rank2", "bias")
    )


def refuses(
    x: Tensor, left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, activation: str
) -> str | None:
    """Say why no kernel computes a feed-forward of these factors, or None."""
    if any(t.dtype != torch.bfloat16 for t in (x, left1, right1, left2, right2)):
        return NOT_BF16
    if activation not in FILES:
        return f"there is no kernel with {activation} in it"
    ranks, widths = (left1.shape[1], left2.shape[1]), (left1.shape[0], *left2.shape[:1])
    reason = refuses_sizes(ranks, (*widths, right2.shape[1]), x)
    if reason is not None:
        return reason
    return kernel_refuses(FILES[activation], x)


def refuses_sizes(ranks: Sequence[int], widths: Sequence[int], x: Tensor) -> str | None:
    """Say why bonds, widths or an empty batch do not fit the kernels of a feed-forward, or None."""
    for rank in ranks:
        if not 0 < rank <= RANK or rank % _MULTIPLE_OF_RANKS:
            return f"a bond is {rank} wide, not a multiple of {_MULTIPLE_OF_RANKS} up to {RANK}"
    for width in widths:
        if width % _MULTIPLE_OF_WIDTHS:
            return f"a width of {width} is no multiple of {_MULTIPLE_OF_WIDTHS}"
    return None if x.shape[0] else "the batch is empty"


def forward(
    x: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    bias: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y`` and the products with both left factors, a bias' columns of ones in them."""
    rows, file, high = x.shape[0], FILES[activation], block_rows(x)
    y = x.new_empty(rows, right2.shape[1])
    t1, t2 = (x.new_empty(rows, left.shape[1]) for left in (left1, left2))
    factors = [factor.contiguous() for factor in (left1, right1, left2, right2)]
    launch(
        file, f"{file}_{high}", x.device, -(-rows // high), THREADS, _shared(high),
        _sizes(x, left1, right1, left2, right2, bias), x.contiguous(), *factors, t1, t2, y,
    )  # fmt: skip
    return y, t1, t2


def backward(
    x: Tensor,
    left1: Tensor,
    right1: Tensor,
    left2: Tensor,
    right2: Tensor,
    grad_y: Tensor,
    t1: Tensor,
    t2: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of the batch and of the factors, in the order of the arguments."""
    rows, file, high = x.shape[0], FILES[activation], block_rows(x)
    sizes = _sizes(x, left1, right1, left2, right2, False)
    l1, r1, l2, r2 = (factor.contiguous() for factor in (left1, right1, left2, right2))
    grad_y = grad_y.contiguous()
    u1, u2, grad_x = torch.empty_like(t1), torch.empty_like(t2), x.new_empty(x.shape)
    launch(
        file, file.replace("forward", "forward_back_rows") + f"_{high}", x.device, -(-rows // high),
        THREADS, _shared(high), sizes, grad_y, l1, r1, l2, r2, t1, u1, u2, grad_x,
    )  # fmt: skip
    blocks = sizes.H // HIDDEN_BLOCK
    parts = parts_of(blocks, rows)
    shares = x.new_empty(parts, 2, sizes.H, RANK, dtype=torch.float32)
    launch(
        file, file.replace("forward", "forward_back_hidden"), x.device, (blocks, parts),
        HIDDEN_THREADS, STAGES * 2 * HIDDEN_BLOCK * THIN_ROW * 2, sizes, t1, u2, r1, l2, shares,
    )  # fmt: skip
    grad_left2, grad_right1 = torch.empty_like(l2), torch.empty_like(r1)
    launch(
        file, file.replace("forward", "forward_back_sums"), x.device,
        2 * sizes.H * RANK // THREADS, THREADS, 0, sizes, shares, grad_left2, grad_right1, parts,
    )  # fmt: skip
    grad_left1, grad_right2 = product(u1.T, x).T.contiguous(), product(t2.T, grad_y).contiguous()
    return grad_x, grad_left1, grad_right1, grad_left2, grad_right2


def _sizes(
    x: Tensor, left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, bias: bool
) -> _Sizes:
    widths = x.shape[1], right1.shape[1], right2.shape[1]
    return _Sizes(x.shape[0], *widths, left1.shape[1], left2.shape[1], bias)


def parts_of(blocks: int, rows: int) -> int:
    """Say in how many parts a batch is summed over, by so many blocks each."""
    return min(-(-_BLOCKS // blocks), -(-rows // HIDDEN_BLOCK))


def block_rows(x: Tensor) -> int:
    """Say how many rows a block has: more where there are blocks enough."""
    if x.shape[0] < 2048:
        return 16
    return 32 if x.shape[0] <= 8192 else 64


def _shared(rows: int) -> int:
    """Count bytes of shared memory: two thin tiles, and the largest of the stages behind them."""
    thin = STAGES * (rows * WIDE_ROW + max(RANK * WIDE_ROW, SUM * THIN_ROW))
    hidden = STAGES * (RANK * WIDE_ROW + SUM * THIN_ROW)
    spread = THREADS // 32 * (2 * RANK * THIN_ROW + 16 * THIN_ROW)
    parts = 2 * 128 * (RANK + 4)  # float32
    return 2 * (2 * rows * THIN_ROW + max(thin, hidden, spread, parts))
