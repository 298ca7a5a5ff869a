"""Decompose dense weights to tensor trains by TT-SVD, and bring trains into canonical form.

Sources: Oseledets, SIAM J. Sci. Comput. 33 (2011); of the canonical form also Vidal,
quant-ph/0301063.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.shapes import TTMShape, TTShape, check_tolerance

_OVERSAMPLE = 10
_POWER_ITERATIONS = 3
_RANDOMISED_BELOW = 0.2
"""Ranks below this share of the smaller side are found by a randomised method."""


def decompose_matrix(
    weight: Tensor, shape: TTShape, tolerance: float | None = None
) -> list[Tensor]:
    """Decompose an ``(out, in)`` weight, padded with zeros to the modes, by TT-SVD."""
    padded = _pad(weight.T, shape.in_width, shape.out_width)
    return _balanced_train(padded.reshape(shape.slice_sizes), shape.ranks, tolerance)


def decompose_table(
    weight: Tensor, shape: TTMShape, tolerance: float | None = None
) -> list[Tensor]:
    """Decompose a ``(rows, columns)`` table by TT-SVD into a core for each pair of modes."""
    count = len(shape.row_modes)
    padded = _pad(weight, shape.num_rows, shape.num_cols)
    apart = padded.reshape(*shape.row_modes, *shape.col_modes)
    order = [axis for k in range(count) for axis in (k, count + k)]
    paired = apart.permute(order).reshape(shape.slice_sizes)
    cores = _balanced_train(paired, shape.ranks, tolerance)
    modes = zip(shape.row_modes, shape.col_modes, strict=True)
    return [
        core.reshape(core.shape[0], p, q, core.shape[-1])
        for core, (p, q) in zip(cores, modes, strict=True)
    ]


def _balanced_train(
    tensor: Tensor, ranks: tuple[int, ...], tolerance: float | None
) -> list[Tensor]:
    peak = float(tensor.abs().max())
    if peak == 0 or not math.isfinite(peak) or 1e-12 < peak < 1e12:
        return balance(tt_svd(tensor, ranks, tolerance))
    # Squares of larger numbers are more than float32 holds, those of smaller ones nothing.
    exponent, count = math.frexp(peak)[1], tensor.dim()
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    cores = balance(tt_svd(torch.ldexp(wide, torch.tensor(-exponent)), ranks, tolerance))
    shares = (exponent // count + (k < exponent % count) for k in range(count))
    return [
        torch.ldexp(core, torch.tensor(share)) for core, share in zip(cores, shares, strict=True)
    ]


def widened(cores: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Pad cores ``(left bond, mode(s), right bond)`` with zeros to these inner ranks."""
    bonds, wide = [1, *ranks, 1], []
    for k, core in enumerate(cores):
        new = core.new_zeros(bonds[k], *core.shape[1:-1], bonds[k + 1])
        new[: core.shape[0], ..., : core.shape[-1]] = core
        wide.append(new)
    return wide


def tt_svd(
    tensor: Tensor, ranks: tuple[int, ...] | None = None, tolerance: float | None = None
) -> list[Tensor]:
    """Split a tensor into a tensor train with a 3-d core for each dimension, at least in float32.

    Inner ``ranks`` are reduced where the tensor allows no more. ``tolerance``, which replaces them,
    bounds the relative Frobenius error of the whole train; it is at least the rounding of the
    decomposition, so that 0 finds the numerical ranks. Raises ``ValueError`` if an entry is not
    finite.
    """
    check_tolerance(tolerance)
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError("a weight with NaN or infinite entries cannot be decomposed")
    sizes = tensor.shape
    allowed = 0.0  # squares of errors, which add up: every cut is orthogonal to those before
    if tolerance is not None:
        ranks = None
        # Singular values that are zero come out as eps each, times some 0.6.
        least = 2 * tensor.numel() ** 0.25 * torch.finfo(tensor.dtype).eps
        allowed = (max(tolerance, least) * float(tensor.norm())) ** 2
    cores, left, rest = [], 1, tensor.reshape(1, -1)
    with without_autocast(tensor):
        for k, size in enumerate(sizes[:-1]):
            rest = rest.reshape(left * size, -1)
            u, s = _leading_directions(rest, None if ranks is None else ranks[k])
            if ranks is None:  # the remaining error is shared equally by the remaining bonds
                tail = s.double().square().flip(0).cumsum(0).flip(0)  # lost by a cut at each rank
                rank = max(1, int((tail > allowed / (len(sizes) - 1 - k)).sum()))
                allowed = max(0.0, allowed - float(tail[rank])) if rank < len(tail) else allowed
            else:
                rank = min(ranks[k], len(s))
            cores.append(u[:, :rank].reshape(left, size, rank))
            left, rest = rank, u[:, :rank].T @ rest
    return [*cores, rest.reshape(left, sizes[-1], 1)]


