"""Compute the best low-rank matrix when errors are weighted by a layer's data.

To second order, for independent inputs and gradients, an error E of a weight raises the loss by
half of ``tr(G E C E^T)``: C and G are the second moments of the layer's inputs and of
the loss' gradients at its outputs. With Cholesky roots ``C = L L^T`` and ``G = H H^T`` the
truncated SVD of ``H^T W L`` is the best of its rank, and squared singular values are comparable
from layer to layer. These squares are eigenvalues of the smaller of ``H^T (W C W^T) H`` and
``L^T (W^T G W) L``, which needs only one Cholesky root. Sources: SVD-LLM (arXiv 2403.07378,
2503.12340) for C, K-FAC (arXiv 1503.05671) for both.

Shape suffixes: I = input width, O = output width, K = the smaller of the two.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comera.compress.layer_moments import LayerMoments

_SMALLEST = 1e-12
"""Share of the mean variance that is added where a matrix of moments has no Cholesky root, ten
times as much at each further try; it also replaces moments that are all zero."""
_DAMPING, _GRAD_DAMPING = 1e-4, 1e-3
"""Damping of the moments of inputs and of gradients, as shares of their mean variances."""


@dataclass(frozen=True)
class WhitenedSVD:
    """SVD of ``H^T W L``, a weight in whitened coordinates; r directions give the best rank r.

    The first r columns of ``span_KK`` span the space that rank r keeps; ``dual_KK`` is the inverse
    of its transpose. ``losses_K`` are the predicted rises of the loss without each direction.
    """

    weight_OI: Tensor
    span_KK: Tensor
    dual_KK: Tensor
    losses_K: Tensor

    @torch.no_grad()
    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return ``(O, rank)`` and ``(rank, I)`` of equal norms; their product is the weight."""
        span, dual = self.span_KK[:, :rank], self.dual_KK[:, :rank]
        weight = self.weight_OI.detach().to(span.dtype)
        is_tall = weight.shape[0] > weight.shape[1]
        left, right = (weight @ dual, span.T) if is_tall else (span, dual.T @ weight)
        sizes = left.norm(dim=0), right.norm(dim=1)
        scale = torch.where((sizes[0] > 0) & (sizes[1] > 0), (sizes[1] / sizes[0]).sqrt(), 1.0)
        return left * scale, right / scale[:, None]

    def loss(self, rank: int) -> float:
        """Return the predicted rise of the loss if the first ``rank`` directions are kept."""
        return float(self.losses_K[rank:].sum())


@torch.no_grad()
def whitened_svd(
    weight: Tensor,
    moments: LayerMoments | None,
    damping: float = _DAMPING,
    grad_damping: float = _GRAD_DAMPING,
) -> WhitenedSVD:
    """Compute the SVD of a weight ``(O, I)`` in whitened coordinates, in float64.

    If ``moments`` is None, all entries weigh alike. ``damping`` is added to the moments of inputs,
    as a share of their mean variance, ``grad_damping`` likewise to those of gradients. Returns the
    decomposition on the weight's device, in its dtype or float32, whichever is wider. Raises
    ``ValueError`` if the weight or the moments have an entry that is not finite.
    """
    wide = weight.detach().double()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("a weight with NaN or infinite entries cannot be decomposed")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    out_features, in_features = wide.shape
    mine = wide.T if out_features > in_features else wide  # (K, the larger side)
    if moments is None:
        values, vectors = torch.linalg.eigh(mine @ mine.T)
        span = vectors.flip(1).to(dtype)
        return WhitenedSVD(weight, span, span, values.flip(0).clamp_min(0))
    inputs = _damped(_expected(moments), damping)
    grads = _damped(moments.grads_OO, grad_damping)
    near, far = (inputs, grads) if out_features > in_features else (grads, inputs)
    root = _cholesky(near) if near.dim() > 1 else near.sqrt().diag()
    weighed = mine @ far if far.dim() > 1 else mine * far
    values, vectors = torch.linalg.eigh(root.T @ (weighed @ mine.T) @ root)
    vectors = vectors.flip(1)
    span = torch.linalg.solve_triangular(root.T, vectors, upper=True)
    losses = values.flip(0).clamp_min(0) / 2
    return WhitenedSVD(weight, span.to(dtype), (root @ vectors).to(dtype), losses)


def _expected(moments: LayerMoments) -> Tensor:
    """Return the moments of inputs; for a table the expected share of reads of each row.

    By the Good-Turing estimate, all rows that were never read get together as many reads as the
    rows that were read once.
    """
    shares = moments.inputs_II
    if shares.dim() > 1:
        return shares
    counts = (shares.double() * moments.rows).round()
    unseen = counts == 0
    lost = int(unseen.sum())
    if not lost or not moments.rows:
        return shares
    others = min(0.5, float((counts == 1).sum()) / moments.rows)
    return torch.where(unseen, others / lost, (1 - others) * shares.double())


def _damped(moments: Tensor, damping: float) -> Tensor:
    wide = moments.double()  # a copy unless it is float64 already
    if not bool(torch.isfinite(wide).all()):
        raise ValueError(
            "moments with NaN or infinite entries: inputs or gradients of calibration overflow"
        )
    variances = wide.diagonal() if wide.dim() > 1 else wide
    mean, same = variances.mean(), torch.ones_like(variances)
    same = same.diag() if wide.dim() > 1 else same
    if not mean > 0:  # a layer that sees only zeros, or that the loss does not depend on
        return same * _SMALLEST**2
    return wide + damping * mean * same


def _cholesky(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky root of a matrix, damped as little as possible to have one."""
    root, problem = torch.linalg.cholesky_ex(matrix)
    share = _SMALLEST
    while problem:
        more = share * matrix.diagonal().mean()
        root, problem = torch.linalg.cholesky_ex(matrix + more * torch.eye(len(matrix)).to(matrix))
        share *= 10
    return root
