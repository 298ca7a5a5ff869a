"""DLRM, which predicts clicks by large embedding tables and small dense parts, and its metrics.

Naumov et al. 2019, arXiv 1906.00091, as in facebookresearch/dlrm. Shape suffixes: B = batch,
C = continuous features, F = fields with a table, D = width, N = entries of all bags.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.collection import Bags, TTEmbeddingBagCollection
from comera.nn.init import Init
from comera.nn.linear import CompressedLinear
from comera.nn.table import TTTable


class DLRM(nn.Module):
    """Embeddings of fields and of the continuous features, their products, and a top part.

    Args:
        table_sizes: Rows of each field's table, by name or in order; the tables are the modules
            ``tables.<name>`` or ``tables.<number>``. A dot in a name becomes an underscore, and one
            follows names that torch's containers use themselves, such as ``type``.
        num_continuous: Continuous features; 0 for none, which leaves out the bottom part.
        embedding_dim: Width of the tables.
        bottom: Hidden widths of the part that brings the continuous features to that width.
        top: Hidden widths of the part above the interactions, which ends in one number.

    Shapes:
        continuous ``(B, C)``, or None where there are none; fields ``(B, F)`` integers, or for
        fields of many values a list of pairs ``(indices (N,), offsets (B,))``, one for each field;
        output ``(B,)``, the logit of a click.

    Raises:
        ValueError: If there is no table, a size is below one, or inputs do not fit the model.
    """

    def __init__(
        self,
        table_sizes: Mapping[str, int] | Sequence[int],
        num_continuous: int,
        embedding_dim: int = 64,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (512, 256),
    ) -> None:
        super().__init__()
        if not table_sizes:
            raise ValueError("table_sizes=[] must name the rows of at least one table")
        if not isinstance(table_sizes, Mapping):
            table_sizes = {str(k): size for k, size in enumerate(table_sizes)}
        sizes = {"embedding_dim": [embedding_dim], "bottom": bottom, "top": top}
        for name, widths in {**sizes, "table_sizes": table_sizes.values()}.items():
            if any(width < 1 for width in widths):
                raise ValueError(f"{name}={list(widths)} must be at least 1")
        if not num_continuous and len(table_sizes) < 2:
            raise ValueError(
                "num_continuous=0 and one table leave nothing to compare: give continuous features "
                "or a second table"
            )
        names = {name: _module_name(name) for name in table_sizes}
        alike = [name for name in names if list(names.values()).count(names[name]) > 1]
        if alike:
            raise ValueError(f"table_sizes has {alike}, one name as modules: rename all but one")
        self.num_continuous, self.embedding_dim = num_continuous, embedding_dim
        self.tables = TTEmbeddingBagCollection(
            {
                names[name]: nn.EmbeddingBag(size, embedding_dim, mode="sum")
                for name, size in table_sizes.items()
            }
        )
        self.bottom = (
            _layers([num_continuous, *bottom, embedding_dim], last=nn.ReLU())
            if num_continuous
            else None
        )
        parts = len(table_sizes) + bool(num_continuous)
        width = parts * (parts - 1) // 2 + (embedding_dim if num_continuous else 0)
        self.top = _layers([width, *top, 1])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, init: Init = "orthogonal") -> None:
        """Draw tables uniformly by their size, layers normally by their widths, as DLRM's release.

        Tables and layers that are tensor trains get the same spread, ``init`` says how.
        """
        for table in self.tables.values():
            bound = 1 / math.sqrt(table.num_embeddings)  # type: ignore[arg-type]
            if isinstance(table, TTTable):
                table.reset_parameters(bound / math.sqrt(3), init)
            else:
                nn.init.uniform_(table.weight, -bound, bound)  # type: ignore[arg-type]
        for layer in self.modules():
            if isinstance(layer, nn.Linear | CompressedLinear):
                std = math.sqrt(2 / (layer.in_features + layer.out_features))
                if isinstance(layer, CompressedLinear):
                    layer.reset_parameters(std, init)
                else:
                    nn.init.normal_(layer.weight, std=std)
                nn.init.normal_(layer.bias, std=math.sqrt(1 / layer.out_features))  # type: ignore[arg-type]

    def forward(self, continuous_BC: Tensor | None, fields: Bags) -> Tensor:
        parts = self.tables(fields).values()
        below = []
        if self.bottom is not None:
            if continuous_BC is None or continuous_BC.shape[-1] != self.num_continuous:
                found = None if continuous_BC is None else tuple(continuous_BC.shape)
                raise ValueError(
                    f"the model takes {self.num_continuous} continuous features, got {found}"
                )
            below = [self.bottom(continuous_BC)]
        parts_BFD = torch.stack([*below, *parts], 1)
        count = parts_BFD.shape[1]
        first, second = torch.triu_indices(count, count, 1, device=parts_BFD.device)
        products = (parts_BFD @ parts_BFD.mT)[:, first, second]
        return self.top(torch.cat([*below, products], 1)).squeeze(1)


def _module_name(name: str) -> str:
    name = name.replace(".", "_")
    return f"{name}_" if not name or hasattr(TTEmbeddingBagCollection(), name) else name


def _layers(widths: Sequence[int], last: nn.Module | None = None) -> nn.Sequential:
    """Stack linear layers of these widths, rectified in between."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([] if last is None else [last]))


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
