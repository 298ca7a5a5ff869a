"""Multiply by a block tensor train: two batched products with a shuffle between them.

Letters: T = tokens, a and b = blocks of the input and the numbers in each, c and d = those of the
output, R = rank of the blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def block_linear(
    x_TI: Tensor, left_1abcR: Tensor, right_Rcad1: Tensor, bias_O: Tensor | None, out_features: int
) -> Tensor:
    """Return ``x @ W.T + bias`` where the block (a, c) of ``W.T`` is ``left[a, c] @ right[c, a]``.

    By operations of torch alone, so that autograd, compilers and exporters know all of it. The
    shuffle moves whole rows of tokens: it takes the first product with tokens last.

    Args:
        x_TI: ``(*, in)``, in at most a b.
        left_1abcR: ``(1, a, b, c, R)``, gates multiplied in.
        right_Rcad1: ``(R, c, a, d, 1)``.
        bias_O: ``(out_features,)`` or None.
        out_features: At most c d.

    Returns:
        ``(*, out_features)``, at autocast's dtype where autocast is on.
    """
    _, a, b, c, rank = left_1abcR.shape
    d = right_Rcad1.shape[3]
    lead, missing = x_TI.shape[:-1], a * b - x_TI.shape[-1]
    x = x_TI.reshape(lead.numel(), x_TI.shape[-1])  # -1 is ambiguous for no rows
    x = F.pad(x, (0, missing)) if missing else x
    left = left_1abcR.reshape(a, b, c * rank).transpose(1, 2)
    right = right_Rcad1.squeeze(4).permute(1, 2, 0, 3).reshape(c, a * rank, d)
    hidden = torch.bmm(left, x.t().unflatten(0, (a, b)))
    tokens = x.shape[0]
    hidden = hidden.view(a, c, rank, tokens).transpose(0, 1).reshape(c, a * rank, tokens)
    rows = hidden.transpose(1, 2)
    if bias_O is None or out_features < c * d:
        y = torch.bmm(rows, right)
    else:
        y = torch.baddbmm(bias_O.view(c, 1, d), rows, right)
    y = y.transpose(0, 1).reshape(tokens, c * d)
    if out_features < c * d:
        y = y[:, :out_features]
        y = y if bias_O is None else y + bias_O
    return y.reshape(*lead, out_features)


def blocks_to_dense(left_1abcR: Tensor, right_Rcad1: Tensor) -> Tensor:
    """Return the dense ``(c d, a b)`` weight."""
    weight = torch.einsum("abcr,rcad->cdab", left_1abcR.squeeze(0), right_Rcad1.squeeze(4))
    return weight.flatten(2).flatten(0, 1)


def weight_to_blocks(
    weight_OI: Tensor, in_modes: tuple[int, int], out_modes: tuple[int, int]
) -> Tensor:
    """Return the blocks ``(a, c, b, d)`` of a dense weight, padded with zeros."""
    (a, b), (c, d) = in_modes, out_modes
    high, wide = weight_OI.shape
    padded = F.pad(weight_OI, (0, a * b - wide, 0, c * d - high))
    return padded.view(c, d, a, b).permute(2, 0, 3, 1)


def split_blocks(
    blocks_acbd: Tensor, rank: int | None, tolerance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Approximate every block by its largest singular vectors: no blocks of that rank are nearer.

    Args:
        blocks_acbd: ``(a, c, b, d)``.
        rank: Of each block, cut where a block is smaller; None where ``tolerance`` is given.
        tolerance: Bound on the relative Frobenius error of all blocks together: the smallest rank
            that meets it, at least one.

    Returns:
        Cores ``(1, a, b, c, R)`` and ``(R, c, a, d, 1)`` of one norm, in float32 or wider.

    Raises:
        ValueError: If an entry is not finite.
    """
    wide = torch.promote_types(blocks_acbd.dtype, torch.float32)
    blocks = blocks_acbd.to(wide)
    if not bool(blocks.isfinite().all()):
        raise ValueError("the weight holds numbers that are not finite")
    u_acbk, s_ack, vh_ackd = torch.linalg.svd(blocks, full_matrices=False)
    if rank is None:
        square = s_ack.double().square().sum((0, 1))
        left_out = square.sum() - square.cumsum(0)  # by rank 1, 2, ...
        allowed = max(tolerance or 0.0, torch.finfo(wide).eps) ** 2 * square.sum()
        rank = 1 + int((left_out > allowed).sum())
    rank = min(rank, s_ack.shape[2])
    root = s_ack[..., :rank].sqrt()
    left = u_acbk[..., :rank] * root[:, :, None]
    right = vh_ackd[:, :, :rank] * root[..., None]
    return left.permute(0, 2, 1, 3)[None], right.permute(2, 1, 0, 3)[..., None]
