"""TT-SVD: the tensor train nearest to a dense weight.

Written here rather than taken from tensorly because it needs an error bound instead of ranks, a
randomised factorisation for wide layers, and no process-wide choice of backend. tensorly's
``tensor_train`` is what the tests hold it to. Source: Oseledets, SIAM J. Sci. Comput. 33 (2011).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.shapes import TTMShape, TTShape, is_number

_OVERSAMPLE = 10
_POWER_ITERATIONS = 3
_RANDOMISED_BELOW = 0.2
"""A rank under this share of the smaller side is found by a randomised range finder."""


def check_weight(weight: Any, size: tuple[int, int], cut: bool) -> None:
    """Refuse what a layer cannot be given as its dense weight.

    Args:
        weight: The new dense weight, of whatever type the caller gave.
        size: Shape of the layer's weight.
        cut: Whether the ranks of the layer are all zero and stay so: it could hold nothing.

    Raises:
        TypeError: If it is no tensor.
        ValueError: If its shape is another one, or all ranks were cut.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight={weight!r} must be a tensor")
    if tuple(weight.shape) != size:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, that of this layer is {size}")
    if cut:
        raise ValueError(
            "all ranks of this layer were cut, its weight is zero: give a tolerance, by which new "
            "ones are chosen"
        )


def relative_error(made: Tensor, weight: Tensor) -> float:
    """Return the Frobenius norm of the difference, in units of the weight's."""
    exact = weight.double()
    size = float(exact.norm())
    off = float((made.double() - exact).norm())
    return off / size if size else off


def decompose_matrix(
    weight: Tensor, shape: TTShape, tolerance: float | None = None
) -> list[Tensor]:
    """Decompose an ``(out, in)`` weight; one narrower than the modes is padded with zeros."""
    check_tolerance(tolerance)
    padded = _pad(weight.T, shape.in_width, shape.out_width)
    ranks = None if tolerance is not None else shape.ranks
    return balance(tt_svd(padded.reshape(shape.slice_sizes), ranks, tolerance))


def decompose_table(
    weight: Tensor, shape: TTMShape, tolerance: float | None = None
) -> list[Tensor]:
    """Decompose a ``(rows, columns)`` table, each row mode paired with its column mode."""
    check_tolerance(tolerance)
    count = len(shape.row_modes)
    padded = _pad(weight, shape.num_rows, shape.num_cols)
    apart = padded.reshape(*shape.row_modes, *shape.col_modes)
    order = [axis for k in range(count) for axis in (k, count + k)]
    paired = apart.permute(order).reshape(shape.slice_sizes)
    ranks = None if tolerance is not None else shape.ranks
    cores = balance(tt_svd(paired, ranks, tolerance))
    modes = zip(shape.row_modes, shape.col_modes, strict=True)
    return [
        core.reshape(core.shape[0], p, q, core.shape[-1])
        for core, (p, q) in zip(cores, modes, strict=True)
    ]


def decompose_at(weight: Tensor, shape: TTShape, tolerance: float | None) -> list[Tensor]:
    """Decompose as :func:`decompose_matrix`, to the ranks of a shape even where fewer are exact."""
    cores = decompose_matrix(weight, shape, tolerance)
    return cores if tolerance is not None else widened(cores, shape.ranks)


