"""Moments kept in eight bits: int8 codes with one float32 scale for each block of 256 entries.

Shapes: b = tensors stacked, n = entries of one tensor, k = its blocks, ``ceil(n / 256)``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
SMALLEST = 4096
"""Tensors of fewer entries stay in full: they weigh nothing and are often sensitive."""


def pack(values_bn: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``(b, n)`` int8 in -127 .. 127, linear in the value, and scales ``(b, k)`` float32.

    The scale is the largest magnitude in the block, which is kept exactly; other entries are
    off by at most 1/254 of it. A block of zeros has scale zero. A value that is not finite makes
    its whole block NaN or zero.
    """
    blocks = _in_blocks(values_bn.float())
    scales = blocks.abs().amax(2)
    inverse = torch.where(scales == 0, 0, 127 / scales)
    codes = (blocks * inverse.unsqueeze(2)).round_().to(torch.int8)
    return codes.flatten(1)[:, : values_bn.shape[1]], scales


def unpack(codes_bn: Tensor, scales_bk: Tensor) -> Tensor:
    """The values ``(b, n)`` float32 that codes and scales stand for."""
    blocks = _in_blocks(codes_bn).to(torch.float32)
    blocks = blocks * (scales_bk / 127).unsqueeze(2)
    return blocks.flatten(1)[:, : codes_bn.shape[1]].contiguous()


def _in_blocks(values_bn: Tensor) -> Tensor:
    """As ``(b, k, 256)``, filled up with zeros."""
    missing = -values_bn.shape[1] % BLOCK
    return (F.pad(values_bn, (0, missing)) if missing else values_bn).unflatten(1, (-1, BLOCK))
