"""The best matrix of a rank where errors are weighed by a layer's data, not by its weight alone.

To second order, and with inputs and gradients taken for independent, an error E of a weight raises
the loss by half of ``tr(G E C E^T)``: C and G are the second moments of the layer's inputs and of
the loss' gradients at its outputs. So the truncated SVD of ``G^(1/2) W C^(1/2)`` is the best of its
rank, and squares of singular values are comparable from layer to layer. Sources: SVD-LLM (arXiv
2403.07378, 2503.12340) for C, K-FAC (arXiv 1503.05671) for both.

Shape suffixes: I = input width, O = output width, K = singular values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from comera.compress.layer_moments import Moments

_SMALLEST = 1e-12
"""Share of the largest eigenvalue that a smaller one counts as."""


class WhitenedSVD(NamedTuple):
    """A weight by its directions, the dearest first; the first r of them make the best of rank r.

    Attributes:
        left_OK: With the scale of each direction.
        right_KI: What the inputs meet.
        losses_K: By how much the loss rises without the direction, as predicted.
    """

    left_OK: Tensor
    right_KI: Tensor
    losses_K: Tensor

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return ``(O, rank)`` and ``(rank, I)``, equally large; their product is the weight."""
        left, right = self.left_OK[:, :rank], self.right_KI[:rank]
        sizes = (left.norm(dim=0), right.norm(dim=1))
        scale = torch.where(sizes[0] > 0, (sizes[1] / sizes[0]).sqrt(), 1.0)
        return left * scale, right / scale[:, None]


def whitened_svd(
    weight: Tensor, moments: Moments | None, damping: float = 1e-4, grad_damping: float = 1e-3
) -> WhitenedSVD:
    """Decompose a weight in the coordinates in which every error counts the same.

    By eigenvectors in float64, which needs no Cholesky factor to exist: moments of fewer rows than
    columns are singular.

    Args:
        weight: ``(O, I)``.
        moments: Those of the layer; None weighs all entries alike, a plain SVD.
        damping: What is added to the moments of inputs, as a share of their mean variance.
        grad_damping: The same for gradients.

    Raises:
        ValueError: If the weight has an entry that is not finite.
    """
    wide = weight.detach().double()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("a weight with NaN or infinite entries cannot be decomposed")
    if moments is None:
        u, s, v = torch.linalg.svd(wide, full_matrices=False)
        return WhitenedSVD(u * s, v, s.square())
    inputs, undo_inputs = _roots(moments.inputs_II, damping)
    grads, undo_grads = _roots(moments.grads_OO, grad_damping)
    u, s, v = torch.linalg.svd(grads @ wide @ inputs, full_matrices=False)
    return WhitenedSVD(undo_grads @ (u * s), v @ undo_inputs, s.square() / 2)


def _roots(moments: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the symmetric square root of a matrix of moments, and its inverse."""
    wide = moments.double()
    mean = wide.diagonal().mean()
    if not mean > 0:  # a layer that sees nothing but zeros, or that the loss does not depend on
        same = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
        return same * 1e-12, same * 1e12
    wide = wide + damping * mean * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    values, vectors = torch.linalg.eigh(wide)
    roots = values.clamp_min(values[-1] * _SMALLEST).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
