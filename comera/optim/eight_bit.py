"""Moments kept in eight bits: int8 codes with one float32 scale for each block of 256 entries.

Shapes: b = tensors stacked, n = entries of one tensor, k = its blocks, ``ceil(n / 256)``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
SMALLEST = 4096
"""Tensors of fewer entries stay in full: they weigh nothing and are often sensitive."""

_AT_A_TIME = {"cpu": 1 << 18}
_DEFAULT_AT_A_TIME = 1 << 24
"""Entries packed at a time, which bounds the work space."""


def pack(values_bn: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``(b, n)`` int8 and scales ``(b, k)`` float32 of float32 values.

    A code is linear in the value, from -127 to 127. The scale is the largest magnitude in the
    block, which is kept exactly; other entries are off by at most 1/254 of it. A block of zeros
    has scale zero. Values that are not finite leave nothing finite in their block.
    """
    blocks = _in_blocks(values_bn)
    codes = torch.empty_like(blocks, dtype=torch.int8)
    scales = blocks.new_empty(blocks.shape[:2])
    for some in _spans(blocks):  # no work space of the size of a large tensor
        part = blocks[:, some]
        scale = scales[:, some] = part.abs().amax(2)
        inverse = torch.where(scale == 0, 0, 127 / scale)
        codes[:, some] = (part * inverse.unsqueeze(2)).round_()
    return codes.flatten(1)[:, : values_bn.shape[1]], scales


def unpack(codes_bn: Tensor, scales_bk: Tensor) -> Tensor:
    """The values ``(b, n)`` float32 that codes and scales stand for."""
    values = _in_blocks(codes_bn) * (scales_bk / 127).unsqueeze(2)
    return values.flatten(1)[:, : codes_bn.shape[1]].contiguous()


def _spans(blocks_bkn: Tensor) -> list[slice]:
    """Slices of blocks that are packed at a time."""
    batch, count, size = blocks_bkn.shape
    most = _AT_A_TIME.get(blocks_bkn.device.type, _DEFAULT_AT_A_TIME)
    step = max(1, most // (batch * size))
    if torch.compiler.is_compiling():  # the compiler needs no work space
        step = count
    return [slice(start, start + step) for start in range(0, count, step)]


def _in_blocks(values_bn: Tensor) -> Tensor:
    """As ``(b, k, 256)``, filled up with zeros."""
    missing = -values_bn.shape[1] % BLOCK
    return (F.pad(values_bn, (0, missing)) if missing else values_bn).unflatten(1, (-1, BLOCK))
