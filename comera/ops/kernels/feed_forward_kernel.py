"""The kernels of a feed-forward whose hidden activation is never stored.

``kernels/feed_forward.cuh`` has them. One launch forward; backward three, and two products of
torch's. They take bfloat16 and bonds up to 32, whose numbers stay in registers from one product to
the next.
"""

import ctypes

import torch
from torch import Tensor

from comera.ops.kernels.choose import NOT_BF16, kernel_refuses
from comera.ops.kernels.launch import launch
from comera.ops.product import product

FILES = {name: f"feed_forward_{name}" for name in ("gelu", "relu", "silu")}
"""The sources by activation, without their suffix."""

# As in feed_forward.cuh.
_THREADS, _HIDDEN_THREADS, _HIDDEN_BLOCK, _STAGES = 256, 128, 64, 3
_RANK, _THIN_ROW, _WIDE_ROW, _SUM = 32, 40, 136, 128
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
    ranks, widths = (left1.shape[1], left2.shape[1]), (*left1.shape[:1], *right1.shape[1:])
    for rank in ranks:
        if not 0 < rank <= _RANK or rank % _MULTIPLE_OF_RANKS:
            return f"a bond is {rank} wide, not a multiple of {_MULTIPLE_OF_RANKS} up to {_RANK}"
    for width in (*widths, right2.shape[1]):
        if width % _MULTIPLE_OF_WIDTHS:
            return f"a width of {width} is no multiple of {_MULTIPLE_OF_WIDTHS}"
    if not x.shape[0]:
        return "the batch is empty"
    return kernel_refuses(FILES[activation], x)


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
    rows, file, high = x.shape[0], FILES[activation], _block_rows(x)
    y = x.new_empty(rows, right2.shape[1])
    t1, t2 = (x.new_empty(rows, left.shape[1]) for left in (left1, left2))
    factors = [factor.contiguous() for factor in (left1, right1, left2, right2)]
    launch(
        file, f"{file}_{high}", x.device, -(-rows // high), _THREADS, _shared(high),
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
    rows, file, high = x.shape[0], FILES[activation], _block_rows(x)
    sizes = _sizes(x, left1, right1, left2, right2, False)
    l1, r1, l2, r2 = (factor.contiguous() for factor in (left1, right1, left2, right2))
    grad_y = grad_y.contiguous()
    u1, u2, grad_x = torch.empty_like(t1), torch.empty_like(t2), x.new_empty(x.shape)
    launch(
        file, file.replace("forward", "forward_back_rows") + f"_{high}", x.device, -(-rows // high),
        _THREADS, _shared(high), sizes, grad_y, l1, r1, l2, r2, t1, u1, u2, grad_x,
    )  # fmt: skip
    blocks = sizes.H // _HIDDEN_BLOCK
    parts = min(-(-_BLOCKS // blocks), -(-rows // _HIDDEN_BLOCK))
    shares = x.new_empty(parts, 2, sizes.H, _RANK, dtype=torch.float32)
    launch(
        file, file.replace("forward", "forward_back_hidden"), x.device, (blocks, parts),
        _HIDDEN_THREADS, _STAGES * 2 * _HIDDEN_BLOCK * _THIN_ROW * 2, sizes, t1, u2, r1, l2, shares,
    )  # fmt: skip
    grad_left2, grad_right1 = torch.empty_like(l2), torch.empty_like(r1)
    launch(
        file, file.replace("forward", "forward_back_sums"), x.device,
        2 * sizes.H * _RANK // _THREADS, _THREADS, 0, sizes, shares, grad_left2, grad_right1, parts,
    )  # fmt: skip
    grad_left1, grad_right2 = product(u1.T, x).T.contiguous(), product(t2.T, grad_y).contiguous()
    return grad_x, grad_left1, grad_right1, grad_left2, grad_right2


def _sizes(
    x: Tensor, left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, bias: bool
) -> _Sizes:
    widths = x.shape[1], right1.shape[1], right2.shape[1]
    return _Sizes(x.shape[0], *widths, left1.shape[1], left2.shape[1], bias)


def _block_rows(x: Tensor) -> int:
    """Say how many rows a block has: more where there are blocks enough."""
    if x.shape[0] < 2048:
        return 16
    return 32 if x.shape[0] <= 8192 else 64


def _shared(rows: int) -> int:
    """Count bytes of shared memory: two thin tiles, and the largest of the stages behind them."""
    thin = _STAGES * (rows * _WIDE_ROW + max(_RANK * _WIDE_ROW, _SUM * _THIN_ROW))
    hidden = _STAGES * (_RANK * _WIDE_ROW + _SUM * _THIN_ROW)
    spread = _THREADS // 32 * (2 * _RANK * _THIN_ROW + 16 * _THIN_ROW)
    parts = 2 * 128 * (_RANK + 4)  # float32
    return 2 * (2 * rows * _THIN_ROW + max(thin, hidden, spread, parts))
