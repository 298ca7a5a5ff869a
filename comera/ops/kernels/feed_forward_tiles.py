"""What the kernels of feed-forwards take and how they cut it up: ``kernels/feed_forward.cuh``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.context import products_are_tf32
from comera.ops.kernels.choose import EXACT, UNLIKE

ENDINGS = {torch.bfloat16: "", torch.float32: "_tf32"}
"""What the names of the kernels for a dtype end in."""

THREADS, HIDDEN_THREADS, HIDDEN_BLOCK, STAGES = 256, 128, 64, 3
BOND, WIDE_BOND = 32, 48
"""Bonds, padded, of which there are kernels: of a gated feed-forward the first alone."""

_LINE = 128
"""Bytes that all banks of shared memory serve at once."""

_MULTIPLE_OF_RANKS, _MULTIPLE_OF_WIDTHS = 8, 128

_BLOCKS = 192
"""Blocks that sum gradients over the batch, at least: a card has more than a hundred processors."""


def refuses_dtypes(x: Tensor, *factors: Tensor) -> str | None:
    """Say why the kernels do not take these dtypes, or None."""
    if x.dtype not in ENDINGS or any(factor.dtype != x.dtype for factor in factors):
        return UNLIKE
    return None if x.dtype == torch.bfloat16 or products_are_tf32(x) else EXACT


def refuses_sizes(ranks: Sequence[int], widths: Sequence[int], x: Tensor, most: int) -> str | None:
    """Say why bonds, widths or an empty batch do not fit the kernels, or None."""
    for rank in ranks:
        if not 0 < rank <= most or rank % _MULTIPLE_OF_RANKS:
            return f"a bond is {rank} wide, not a multiple of {_MULTIPLE_OF_RANKS} up to {most}"
    for width in widths:
        if width % _MULTIPLE_OF_WIDTHS:
            return f"a width of {width} is no multiple of {_MULTIPLE_OF_WIDTHS}"
    return None if x.shape[0] else "the batch is empty"


def parts_of(blocks: int, rows: int) -> int:
    """Say in how many parts a batch is summed over, by so many blocks each."""
    return min(-(-_BLOCKS // blocks), -(-rows // HIDDEN_BLOCK))


def block_rows(x: Tensor) -> int:
    """Say how many rows a block has: more where there are blocks enough."""
    if x.shape[0] < 2048 and x.dtype != torch.float32:
        return 16
    return 32 if x.shape[0] <= 8192 else 64


def tile_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Count bytes of a tile in shared memory: ``place`` in ``kernels/tiles.cuh``."""
    row = columns * itemsize
    lines = rows // (_LINE // math.gcd(row, _LINE))
    return rows * row + (32 * (lines - lines // 4) if itemsize == 4 else 16 * lines)


def stage_columns(itemsize: int) -> int:
    """Say how many numbers along a sum, or hidden columns, a stage holds: those of 256 bytes."""
    return 256 // itemsize


def stage_bytes(itemsize: int, bond: int, rights: int) -> int:
    """Count bytes of stages of hidden columns: of so many right factors and a left one."""
    columns = stage_columns(itemsize)
    right, left = tile_bytes(bond, columns, itemsize), tile_bytes(columns, bond, itemsize)
    return STAGES * (rights * right + left)
