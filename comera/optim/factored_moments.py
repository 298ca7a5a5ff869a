"""Second moments of a matrix kept as row and column means, and CAME's update made of them.

The tensors come as matrices stacked along a first dimension: b = matrices, r = rows, c = columns,
f = r + c, the row means followed by the column means. Everything is computed in the dtype of the
moments; nothing is read back to the host.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.dispatch import is_eager

_BLOCK = {"cpu": 1 << 20}
"""Entries updated at a time, which bounds the work space: on a CPU what stays in its cache."""
_DEFAULT_BLOCK = 1 << 26


@dataclass(frozen=True)
class Settings:
    """One step's settings; names as in :class:`comera.CAME`, ``lr`` with the sign of descent."""

    lr: float | Tensor
    betas: tuple[float, float, float]
    eps: tuple[float, float]
    clip_threshold: float
    weight_decay: float
    maximize: bool

    @property
    def keep(self) -> float | Tensor:
        """Return the share of a parameter that weight decay leaves."""
        return 1 - self.lr * self.weight_decay if self.weight_decay else 1.0


@dataclass(frozen=True)
class Corrections:
    """Factors, ``(b, 1)``, that undo the start of the means at zero.

    Attributes:
        update: Factor of u, for the mean of squared gradients.
        mean: Factor of the step, for the mean of u.
        residual: Factor of the step, for the mean of ``(u - mean of u)^2``.
    """

    update: Tensor
    mean: Tensor
    residual: Tensor

    @classmethod
    def at(cls, steps_b: Tensor, betas: tuple[float, float, float]) -> "Corrections":
        """Return the corrections in the step that is number ``steps_b`` of each matrix, from 1."""
        first, square, residual = (1 - beta ** steps_b.unsqueeze(1) for beta in betas)
        return cls(square.sqrt(), 1 / first, residual.sqrt())


