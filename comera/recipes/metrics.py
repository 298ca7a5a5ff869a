"""How well a click predictor tells clicks from the rest."""

import torch
from torch import Tensor
from torch.nn import functional as F


def click_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute the metrics of logits and labels 0 or 1, ``(n,)`` each.

    Returns:
        ``loss``, mean cross entropy; ``auc``, area under the receiver operating characteristic;
        ``accuracy`` at a probability of one half; ``nce``, the loss over that of always predicting
        the share of clicks (normalised cross entropy). AUC and NCE are NaN for labels of one kind.
    """
    logits, labels = logits.double(), labels.double()
    loss = float(F.binary_cross_entropy_with_logits(logits, labels))
    share = labels.mean()
    entropy = float(F.binary_cross_entropy(share, share))
    return {
        "loss": loss,
        "auc": area_under_curve(logits, labels),
        "accuracy": float(((logits > 0) == (labels > 0)).double().mean()),
        "nce": loss / entropy if entropy else float("nan"),
    }


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Return the probability that a click scores above the rest; equal scores count one half.

    By the sum of ranks (Mann-Whitney).
    """
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, kind, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[kind]
    above = float(ranks[labels > 0].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)
