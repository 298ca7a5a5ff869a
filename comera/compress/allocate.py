"""Choose the rank of each layer under one budget for all layers.

A singular direction of a layer stays if it saves more loss than its parameters cost. Bisection
finds the price of a parameter.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from comera.planning.printing import Report, Table, data_frame, show_column
from comera.shapes import is_number

if TYPE_CHECKING:
    import pandas as pd

_STEPS = 200
_LEAST, _MOST = 1e-60, 1e60


@dataclass(frozen=True)
class Choice:
    """What the ranks of one weight cost and save.

    ``losses`` is the rise of the loss without each singular direction, largest first, ``(K,)``;
    ``dense`` and ``each`` count parameters of the dense weight and of one rank.
    """

    losses: Tensor
    dense: int
    each: int

    def at(self, price: float) -> int | None:
        """Return the rank with the least loss plus ``price`` times size; None if dense is best."""
        rank = max(1, int((self.losses > price * self.each).sum()))
        rest = float(self.losses[rank:].sum())
        # The sizes are subtracted first: equal ones then differ by nothing at any price.
        return None if price * (self.dense - rank * self.each) <= rest else rank

    def size(self, rank: int | None) -> int:
        return self.dense if rank is None else rank * self.each


def allocate(choices: Sequence[Choice], budget: int) -> list[int | None]:
    """Choose the ranks of least total loss within ``budget`` parameters.

    Returns a rank for each choice, or None for a weight that stays dense.
    """

    def size(ranks: Sequence[int | None]) -> int:
        return sum(one.size(rank) for one, rank in zip(choices, ranks, strict=True))

    low, high = _LEAST, _MOST
    for _ in range(_STEPS):
        price = (low * high) ** 0.5
        if size([one.at(price) for one in choices]) > budget:
            low = price
        else:
            high = price
    ranks = [one.at(high) for one in choices]
    left = budget - size(ranks)
    while True:  # what a jump of the price leaves over goes where it saves most loss a parameter
        offers = [
            (float(one.losses[now:more].sum()) / cost, k, more, cost)
            for k, (one, now) in enumerate(zip(choices, ranks, strict=True))
            if now is not None
            for more in (now + 1, None)
            if (cost := one.size(more) - one.size(now)) <= left
            and (more is None or one.size(more) < one.dense)
        ]
        gain, best, rank, cost = max(offers, key=lambda offer: offer[0], default=(0.0, 0, None, 0))
        if gain <= 0:
            return ranks
        ranks[best] = rank
        left -= cost


_UNITS = {
    "k": 1000, "K": 1000, "M": 1000**2, "G": 1000**3,
    "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3,
}  # fmt: skip


def parse_budget(budget: float | str) -> float | int:
    """Return a budget as a share (float), or as bytes (int) if it is a text with a unit."""
    if isinstance(budget, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMG]|[KMG]i)B", budget)
        if found and float(found[1]) > 0:
            return int(float(found[1]) * _UNITS[found[2]])
    elif is_number(budget) and 0 < budget < 1:
        return float(budget)
    raise ValueError(
        f"budget={budget!r} must be between 0 and 1, the share of parameters kept, or the bytes of "
        f'all parameters with a unit, as "60MB" or "60MiB"{percent_meant(budget)}'
    )


def percent_meant(budget: object) -> str:
    """Return a hint for an error if a budget looks like a percentage."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", str(budget))
    if isinstance(budget, bool) or not found or not 2 <= float(found[1]) < 100:
        return ""
    return f"; {found[1]} % is budget={float(found[1]) / 100:.6g}"


@dataclass(frozen=True)
class CompressedLayer:
    """Result for one layer: its ``name`` as in ``named_modules``, and entries before and after.

    ``params`` include the gates. The ``rank`` is that of the two factors, or None if the layer
    stays dense; ``loss`` is the predicted rise of the loss, to second order.
    """

    name: str
    dense_params: int
    params: int
    rank: int | None
    loss: float


class CompressedLayers(Report, tuple[CompressedLayer, ...]):
    """One :class:`CompressedLayer` for each targeted layer; prints itself, also in Jupyter."""

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each :class:`CompressedLayer`. Needs pandas."""
        return data_frame(map(vars, self))

    def tables(self) -> list[Table]:
        rows = [
            (
                layer.name,
                f"{layer.dense_params:,}",
                f"{layer.params:,}",
                "dense" if layer.rank is None else str(layer.rank),
                loss,
            )
            for layer, loss in zip(self, show_column([one.loss for one in self]), strict=True)
        ]
        return [Table("layers", ("layer", "dense", "now", "rank", "predicted loss"), rows, names=0)]

    def summary(self) -> str:
        params = sum(layer.params for layer in self)
        dense = sum(layer.dense_params for layer in self)
        return (
            f"{len(self)} layers: {params:,} parameters of {dense:,}, "
            f"{sum(layer.rank is None for layer in self)} stay dense, "
            f"predicted rise of the loss {sum(layer.loss for layer in self):.3g}"
        )
