"""The subspaces GaLore trains in: where they come from, and the way in and out.

GaLore (arXiv 2403.03507) keeps the moments of a matrix in the span of its gradient's leading
singular vectors. Shape suffixes: M and N = rows and columns of the gradient, R = rank.
"""

from typing import Literal

import torch
from torch import Tensor

ProjType = Literal["std", "reverse_std", "left", "right", "full", "random"]
PROJ_TYPES = ("std", "reverse_std", "left", "right", "full", "random")

_OVERSAMPLING = 8
_POWER_ITERATIONS = 1


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor taken as a matrix: its first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // max(1, rows)


def sides(shape: tuple[int, int], proj_type: ProjType) -> tuple[bool, bool]:
    """Tell whether a matrix is projected from the left (rows become R) and from the right.

    ``std`` projects the shorter side, so that the moments are as small as can be, as does
    ``random``; ``reverse_std`` the longer one. It depends on the shape alone and never changes.
    """
    rows, columns = shape
    if proj_type == "full":
        return True, True
    if proj_type in ("left", "right"):
        return proj_type == "left", proj_type == "right"
    shorter_is_rows = rows < columns
    left = not shorter_is_rows if proj_type == "reverse_std" else shorter_is_rows
    return left, not left


def low_shape(shape: tuple[int, int], rank: int, proj_type: ProjType) -> tuple[int, int]:
    """Return the shape of the projected gradient."""
    left, right = sides(shape, proj_type)
    return rank if left else shape[0], rank if right else shape[1]


def basis_shapes(
    shape: tuple[int, int], rank: int, proj_type: ProjType
) -> dict[str, tuple[int, int]]:
    """Return the shapes of the bases, ``left`` and/or ``right``."""
    left, right = sides(shape, proj_type)
    shapes = {"left": (shape[0], rank)} if left else {}
    return shapes | ({"right": (rank, shape[1])} if right else {})


def new_bases(grad_MN: Tensor, rank: int, proj_type: ProjType, seed: int) -> dict[str, Tensor]:
    """Find orthonormal bases of the leading subspaces of a gradient, in float32 or wider.

    By a randomized range finder with one power iteration (Halko, Martinsson and Tropp, arXiv
    0909.4061, algorithm 4.4), many times faster than a singular value decomposition.

    Args:
        grad_MN: Any floating dtype; everything is computed in float32 or wider, autocast off.
        rank: Columns of each basis, below the sides it stands for.
        proj_type: From which sides to project, as :func:`sides` names them; ``random`` takes a
            random subspace, not the leading one.
        seed: Seed of what is random; torch's own random state is left alone.

    Returns:
        ``left (M, R)`` and/or ``right (R, N)``.
    """
    rows, columns = grad_MN.shape
    left, right = sides((rows, columns), proj_type)
    if grad_MN.is_meta:  # no numbers: their shapes, for who counts memory
        wide, shapes = _widened(grad_MN), basis_shapes((rows, columns), rank, proj_type)
        return {side: wide.new_empty(shape) for side, shape in shapes.items()}
    with torch.autocast(grad_MN.device.type, enabled=False):
        grad_MN = _widened(grad_MN)
        generator = torch.Generator(grad_MN.device).manual_seed(seed)
        bases: dict[str, Tensor] = {}
        if proj_type == "random":
            if left:
                bases["left"] = _random(grad_MN.shape[0], rank, grad_MN, generator)
            if right:
                bases["right"] = _random(grad_MN.shape[1], rank, grad_MN, generator).T.contiguous()
        else:
            if left:
                bases["left"] = _range(grad_MN, rank, generator)
            if right:
                bases["right"] = _range(grad_MN.T, rank, generator).T.contiguous()
    return bases


def into(grad_MN: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Project a gradient into the subspace, in float32 or wider."""
    grad_MN = _widened(grad_MN)
    if "left" in bases:
        grad_MN = bases["left"].T @ grad_MN
    if "right" in bases:
        grad_MN = grad_MN @ bases["right"].T
    return grad_MN


def out_of(low: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Take a step in the subspace back to one of the whole matrix."""
    if "left" in bases:
        low = bases["left"] @ low
    if "right" in bases:
        low = low @ bases["right"]
    return low


def add_out_of_(param: Tensor, low: Tensor, bases: dict[str, Tensor]) -> None:
    """Add ``out_of(low)`` to ``param``, the whole step never laid out where that can be."""
    if param.dtype != low.dtype or not param.is_contiguous() or not bases:
        param.add_(out_of(low, bases).reshape(param.shape).to(param.dtype))
    elif "right" in bases:
        left = bases["left"] @ low if "left" in bases else low
        param.view(left.shape[0], -1).addmm_(left, bases["right"])
    else:
        param.view(-1, low.shape[1]).addmm_(bases["left"], low)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _range(grad_MN: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Approximate the leading left singular vectors, ``(M, R)``."""
    width = min(rank + _OVERSAMPLING, *grad_MN.shape)
    sketch = torch.randn(grad_MN.shape[1], width, generator=generator, device=grad_MN.device)
    sketch = sketch.to(grad_MN.dtype)
    basis = torch.linalg.qr(grad_MN @ sketch).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(grad_MN.T @ basis).Q
        basis = torch.linalg.qr(grad_MN @ basis).Q
    # the leading directions within the sketch, from a small symmetric problem
    inner = basis.T @ grad_MN
    _, vectors = torch.linalg.eigh(inner @ inner.T)
    return basis @ vectors.flip(1)[:, :rank]


def _random(size: int, rank: int, like: Tensor, generator: torch.Generator) -> Tensor:
    normal = torch.randn(size, rank, generator=generator, device=like.device)
    return torch.linalg.qr(normal.to(like.dtype)).Q