def canonical(cores: Sequence[Tensor], split: int) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return cores of the same product in canonical form, and each bond's singular values.

    Of at least two cores ``(left bond, mode, right bond)`` the first ``split`` become orthonormal
    over everything but their right bond, the others over everything but their left bond. Each is
    then scaled; both sides of the bond between the two parts get the roots of its singular values.
    Bonds are no wider than either side allows. None if the product is zero or not finite.
    """
    left = _orthonormal_to_the_right(cores[:split])
    right = _mirrored(_orthonormal_to_the_right(_mirrored(cores[split:])))
    # All else is orthonormal towards the middle bond, so the singular values of this matrix are
    # those of the whole weight there.
    middle = left.pop().flatten(1) @ right.pop(0).flatten(1)
    if not bool(middle.isfinite().all()) or not bool(middle.any()):
        return None
    u, s, vh = torch.linalg.svd(middle, full_matrices=False)
    left[-1] = left[-1] @ u
    right[0] = (vh @ right[0].flatten(1)).reshape(-1, *right[0].shape[1:])
    # From the middle outwards, each bond by the singular values of the one before it.
    left, before = _by_singular_vectors(left, s)
    right, behind = _by_singular_vectors(_mirrored(right), s)
    right = _mirrored(right)
    left[-1] = left[-1] * s.sqrt()
    right[0] = right[0] * s.sqrt()[:, None, None]
    return scaled_as(cores, [*left, *right]), [*before[::-1], s, *behind]


def _orthonormal_to_the_right(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return cores of the same product, orthonormal towards the right, and a last remainder."""
    done, rest = [], cores[0].new_ones(1, 1)
    for core in cores:
        core = (rest @ core.flatten(1)).reshape(-1, *core.shape[1:])
        q, rest = torch.linalg.qr(core.flatten(0, 1))
        done.append(q.reshape(core.shape[0], -1, q.shape[1]))
    return [*done, rest[:, None]]


def _by_singular_vectors(cores: Sequence[Tensor], s: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rotate inner bonds to singular vectors; return cores and, from the right, singular values."""
    cores, found = list(cores), []
    for k in range(len(cores) - 1, 0, -1):
        u, s, _ = torch.linalg.svd((cores[k] * s).flatten(1), full_matrices=False)
        cores[k] = (u.T @ cores[k].flatten(1)).reshape(-1, *cores[k].shape[1:])
        cores[k - 1] = cores[k - 1] @ u
        found.append(s)
    return cores, found


def scaled_as(like: Sequence[Tensor], cores: Sequence[Tensor]) -> list[Tensor]:
    theirs, mine = ([core.norm().log() for core in train] for train in (like, cores))
    rest = (sum(mine) - sum(theirs)) / len(cores)
    return [core * (a - b + rest).exp() for a, b, core in zip(theirs, mine, cores, strict=True)]


def _mirrored(cores: Sequence[Tensor]) -> list[Tensor]:
    return [core.transpose(0, 2) for core in reversed(cores)]


def rank_shares(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return for every bond the share of each rank in the product's squared norm.

    Cores are ``(left bond, mode, right bond)``.
    """
    left, right = _grams(cores), _grams(_mirrored(cores))[::-1]
    total = float((left[0] * right[0]).sum()) if left else 0.0
    pairs = zip(left, right, strict=True)
    return [a.diagonal() * b.diagonal() / max(total, 1e-300) for a, b in pairs]


def _grams(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return the Gram matrix of each bond's ranks over the contracted cores before the bond."""
    gram, out = cores[0].new_ones(1, 1), []
    for core in cores[:-1]:
        gram = torch.einsum("lm,lnr,mns->rs", gram, core, core)
        out.append(gram)
    return out


def balance(cores: list[Tensor]) -> list[Tensor]:
    """Scale each rank so that its slices of both adjacent cores have equal norm."""
    cores = list(cores)
    for _ in range(2):
        for k in range(len(cores) - 1):
            before = cores[k].flatten(0, -2).norm(dim=0)
            after = cores[k + 1].flatten(1).norm(dim=1)
            usable = (before > 0) & (after > 0)
            scale = torch.where(usable, (after / before).sqrt(), 1.0)
            cores[k] = cores[k] * scale
            cores[k + 1] = (cores[k + 1].flatten(1) / scale[:, None]).reshape(cores[k + 1].shape)
    return cores


def _leading_directions(matrix: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Compute at least ``rank`` left singular vectors and singular values, largest first.

    If ``rank`` is small, they come from a randomised SVD (Halko, Martinsson, Tropp, SIAM Review 53
    (2011), algorithms 4.4 and 5.1) with a fixed seed. A float32 matrix much wider than high is
    factorised through its Gram matrix in float64, without loss of precision.
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


def _pad(matrix: Tensor, rows: int, cols: int) -> Tensor:
    missing = (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])
    return torch.nn.functional.pad(matrix, missing) if any(missing) else matrix