def widened(cores: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Return cores whose inner bonds are as wide as asked for; what is added is zero.

    Args:
        cores: ``(left bond, mode(s), right bond)`` each.
        ranks: The inner bonds, none of them narrower than it is.
    """
    bonds, wide = [1, *ranks, 1], []
    for k, core in enumerate(cores):
        new = core.new_zeros(bonds[k], *core.shape[1:-1], bonds[k + 1])
        new[: core.shape[0], ..., : core.shape[-1]] = core
        wide.append(new)
    return wide


def tt_svd(
    tensor: Tensor, ranks: tuple[int, ...] | None = None, tolerance: float | None = None
) -> list[Tensor]:
    """Split a tensor into a train of 3-d cores, one a dimension, in float32 or better.

    Args:
        tensor: Any number of dimensions.
        ranks: The inner bonds; cut where a factor has fewer columns.
        tolerance: Instead of ranks: bound on the relative Frobenius error of the whole train. Below
            the precision of the dtype it counts as that, so that 0 finds the numerical ranks.

    Raises:
        ValueError: If the tensor holds a value that is not finite.
    """
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError("a weight with NaN or infinite entries cannot be decomposed")
    sizes = tensor.shape
    allowed = 0.0  # squares of errors, which add up: every cut is orthogonal to those before
    if tolerance is not None:
        allowed = (max(tolerance, 4 * torch.finfo(tensor.dtype).eps) * float(tensor.norm())) ** 2
    cores, left, rest = [], 1, tensor.reshape(1, -1)
    for k, size in enumerate(sizes[:-1]):
        rest = rest.reshape(left * size, -1)
        u, s = _leading_directions(rest, None if ranks is None else ranks[k])
        if ranks is None:  # an equal share for each bond to come of what is left
            rank, lost = _cut(s, allowed / (len(sizes) - 1 - k))
            allowed = max(0.0, allowed - lost)
        else:
            rank = min(ranks[k], len(s))
        cores.append(u[:, :rank].reshape(left, size, rank))
        left, rest = rank, u[:, :rank].T @ rest
    return [*cores, rest.reshape(left, sizes[-1], 1)]


def balance(cores: list[Tensor], sweeps: int = 2) -> list[Tensor]:
    """Scale every rank so that it weighs as much in the core before its bond as in the one after.

    TT-SVD leaves all of the norm in the last core; training wants it spread. The product of the
    cores is unchanged.
    """
    cores = list(cores)
    for _ in range(sweeps):
        for k in range(len(cores) - 1):
            before = cores[k].flatten(0, -2).norm(dim=0)
            after = cores[k + 1].flatten(1).norm(dim=1)
            usable = (before > 0) & (after > 0)
            scale = torch.where(usable, (after / before).sqrt(), 1.0)
            cores[k] = cores[k] * scale
            cores[k + 1] = (cores[k + 1].flatten(1) / scale[:, None]).reshape(cores[k + 1].shape)
    return cores


def _leading_directions(matrix: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Compute left singular vectors and singular values, largest first; at least ``rank`` of them.

    Randomised where only a few of many directions are wanted (Halko, Martinsson, Tropp, SIAM
    Review 53 (2011), algorithms 4.4 and 5.1); the draw has its own generator, so a conversion
    neither depends on the user's random state nor moves it. Through the Gram matrix in float64
    where a float32 matrix is much wider than high: squaring then costs no float32 digit.
    """
    rows, columns = matrix.shape
    if rank is not None and rank + _OVERSAMPLE <= _RANDOMISED_BELOW * min(rows, columns):
        generator = torch.Generator(matrix.device).manual_seed(0)
        size = (columns, rank + _OVERSAMPLE)
        probe = torch.randn(size, generator=generator, device=matrix.device, dtype=matrix.dtype)
        basis = torch.linalg.qr(matrix @ probe).Q
        for _ in range(_POWER_ITERATIONS):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
        u, s = _leading_directions(basis.T @ matrix, None)
        return basis @ u, s
    if matrix.dtype == torch.float32 and columns >= 4 * rows:
        wide = matrix.double()
        squares, u = torch.linalg.eigh(wide @ wide.T)
        s = squares.flip(0).clamp_min(0).sqrt()
        return u.flip(1).to(matrix.dtype), s.to(matrix.dtype)
    u, s, _ = torch.linalg.svd(matrix, full_matrices=False)
    return u, s


def _cut(singular_values: Tensor, allowed: float) -> tuple[int, float]:
    """Find the smallest rank from one that loses ``allowed`` of a squared norm; its loss too."""
    tail = singular_values.double().square().flip(0).cumsum(0).flip(0)
    rank = max(1, int((tail > allowed).sum()))
    return rank, float(tail[rank]) if rank < len(tail) else 0.0


def _pad(matrix: Tensor, rows: int, cols: int) -> Tensor:
    missing = (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])
    return torch.nn.functional.pad(matrix, missing) if any(missing) else matrix


def check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not (is_number(tolerance) and 0 <= tolerance < 1):
        raise ValueError(f"tolerance={tolerance!r} must be in [0, 1): a relative Frobenius error")