def matrix_view(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the rows and columns of the matrix as which a tensor's second moments are factored.

    The dimensions are split in order where rows + columns is least, so that the factors are small
    for any order of dimensions: ``(30, 8, 1)`` is a ``30 x 8`` matrix, ``(64, 3, 3, 3)`` is
    ``64 x 27``.

    Returns:
        ``(rows, columns)``; None where the two pairs of factors would not be smaller than the
        tensor, as for vectors, matrices with one row or column, and tiny ones.
    """
    pairs = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    if not pairs:
        return None
    rows, columns = min(pairs, key=sum)
    return (rows, columns) if 2 * (rows + columns) < rows * columns else None


def product(factors_bf: Tensor, rows: int) -> Tensor:
    """Return the matrices ``(b, r, c)`` of row and column means: ``row * column / mean``."""
    row, column = factors_bf[:, :rows], factors_bf[:, rows:]
    share = row / row.mean(1, keepdim=True)
    return share.nan_to_num(0.0).unsqueeze(2) * column.unsqueeze(1)


def means(full_brc: Tensor) -> Tensor:
    """Return row means followed by column means, ``(b, f)``."""
    return torch.cat([full_brc.mean(2), full_brc.mean(1)], 1)


def factored_step_(
    param_brc: Tensor,
    grad_brc: Tensor,
    update_avg_brc: Tensor,
    square_bf: Tensor,
    residual_bf: Tensor,
    settings: Settings,
    corrections: Corrections | None = None,
) -> None:
    """Take one step of CAME on matrices, in place.

    Args:
        param_brc: Parameters of any floating dtype; changed in the dtype of the moments and
            rounded once.
        grad_brc: Gradients of any floating dtype; only read.
        update_avg_brc: Mean of the clipped updates u.
        square_bf: Row and column means of the squared gradients.
        residual_bf: Row and column means of ``(u - mean of u)^2``.
        settings: Settings of this step.
        corrections: Bias corrections of the means; none as in came-pytorch.
    """
    beta1, beta2, beta3 = settings.betas
    batch, rows, columns = grad_brc.shape
    blocks = _blocks(grad_brc)
    most = max(block.stop - block.start for block in blocks)
    work_brc = square_bf.new_empty(batch, most, columns)

    def part_of(block: slice) -> Tensor:
        return work_brc[:, : block.stop - block.start]

    squares = _Means(square_bf, rows)
    for block in blocks:
        grad = grad_brc[:, block].to(square_bf.dtype)
        squares.add(block, torch.mul(grad, grad, out=part_of(block)))
    square_bf.lerp_(squares.total() + settings.eps[0], 1 - beta2)
    row, column = _inverse_roots(square_bf, rows)
    if corrections is not None:
        row = row * corrections.update.unsqueeze(2)

    # u = row * gradient * column / max(1, its root mean square / clip_threshold). The norm is
    # taken before the rows are scaled, so that a huge factor meets its zeros before it is squared.
    norms = []
    for block in blocks:
        part = torch.mul(grad_brc[:, block], column, out=part_of(block))
        norms.append(torch.linalg.vector_norm(part, dim=2, keepdim=True))
    norm = torch.linalg.vector_norm(torch.cat(norms, 1) * row, dim=1, keepdim=True)
    row = row / (norm / (math.sqrt(rows * columns) * settings.clip_threshold)).clamp(min=1.0)
    if settings.maximize:
        row = -row

    residuals = _Means(residual_bf, rows)
    for block in blocks:
        part = part_of(block)
        if len(blocks) > 1:  # one block's part is still there
            torch.mul(grad_brc[:, block], column, out=part)
        average = update_avg_brc[:, block]
        torch.addcmul(average, part, row[:, block], value=-1, out=part)  # mean - u
        average.add_(part, alpha=beta1 - 1)
        residuals.add(block, torch.mul(part, part, out=part))
    # u - new mean = beta1 * (u - old mean)
    residual_bf.lerp_(residuals.total() * beta1**2 + settings.eps[1], 1 - beta3)

    row, column = _inverse_roots(residual_bf, rows)
    row = row * -settings.lr
    if corrections is not None:
        row = row * (corrections.mean * corrections.residual).unsqueeze(2)
    for block in blocks:
        part = torch.mul(update_avg_brc[:, block], column, out=part_of(block))
        _step_to_(param_brc[:, block], part, row[:, block], settings)


def plain_step_(
    param_bn: Tensor,
    grad_bn: Tensor,
    update_avg_bn: Tensor,
    square_bn: Tensor,
    settings: Settings,
    corrections: Corrections | None = None,
) -> None:
    """Take one step of CAME on tensors that are not factored: without the confidence term."""
    beta1, beta2, _ = settings.betas
    grad_bn = grad_bn.to(square_bn.dtype)
    square_bn.lerp_(grad_bn.square() + settings.eps[0], 1 - beta2)
    update = square_bn.rsqrt() * grad_bn
    if corrections is not None:
        update = update * corrections.update
    norm = torch.linalg.vector_norm(update, dim=1, keepdim=True)
    clip = (norm / (math.sqrt(grad_bn.shape[1]) * settings.clip_threshold)).clamp(min=1.0)
    if settings.maximize:
        clip = -clip
    update_avg_bn.lerp_(update / clip, 1 - beta1)
    one = torch.ones_like(clip) if corrections is None else corrections.mean
    _step_to_(param_bn, update_avg_bn, one * -settings.lr, settings)


def _step_to_(param: Tensor, direction: Tensor, scale: Tensor, settings: Settings) -> None:
    """Set param to ``keep * param + direction * scale``, in direction's dtype, rounded once."""
    if param.dtype == direction.dtype:
        if settings.weight_decay:
            param.mul_(settings.keep)
        param.addcmul_(direction, scale)
    else:
        wide = param.to(direction.dtype) * settings.keep
        param.copy_(torch.addcmul(wide, direction, scale))


class _Means:
    """Row and column means of a matrix whose rows come block by block."""

    def __init__(self, like_bf: Tensor, rows: int) -> None:
        self._rows: list[Tensor] = []
        self._columns = torch.zeros_like(like_bf[:, rows:])
        self._num_rows = rows

    def add(self, block: slice, part_brc: Tensor) -> None:
        self._rows.append(part_brc.mean(2))
        self._columns += part_brc.sum(1)

    def total(self) -> Tensor:
        return torch.cat([*self._rows, self._columns / self._num_rows], 1)


def _inverse_roots(factors_bf: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``1 / sqrt`` of the matrix of the factors, as ``(b, r, 1)`` and ``(b, 1, c)``."""
    roots = factors_bf.rsqrt()
    size = factors_bf[:, :rows].mean(1, keepdim=True).sqrt()
    return (roots[:, :rows] * size).unsqueeze(2), roots[:, rows:].unsqueeze(1)


def _blocks(tensor_brc: Tensor) -> list[slice]:
    """Return slices of the rows that are updated at a time."""
    batch, rows, columns = tensor_brc.shape
    if not is_eager():  # the compiler blocks its own loops
        return [slice(0, rows)]
    most = _BLOCK.get(tensor_brc.device.type, _DEFAULT_BLOCK)
    count = min(rows, -(-batch * rows * columns // most))
    bounds = [rows * k // count for k in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


BLOCK = 256
SMALLEST = 4096
"""Tensors of fewer entries stay in full: they weigh nothing and are often sensitive."""

_AT_A_TIME = {"cpu": 1 << 18}
_DEFAULT_AT_A_TIME = 1 << 24
"""Entries packed at a time, which bounds the work space."""


def pack(values_bn: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float32 values to codes ``(b, n)`` int8 and scales ``(b, k)`` float32.

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
    """Return the values ``(b, n)`` float32 that codes and scales stand for."""
    values = _in_blocks(codes_bn) * (scales_bk / 127).unsqueeze(2)
    return values.flatten(1)[:, : codes_bn.shape[1]].contiguous()


def _spans(blocks_bkn: Tensor) -> list[slice]:
    """Return slices of the blocks that are packed at a time."""
    batch, count, size = blocks_bkn.shape
    most = _AT_A_TIME.get(blocks_bkn.device.type, _DEFAULT_AT_A_TIME)
    step = max(1, most // (batch * size))
    if not is_eager():  # the compiler needs no work space
        step = count
    return [slice(start, start + step) for start in range(0, count, step)]


def _in_blocks(values_bn: Tensor) -> Tensor:
    """Lay out as ``(b, k, 256)``, filled up with zeros."""
    missing = -values_bn.shape[1] % BLOCK
    return (F.pad(values_bn, (0, missing)) if missing else values_bn).unflatten(1, (-1, BLOCK))
