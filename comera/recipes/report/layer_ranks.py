"""What the ranks of each layer were, are, and were in between."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from comera.recipes.report.chart import SIDE
from comera.recipes.report.history import History

MOST_COLUMNS = 60
"""Steps shown at most."""


@dataclass(frozen=True)
class Bond:
    """One bond of a layer as a bar: its place, and rank before and now, in lengths of the bar.

    Attributes:
        start: Rank before training.
        now: Live rank.
        left: Where the bar begins, from 0 to ``SIDE``.
        width: Its length at the rank before training.
        filled: Its length at the live rank.
    """

    start: int
    now: int
    left: float
    width: float
    filled: float


@dataclass(frozen=True)
class Span:
    """Steps over which the live ranks of a layer stayed the same.

    Attributes:
        first: Step at which the span begins, from 0 on.
        last: Step at which it ends.
        ranks: Live ranks of the bonds.
        share: Their sum, as a share of that before training.
    """

    first: int
    last: int
    ranks: list[int]
    share: float


@dataclass(frozen=True)
class LayerRanks:
    """One layer.

    Attributes:
        name: Its name in the model.
        bonds: In the order of the cores.
        spans: In the order of the steps.
    """

    name: str
    bonds: list[Bond]
    spans: list[Span]

    @property
    def start(self) -> int:
        return sum(bond.start for bond in self.bonds)

    @property
    def now(self) -> int:
        return sum(bond.now for bond in self.bonds)


def layer_ranks(model: History) -> list[LayerRanks]:
    """Return the ranks of every layer that has bonds; nothing if none were logged.

    Bars are drawn to one scale: that of the layer with the most ranks before training. Of a long
    log, evenly spaced lines are taken.
    """
    logged = model.live_ranks
    layers = {name: ranks for name, ranks in model.start_ranks.items() if ranks}
    if not logged or not layers:
        return []
    every = np.array(list(logged))
    chosen = np.linspace(0, len(every) - 1, min(len(every), MOST_COLUMNS)).round().astype(int)
    steps = every[chosen].tolist()
    scale = SIDE / max(1, *map(sum, layers.values()))
    return [
        LayerRanks(
            name or "(model)",
            _bonds(start, model.ranks.get(name, start), scale),
            _spans(start, {step: logged[step].get(name, start) for step in steps}),
        )
        for name, start in layers.items()
    ]


def _bonds(start: Sequence[int], now: Sequence[int], scale: float) -> list[Bond]:
    lefts = np.cumsum([0, *start])[:-1].tolist()
    return [
        Bond(before, live, round(left * scale, 1), round(before * scale, 1), round(live * scale, 1))
        for left, before, live in zip(lefts, start, now, strict=True)
    ]


def _spans(start: Sequence[int], ranks_at: dict[int, list[int]]) -> list[Span]:
    """Put steps together whose ranks are the same; each step reaches back to the one before it."""
    spans: list[Span] = []
    before = 0
    for step, ranks in ranks_at.items():
        if spans and spans[-1].ranks == ranks:
            before = spans.pop().first
        spans.append(Span(before, step, ranks, sum(ranks) / max(1, sum(start))))
        before = step
    return spans
