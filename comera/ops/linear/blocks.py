"""Multiply by a block tensor train: two batched products with a shuffle between them.

Letters: T = tokens, a and b = blocks of the input and the numbers in each, c and d = those of the
output, R = rank of the blocks.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import autocast_together, without_autocast
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_traced

_LEAST = 1e-2  # least share of a typical singular value in the left core


def block_linear(
    x_TI: Tensor, left_1abcR: Tensor, right_Rcad1: Tensor, bias_O: Tensor | None, out_features: int
) -> Tensor:
    """Return ``x @ W.T + bias`` where the block (a, c) of ``W.T`` is ``left[a, c] @ right[c, a]``.

    It can be differentiated any number of times.

    Args:
        x_TI: ``(*, in)``, in at most a b.
        left_1abcR: The first core, multiplied by the gates.
        right_Rcad1: The second core.
        bias_O: ``(out_features,)`` or None.
        out_features: At most c d.

    Returns:
        ``(*, out_features)``, at autocast's dtype where autocast is on.
    """
    biases = [] if bias_O is None else [bias_O]
    x_TI, (left_1abcR, right_Rcad1), biases = autocast_together(
        x_TI, [left_1abcR, right_Rcad1], biases
    )
    _, a, b, c, rank = left_1abcR.shape
    d = right_Rcad1.shape[3]
    lead, missing = x_TI.shape[:-1], a * b - x_TI.shape[-1]
    # -1 is ambiguous for no rows, and torch.Size.numel a constant of an exported program.
    x = x_TI.reshape(math.prod(lead), x_TI.shape[-1])
    x = F.pad(x, (0, missing)) if missing else x
    cut = out_features < c * d
    left = left_1abcR.reshape(a, b, c * rank)
    right = right_Rcad1.squeeze(4).permute(1, 2, 0, 3).reshape(c, a * rank, d)
    bias = biases[0] if biases and not cut else None
    with without_autocast(x):
        # What is compiled, traced or transformed has to see all operations.
        multiply = _Multiply.apply if is_eager() and not is_traced() else _multiply
        y = multiply(x, left, right, bias)
    if cut:
        y = y[:, :out_features]
        y = y + biases[0] if biases else y
    return y.reshape(*lead, out_features)


def _multiply(x_TI: Tensor, left_abK: Tensor, right_cSd: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute both batched products: ``(T, c d)``, where S = a R and K = c R."""
    return _second_product(_shuffled(x_TI, left_abK, len(right_cSd)), right_cSd, bias_O)


def _shuffled(x_TI: Tensor, left_abK: Tensor, c: int) -> Tensor:
    """Compute the first batched product and shuffle it to ``(c, S, T)``, tokens innermost."""
    (a, b, width), tokens = left_abK.shape, x_TI.shape[0]
    rank = width // c
    first_aKT = torch.bmm(left_abK.transpose(1, 2), x_TI.t().unflatten(0, (a, b)))
    return first_aKT.view(a, c, rank, tokens).transpose(0, 1).reshape(c, a * rank, tokens)


def _second_product(hidden_cST: Tensor, right_cSd: Tensor, bias_O: Tensor | None) -> Tensor:
    c, _, d = right_cSd.shape
    rows_cTS = hidden_cST.transpose(1, 2)
    if bias_O is None:
        y_cTd = torch.bmm(rows_cTS, right_cSd)
    else:
        y_cTd = torch.baddbmm(bias_O.view(c, 1, d), rows_cTS, right_cSd)
    return y_cTd.transpose(0, 1).reshape(-1, c * d)


class _Multiply(torch.autograd.Function):
    """:func:`_multiply` with gradients that shuffle whole rows, faster than autograd's."""

    @staticmethod
    def forward(ctx: Any, x_TI, left_abK, right_cSd, bias_O):  # type: ignore[override]
        hidden_cST = _shuffled(x_TI, left_abK, len(right_cSd))
        ctx.save_for_backward(x_TI, left_abK, right_cSd, hidden_cST)
        return _second_product(hidden_cST, right_cSd, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TI, left_abK, right_cSd, hidden_cST = ctx.saved_tensors
        (a, b, width), (c, _, d), tokens = left_abK.shape, right_cSd.shape, x_TI.shape[0]
        needs_x, needs_left, needs_right, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # to be differentiated again: it depends on x and left
            hidden_cST = _shuffled(x_TI, left_abK, c)
        grad_cTd = grad_TO.reshape(tokens, c, d).transpose(0, 1)
        right = torch.bmm(hidden_cST, grad_cTd) if needs_right else None
        bias = grad_TO.sum(0) if needs_bias else None
        if not (needs_x or needs_left):
            return None, None, right, bias
        grad_cST = torch.bmm(right_cSd, grad_cTd.transpose(1, 2))
        first_aKT = (
            grad_cST.view(c, a, width // c, tokens).transpose(0, 1).reshape(a, width, tokens)
        )
        rows_aTK = first_aKT.transpose(1, 2)
        left = torch.bmm(x_TI.t().unflatten(0, (a, b)), rows_aTK) if needs_left else None
        x = torch.bmm(rows_aTK, left_abK.transpose(1, 2)).transpose(0, 1) if needs_x else None
        return None if x is None else x.reshape(tokens, a * b), left, right, bias


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
    blocks_acbd: Tensor, rank: int, tolerance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Approximate every block by its largest singular vectors, the best at that rank.

    Returns cores ``(1, a, b, c, R)`` and ``(R, c, a, d, 1)``, in float32 or wider, of about equal
    norm. Raises ``ValueError`` if an entry is not finite.

    Args:
        blocks_acbd: ``(a, c, b, d)``.
        rank: The rank that each block gets, cut where a block is smaller.
        tolerance: Bound on the relative Frobenius error of all blocks together: the smallest rank,
            at least one, that meets the bound replaces ``rank``.
    """
    wide = torch.promote_types(blocks_acbd.dtype, torch.float32)
    blocks = blocks_acbd.to(wide)
    if not bool(blocks.isfinite().all()):
        raise ValueError("the weight holds numbers that are not finite")
    u_acbk, s_ack, vh_ackd = torch.linalg.svd(blocks, full_matrices=False)
    if tolerance is not None:
        square = s_ack.double().square().sum((0, 1))
        left_out = square.sum() - square.cumsum(0)  # by rank 1, 2, ...
        allowed = max(tolerance, torch.finfo(wide).eps) ** 2 * square.sum()
        rank = 1 + int((left_out > allowed).sum())
    rank = min(rank, s_ack.shape[2])
    s_ack = s_ack[..., :rank]
    # Halved between both cores; but were both of them zero, neither would ever have a gradient.
    typical = s_ack.square().mean().sqrt()
    root_ack = s_ack.clamp(min=float(typical) * _LEAST or 1.0).sqrt()
    left = u_acbk[..., :rank] * root_ack[:, :, None]
    right = vh_ackd[:, :, :rank] * (s_ack / root_ack)[..., None]
    return left.permute(0, 2, 1, 3)[None], right.permute(2, 1, 0, 3)[..., None]
