"""What a checkpoint leaves out: small changes of weights, and small moments with them.

ExCP, arXiv 2406.11257, section 3.3; the bound of 2.5 medians is the authors' code's.
"""

import torch
from torch import Tensor

from comera.checkpoint import vectors

MOST_MEDIANS = 2.5
"""No change of a weight larger than so many medians is left out."""


def changed_weights(change_n: Tensor, second: Tensor | None, alpha: float) -> Tensor:
    """Mark the weights that have changed enough to be kept.

    Those with ``|change| > median|change| * min(2.5, alpha / sqrt(mean(second)))``: where
    gradients are large, smaller changes are kept too.

    Args:
        change_n: Change of the weights since the last checkpoint, float32 (n,).
        second: The second moments, of any shape; None if the optimizer keeps none.
        alpha: 0 or more, and 0 keeps every change there is; the paper's is 5e-5.

    Returns:
        bool (n,).
    """
    size = change_n.abs()
    root = 0.0 if second is None else float(second.mean(dtype=torch.float64)) ** 0.5
    medians = min(MOST_MEDIANS, alpha / root if root else MOST_MEDIANS) if alpha else 0.0
    return size > vectors.median(size) * medians


def large_moments(first_n: Tensor, mean: float, beta: float) -> Tensor:
    """Mark the moments that are kept: those with ``|first| > beta * mean``.

    Args:
        first_n: First moments that may be kept, float32 (n,).
        mean: Mean magnitude of all first moments of the parameter.
        beta: 0 or more; the paper's is 2.

    Returns:
        bool (n,). First and second moments are left out together: a first moment over a second
        of zero would be an update without bound.
    """
    return first_n.abs() > beta * mean
