"""Which rank each layer gets under one budget for all.

The losses of layers' directions are comparable, so one price for a parameter decides everywhere:
a direction stays if it saves more loss than its parameters cost. The price is found by bisection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_STEPS = 200
_LEAST, _MOST = 1e-60, 1e60


@dataclass(frozen=True)
class Choice:
    """What there is to choose for one weight.

    Attributes:
        losses: By how much the loss rises without each direction, largest first, ``(K,)``.
        dense: Parameters of the dense weight.
        each: Parameters of one rank.
        least: Rank that is kept in any case.
    """

    losses: Tensor
    dense: int
    each: int
    least: int = 1

    def at(self, price: float) -> int | None:
        """Return the best rank if a parameter costs so much loss; None for the dense weight."""
        rank = max(self.least, int((self.losses > price * self.each).sum()))
        rest = float(self.losses[rank:].sum())
        # The sizes are subtracted first: equal ones then differ by nothing at any price.
        return None if price * (self.dense - rank * self.each) <= rest else rank

    def size(self, rank: int | None) -> int:
        return self.dense if rank is None else rank * self.each

    def saved(self, rank: int, more: int | None) -> float:
        """Return the loss that directions from ``rank`` to ``more``, or all of them, save."""
        return float(self.losses[rank:more].sum())


def allocate(choices: Sequence[Choice], budget: int) -> list[int | None]:
    """Choose ranks with the lowest sum of losses whose weights hold at most ``budget`` numbers.

    Args:
        choices: One for each weight.
        budget: Parameters of all of them together.

    Returns:
        A rank each, or None for a weight that stays dense.

    Raises:
        ValueError: If even the smallest ranks hold more.
    """
    smallest = sum(min(one.dense, one.least * one.each) for one in choices)
    if smallest > budget:
        raise ValueError(
            f"the layers hold {smallest:,} numbers at their smallest ranks; a budget of "
            f"{budget:,} leaves no room for them"
        )
    low, high = _LEAST, _MOST
    for _ in range(_STEPS):
        price = (low * high) ** 0.5
        if _size(choices, [one.at(price) for one in choices]) > budget:
            low = price
        else:
            high = price
    return _spend([one.at(high) for one in choices], choices, budget)


def _spend(ranks: list[int | None], choices: Sequence[Choice], budget: int) -> list[int | None]:
    """Give what a jump of the price has left over to what saves most loss for its parameters."""
    left = budget - _size(choices, ranks)
    while True:
        offers = [
            (one.saved(now, more) / cost, k, more, cost)
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


def _size(choices: Sequence[Choice], ranks: Sequence[int | None]) -> int:
    return sum(one.size(rank) for one, rank in zip(choices, ranks, strict=True))
