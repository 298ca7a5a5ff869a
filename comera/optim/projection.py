"""Find the subspaces in which GaLore trains a matrix, and project gradients in and steps out.

Leading singular vectors of the gradient span a subspace. The bases are ``left (M, R)`` and
``right (R, N)``, where M and N are the gradient's rows and columns and R is the rank.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

ProjType = Literal["std", "full"]
PROJ_TYPES = get_args(ProjType)


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor taken as a matrix: its first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // max(1, rows)


def basis_shapes(tensor: Tensor, rank: int, proj_type: ProjType) -> dict[str, tuple[int, int]]:
    """Return the shapes of the bases: for the shorter side (``std``) or for both (``full``)."""
    rows, columns = matrix_shape(tensor)
    shapes = {"left": (rows, rank), "right": (rank, columns)}
    if proj_type == "std":
        del shapes["right" if rows < columns else "left"]
    return shapes


def low_shape(tensor: Tensor, rank: int, proj_type: ProjType) -> tuple[int, int]:
    """Return the shape of a gradient projected into the subspace."""
    rows, columns = matrix_shape(tensor)
    bases = basis_shapes(tensor, rank, proj_type)
    return rank if "left" in bases else rows, rank if "right" in bases else columns


def new_bases(grad_MN: Tensor, rank: int, proj_type: ProjType, seed: int) -> dict[str, Tensor]:
    """Compute orthonormal bases of a gradient's leading subspaces, in float32 or wider.

    A randomized range finder with one power iteration (Halko, Martinsson and Tropp, arXiv
    0909.4061, algorithm 4.4) is many times faster than a singular value decomposition. ``rank`` is
    below both sides of the matrix; ``seed`` is that of the sketch, not of torch's random state.
    """
    shapes = basis_shapes(grad_MN, rank, proj_type)
    grad_MN = _widened(grad_MN)
    if grad_MN.is_meta:  # no numbers, but the shapes are right for counting memory
        return {side: grad_MN.new_empty(shape) for side, shape in shapes.items()}
    bases = {}
    with torch.autocast(grad_MN.device.type, enabled=False):
        generator = torch.Generator(grad_MN.device).manual_seed(seed)
        if "left" in shapes:
            bases["left"] = _range(grad_MN, rank, generator)
        if "right" in shapes:
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
    """Map a step in the subspace back to a step of the whole matrix."""
    if "left" in bases:
        low = bases["left"] @ low
    if "right" in bases:
        low = low @ bases["right"]
    return low


def add_out_of_(param: Tensor, low: Tensor, bases: dict[str, Tensor]) -> None:
    """Add ``out_of(low)`` to ``param``, if possible without allocating the whole step."""
    if param.dtype != low.dtype or not param.is_contiguous():
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
    width = min(rank + 8, *grad_MN.shape)  # some more than are kept
    sketch = torch.randn(grad_MN.shape[1], width, generator=generator, device=grad_MN.device)
    basis = torch.linalg.qr(grad_MN @ sketch.to(grad_MN.dtype)).Q
    basis = torch.linalg.qr(grad_MN.T @ basis).Q
    basis = torch.linalg.qr(grad_MN @ basis).Q
    # the leading directions within the sketch, from a small symmetric problem
    inner = basis.T @ grad_MN
    _, vectors = torch.linalg.eigh(inner @ inner.T)
    return basis @ vectors.flip(1)[:, :rank]
