"""Define DLRM, a click predictor with large embedding tables, its metrics, and small tables.

Source: Naumov et al. 2019, arXiv 1906.00091, as in facebookresearch/dlrm. The small tables are
alternatives to tensor trains at equal size. Shape suffixes: B = batch or bags, C = continuous
features, F = fields with a table, D = width, N = entries of all bags, R = rank.
"""

import bisect
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.collection import Bags, TTEmbeddingBagCollection
from comera.nn.init import Init
from comera.nn.linear import CompressedLinear
from comera.nn.table import TTTable


class DLRM(nn.Module):
    """Click predictor: embeddings of fields and continuous features, their products, a top part.

    Args:
        table_sizes: Rows of each field's table, by name or in order; the tables are the modules
            ``tables.<name>`` or ``tables.<number>``. Dots in names become underscores, and an
            underscore is appended to names of attributes of modules, such as ``type``.
        num_continuous: Number of continuous features; 0 leaves out the bottom part.
        embedding_dim: Width of the tables.
        bottom: Hidden widths of the part that maps the continuous features to this width.
        top: Hidden widths of the part above the products, which ends in one number.

    Shapes:
        continuous ``(B, C)``, or None if there are none; fields ``(B, F)`` integers, or for fields
        of many values a pair ``(indices (N,), offsets (B,))`` each; output ``(B,)``, logits of a
        click.

    Raises ``ValueError`` if there is no table, a size is below one, or inputs do not fit.
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
        names, own = {}, TTEmbeddingBagCollection()
        for name in table_sizes:
            plain = name.replace(".", "_")
            names[name] = f"{plain}_" if not plain or hasattr(own, plain) else plain
        if alike := [name for name in names if list(names.values()).count(names[name]) > 1]:
            raise ValueError(f"table_sizes has {alike}, one name as modules: rename all but one")
        self.num_continuous, self.embedding_dim = num_continuous, embedding_dim
        bags = {
            names[name]: nn.EmbeddingBag(size, embedding_dim, mode="sum")
            for name, size in table_sizes.items()
        }
        self.tables = TTEmbeddingBagCollection(bags)
        widths = [num_continuous, *bottom, embedding_dim]
        self.bottom = _layers(widths).append(nn.ReLU()) if num_continuous else None
        parts = len(table_sizes) + bool(num_continuous)
        width = parts * (parts - 1) // 2 + (embedding_dim if num_continuous else 0)
        self.top = _layers([width, *top, 1])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, init: Init = "orthogonal") -> None:
        """Draw tables uniformly by size and layers normally by widths, as the original DLRM does.

        Cores of tensor trains are drawn by ``init`` for the same standard deviation.
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


