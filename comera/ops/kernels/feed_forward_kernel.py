"""Launch the kernels of plain and gated feed-forwards, which never store hidden activations.

Sources: ``kernels/feed_forward.cuh`` and ``kernels/feed_forward_gated.cuh``. The kernels take
bfloat16, or float32 if tf32 is allowed, and bonds up to 48 (up to 32 in gated feed-forwards).
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import products_are_tf32
from comera.ops.kernels.choose import EXACT, UNLIKE, kernel_refuses, off_card
from comera.ops.kernels.launch import dense, launch
from comera.ops.product import product

ENDINGS = {torch.bfloat16: "", torch.float32: "_tf32"}  # suffix of the names of kernels, by dtype

THREADS, HIDDEN_THREADS, HIDDEN_BLOCK, STAGES = 256, 128, 64, 3
BOND, WIDE_BOND = 32, 48
"""Bonds, padded, of which there are kernels: of a gated feed-forward the first alone."""

_LINE = 128  # bytes that all banks of shared memory serve at once

_MULTIPLE_OF_RANKS, _MULTIPLE_OF_WIDTHS = 8, 128

_BLOCKS = 192
"""Blocks that sum gradients over the batch, at least: a card has more than a hundred processors."""


def _unfit(
    ranks: Sequence[int], widths: Sequence[int], most: int, x: Tensor, *factors: Tensor
) -> str | None:
    """Return why kernels refuse these dtypes, bonds (``most`` is the limit), widths or batch."""
    if x.dtype not in ENDINGS or any(factor.dtype != x.dtype for factor in factors):
        return UNLIKE
    if x.dtype == torch.float32 and not products_are_tf32(x):
        return EXACT
    for rank in ranks:
        if not 0 < rank <= most or rank % _MULTIPLE_OF_RANKS:
            return f"a bond is {rank} wide, not a multiple of {_MULTIPLE_OF_RANKS} up to {most}"
    for width in widths:
        if width % _MULTIPLE_OF_WIDTHS:
            return f"a width of {width} is no multiple of {_MULTIPLE_OF_WIDTHS}"
    return None if x.shape[0] else "the batch is empty"


def block_rows(x: Tensor) -> int:
    """Return how many rows of the batch a thread block computes: more for large batches."""
    if x.shape[0] < 2048 and x.dtype != torch.float32:
        return 16
    return 32 if x.shape[0] <= 8192 else 64


def tile_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Count the bytes of a tile in shared memory; see ``place`` in ``kernels/tiles.cuh``."""
    row = columns * itemsize
    lines = rows // (_LINE // math.gcd(row, _LINE))
    return rows * row + (32 * (lines - lines // 4) if itemsize == 4 else 16 * lines)


def stage_columns(itemsize: int) -> int:
    """Return how many columns of a factor a pipeline stage loads: as many as fill 256 bytes."""
    return 256 // itemsize


def stage_bytes(itemsize: int, bond: int, rights: int) -> int:
    """Count bytes of all pipeline stages, for ``rights`` right factors and a left factor."""
    columns = stage_columns(itemsize)
    right, left = tile_bytes(bond, columns, itemsize), tile_bytes(columns, bond, itemsize)
    return STAGES * (rights * right + left)


ACTIVATIONS = "gelu", "relu", "silu"

WIDE_BONDS = range(BOND + 1, WIDE_BOND + 1)
"""Bonds, padded, that have kernels of their own; those for narrower ones hold fewer numbers."""


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("M", "I", "H", "O", "rank1", "rank2", "bias")
    )


def refuses(x: Tensor, factors: Sequence[Tensor], *given: Any) -> str | None:
    """Return why no kernel computes a feed-forward of these factors, or None.

    The last argument is the activation.
    """
    activation = given[-1]
    elsewhere = off_card("feed_forward", x)
    if elsewhere is not None:
        return elsewhere
    if activation not in ACTIVATIONS:
        return f"there is no kernel with {activation} in it"
    left1, _, left2, right2 = factors
    ranks = left1.shape[1], left2.shape[1]
    widths = left1.shape[0], left2.shape[0], right2.shape[1]
    reason = _unfit(ranks, widths, WIDE_BOND, x, *factors)
    return reason or kernel_refuses(_kernel(x, factors, activation)[0], x)


def _kernel(x: Tensor, factors: Sequence[Tensor], activation: str) -> tuple[str, int, int]:
    """Return the source file's name, the padded bond, and the rows that a block computes."""
    wide = max(factors[0].shape[1], factors[2].shape[1]) in WIDE_BONDS
    file = f"feed_forward_{activation}{ENDINGS[x.dtype]}{'_wide' if wide else ''}"
    return file, WIDE_BOND if wide else BOND, min(block_rows(x), 32) if wide else block_rows(x)


def forward(
    x: Tensor, factors: Sequence[Tensor], bias: bool, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y``, and the ``x @ left`` of both layers; if ``bias``, with a column of ones."""
    file, bond, high = _kernel(x, factors, activation)
    left1, _, left2, right2 = factors
    y, t1, t2 = (x.new_empty(x.shape[0], factor.shape[1]) for factor in (right2, left1, left2))
    launch(
        file, f"feed_forward_{high}", x.device, -(-x.shape[0] // high), THREADS,
        _shared(high, x.itemsize, bond), _sizes(x, factors, bias), dense(x), *map(dense, factors),
        t1, t2, y,
    )  # fmt: skip
    return y, t1, t2


def backward(
    x: Tensor, factors: Sequence[Tensor], grad_y: Tensor, t1: Tensor, t2: Tensor, activation: str
) -> list[Tensor]:
    """Return the gradients of ``x`` and of the four factors."""
    file, bond, high = _kernel(x, factors, activation)
    sizes = _sizes(x, factors, False)
    l1, r1, l2, r2 = map(dense, factors)
    grad_y, t1, t2 = dense(grad_y), dense(t1), dense(t2)
    u1, u2, grad_x = torch.empty_like(t1), torch.empty_like(t2), x.new_empty(x.shape)
    launch(
        file, f"feed_forward_back_rows_{high}", x.device, -(-x.shape[0] // high), THREADS,
        _shared(high, x.itemsize, bond), sizes, grad_y, l1, r1, l2, r2, t1, u1, u2, grad_x,
    )  # fmt: skip
    grad_left2, grad_right1 = torch.empty_like(l2), torch.empty_like(r1)
    given, grads = (t1, u2, r1, l2), (grad_left2, grad_right1)
    shared = STAGES * 2 * tile_bytes(HIDDEN_BLOCK, bond, x.itemsize)  # rows of two thin tensors
    _sum_over_batch(file, "feed_forward", sizes, given, grads, bond, shared)
    grad_left1, grad_right2 = product(u1.T, x).T.contiguous(), product(t2.T, grad_y).contiguous()
    return [grad_x, grad_left1, grad_right1, grad_left2, grad_right2]


def _sum_over_batch(
    file: str,
    name: str,
    sizes: "_Sizes | _GatedSizes",
    given: Sequence[Tensor],
    grads: Sequence[Tensor],
    bond: int,
    shared: int,
) -> None:
    """Write the gradients of the factors with the hidden width, in two launches.

    The first launch sums over each part of the batch, the second over the parts. The first of
    ``given`` has the batch's rows; ``shared`` is the first launch's shared memory in bytes.
    """
    like, blocks = given[0], sizes.H // HIDDEN_BLOCK
    parts = min(-(-_BLOCKS // blocks), -(-like.shape[0] // HIDDEN_BLOCK))
    shares = like.new_empty(parts, len(grads), sizes.H, bond, dtype=torch.float32)
    launch(
        file, f"{name}_back_hidden", like.device, (blocks, parts), HIDDEN_THREADS, shared, sizes,
        *given, shares,
    )  # fmt: skip
    launch(
        file, f"{name}_back_sums", like.device, -(-len(grads) * sizes.H * bond // THREADS), THREADS,
        0, sizes, shares, *grads, parts,
    )  # fmt: skip


def _sizes(x: Tensor, factors: Sequence[Tensor], bias: bool) -> _Sizes:
    left1, right1, left2, right2 = factors
    widths = x.shape[1], right1.shape[1], right2.shape[1]
    return _Sizes(x.shape[0], *widths, left1.shape[1], left2.shape[1], bias)


@functools.cache
def _shared(rows: int, itemsize: int, bond: int) -> int:
    """Count the bytes of shared memory of a block: two thin tiles, and room for all stages."""
    columns, tile = stage_columns(itemsize), functools.partial(tile_bytes, itemsize=itemsize)
    thin, wide = tile(rows, bond), max(tile(columns, bond), tile(bond, columns))
    first = thin + STAGES * (tile(rows, columns) + wide)
    made = columns // 4  # that a warp makes at once
    spread = THREADS // 32 * (2 * max(tile(bond, made), tile(made, bond)) + tile(16, made))
    parts = tile_bytes(128, bond, 4)
    return max(first, 2 * thin + max(stage_bytes(itemsize, bond, 1), spread, parts))


class _GatedSizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("M", "H", "rankg", "ranku", "rank2"))


def gated_refuses(given: Sequence[Tensor], *_: Any) -> str | None:
    """Return why no kernel computes :func:`gated_forward` of these tensors, or None."""
    t_gate, t_up, *_rest, left2 = given
    ranks = t_gate.shape[1], t_up.shape[1], left2.shape[1]
    reason = off_card("feed_forward_gated", t_gate) or _unfit(ranks, left2.shape[:1], BOND, *given)
    return reason or kernel_refuses(gated_file(t_gate), t_gate)


def gated_file(like: Tensor) -> str:
    """Return the name of the source file of the gated kernels for a dtype, without suffix."""
    return f"feed_forward_gated{ENDINGS[like.dtype]}"


def _gated_rows(t_gate: Tensor) -> int:
    """Return how many rows a block computes: fewer in float32, whose tiles are larger."""
    return min(block_rows(t_gate), 32) if t_gate.dtype == torch.float32 else block_rows(t_gate)


def gated_forward(given: Sequence[Tensor]) -> Tensor:
    """Return ``(silu(t_gate @ gate) * (t_up @ up)) @ left2``."""
    t_gate, *_, left2 = given
    rows, high, file = t_gate.shape[0], _gated_rows(t_gate), gated_file(t_gate)
    t2 = t_gate.new_empty(rows, left2.shape[1])
    launch(
        file, f"{file}_{high}", t_gate.device, -(-rows // high), THREADS,
        _gated_shared(high, t_gate.itemsize), _gated_sizes(given), *map(dense, given), t2,
    )  # fmt: skip
    return t2


def gated_backward(given: Sequence[Tensor], grad_t2: Tensor) -> list[Tensor]:
    """Return gradients of the arguments of :func:`gated_forward`."""
    sizes = _gated_sizes(given)
    t_gate, t_up, gate, up, left2, u2 = map(dense, (*given, grad_t2))
    rows, high, file = t_gate.shape[0], _gated_rows(t_gate), gated_file(t_gate)
    u_gate, u_up = torch.empty_like(t_gate), torch.empty_like(t_up)
    launch(
        file, f"{file}_back_rows_{high}", t_gate.device, -(-rows // high), THREADS,
        _gated_shared(high, t_gate.itemsize), sizes, t_gate, t_up, u2, gate, up, left2, u_gate,
        u_up,
    )  # fmt: skip
    grad_left2, grad_gate, grad_up = map(torch.empty_like, (left2, gate, up))
    tensors, grads = (t_gate, t_up, u2, gate, up, left2), (grad_left2, grad_gate, grad_up)
    # Stages, and factors of a block, which in float32 are gone when the stages come.
    size = t_gate.itemsize
    stages = STAGES * 3 * tile_bytes(stage_columns(size) // 2, BOND, size)
    factors = 2 * tile_bytes(BOND, HIDDEN_BLOCK, size) + tile_bytes(HIDDEN_BLOCK, BOND, size)
    shared = max(factors, stages) if size == 4 else factors + stages
    _sum_over_batch(file, file, sizes, tensors, grads, BOND, shared)
    return [u_gate, u_up, grad_gate, grad_up, grad_left2]


def _gated_sizes(given: Sequence[Tensor]) -> _GatedSizes:
    t_gate, t_up, *_, left2 = given
    return _GatedSizes(
        t_gate.shape[0], left2.shape[0], t_gate.shape[1], t_up.shape[1], left2.shape[1]
    )


@functools.cache
def _gated_shared(rows: int, itemsize: int) -> int:
    """Count the bytes of shared memory of a block: three thin tiles, and the stages."""
    return 3 * tile_bytes(rows, BOND, itemsize) + stage_bytes(itemsize, BOND, 2)