def _layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def click_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute the metrics of logits and labels 0 or 1, ``(n,)`` each.

    Returns ``loss``, the mean cross entropy; ``auc``; ``accuracy`` at a probability of one half;
    and ``nce``, the loss divided by that of always predicting the share of clicks. AUC and NCE are
    NaN if all labels are equal.
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
    """Return the area under the ROC curve, from ranks of scores; ties count one half."""
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, kind, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[kind]
    above = float(ranks[labels > 0].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


Kind = Literal["hashed", "quotient_remainder", "shared_array"]

_PRIME = 2**31 - 1
"""Prime of the hash ``(a x + b) mod p``: products of two numbers below it fit in 64 bits."""


class SmallTable(nn.Module):
    """Base of embedding bags that sum rows which are computed from their indices.

    Shapes:
        indices ``(B, n)`` integers, or ``(N,)`` with offsets ``(B,)``; output ``(B, D)``.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def rows(self, indices_N: Tensor) -> Tensor:
        """Compute the rows of these indices, ``(N, D)``."""
        raise NotImplementedError

    def forward(self, indices: Tensor, offsets_B: Tensor | None = None) -> Tensor:
        rows_ND = self.rows(indices.flatten())
        if offsets_B is None:
            return rows_ND.unflatten(0, indices.shape).sum(1)
        order_N = torch.arange(len(rows_ND), device=rows_ND.device)
        return F.embedding_bag(order_N, rows_ND, offsets_B.to(order_N), mode="sum")


class HashedTable(SmallTable):
    """Rows shared by the remainder of their index (arXiv 0902.2206), frequent indices first.

    Of ``kept`` rows the first ``own`` have one index each. They are stored in width ``rank``, which
    a matrix brings to D.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        kept: int,
        own: int = 0,
        rank: int | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.own = own
        self.table = nn.Embedding(kept, rank or embedding_dim)
        self.widen = nn.Linear(rank, embedding_dim, bias=False) if rank else None
        bound = 1 / math.sqrt(num_embeddings)
        if self.widen is not None:
            nn.init.orthogonal_(self.widen.weight)
            bound *= math.sqrt(embedding_dim / self.widen.in_features)
        nn.init.uniform_(self.table.weight, -bound, bound)

    def rows(self, indices_N: Tensor) -> Tensor:
        shared = self.own + (indices_N - self.own) % max(1, self.table.num_embeddings - self.own)
        rows = self.table(torch.where(indices_N < self.own, indices_N, shared))
        return rows if self.widen is None else self.widen(rows)


class QuotientRemainderTable(SmallTable):
    """Table whose rows are products of a row for ``index // divisor`` and a row for the remainder.

    Shi et al. 2020, arXiv 1909.02107, section 3, with the elementwise product.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, divisor: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.remainders = nn.Embedding(divisor, embedding_dim)
        self.quotients = nn.Embedding(math.ceil(num_embeddings / divisor), embedding_dim)
        bound = 1 / math.sqrt(num_embeddings)
        nn.init.uniform_(self.remainders.weight, -bound, bound)
        nn.init.ones_(self.quotients.weight)  # products start as the rows of a dense table do

    def rows(self, indices_N: Tensor) -> Tensor:
        divisor = self.remainders.num_embeddings
        return self.remainders(indices_N % divisor) * self.quotients(indices_N // divisor)


class SharedArrayTable(SmallTable):
    """Rows cut in blocks from one array that all tables share (ROBE, arXiv 2108.02191).

    ``array`` is a module whose parameter is the array; ``number`` of the table seeds its hash.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, array: nn.Module, block: int, number: int
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        if embedding_dim % block:
            raise ValueError(f"block={block} must divide the width of the tables, {embedding_dim}")
        self._shared = (array,)  # a tuple, so that the parameter is one table's alone
        self.block = block
        draw = random.Random(number)
        self._a, self._b, self._c = (draw.randrange(1, _PRIME) for _ in range(3))

    def rows(self, indices_N: Tensor) -> Tensor:
        array_M = next(self._shared[0].parameters())
        blocks = torch.arange(self.embedding_dim // self.block, device=indices_N.device)
        mixed = (self._a * (indices_N % _PRIME) + self._b) % _PRIME
        starts = (self._c * ((mixed[:, None] + blocks) % _PRIME)) % _PRIME
        starts = starts % (len(array_M) - self.block + 1)
        within = torch.arange(self.block, device=indices_N.device)
        return F.embedding((starts[..., None] + within).flatten(1), array_M[:, None]).squeeze(2)


def replace_tables_(
    tables: nn.ModuleDict,
    kind: Kind,
    params: int,
    rank: int | None = None,
    own: float = 0.0,
    block: int | None = None,
) -> nn.ModuleDict:
    """Replace dense tables by small tables with at most ``params`` parameters in all, in place.

    Tables of kind ``hashed`` get equally many rows, of ``quotient_remainder`` equally many
    remainders; a table that would not shrink stays dense, unless a ``rank`` or a ``shared_array``
    replaces all. ``tables`` are :class:`torch.nn.EmbeddingBag` of one width by name. ``own`` is the
    share of hashed rows that belong to one index each, ``rank`` the width of these rows; ``block``
    is that of a :class:`SharedArrayTable`, by default 16 or what divides it and the width. Raises
    ``ValueError`` if ``params`` is too small.
    """
    sizes = {name: int(table.num_embeddings) for name, table in tables.items()}  # type: ignore[arg-type]
    width = int(next(iter(tables.values())).embedding_dim)  # type: ignore[arg-type]
    largest, rank = max(sizes.values()), rank if kind == "hashed" else None
    if kind == "shared_array":
        block = block or math.gcd(16, width)
        if params < block:
            raise ValueError(f"params={params} is less than a block of {block} numbers")
        bound = 1 / math.sqrt(sum(sizes.values()) / len(sizes))
        array = nn.Module()
        array.weight = nn.Parameter(torch.empty(params).uniform_(-bound, bound))
        for number, (name, size) in enumerate(sizes.items()):
            tables[name] = SharedArrayTable(size, width, array, block, number)
        tables[next(iter(sizes))].array = array
        return tables

    def rows_of(size: int, most: int) -> int:
        return min(size, most if kind == "hashed" else most + math.ceil(size / most))

    def cost(most: int) -> int:
        widening = width * (rank or 0)
        return sum((rank or width) * rows_of(size, most) + widening for size in sizes.values())

    # With fewer remainders than quotients the cost falls as remainders are added.
    counts = range(1 if kind == "hashed" else math.isqrt(largest), largest + 1)
    fitting = bisect.bisect_right(counts, params, key=cost)
    if not fitting:
        raise ValueError(f"params={params} do not suffice for {len(sizes)} tables")
    most = counts[fitting - 1]
    for name, size in sizes.items():
        kept = rows_of(size, most)
        if kind == "hashed" and (rank or kept < size):
            tables[name] = HashedTable(size, width, kept, int(own * kept), rank)
        elif kept < size:
            tables[name] = QuotientRemainderTable(size, width, most)
    return tables
