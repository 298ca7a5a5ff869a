"""The few values that stand for many: one-dimensional k-means, with a price on bits.

Sorted once, a cluster is a run of neighbours, and its sum a difference of two prefix sums. One
pass of Lloyd's algorithm then costs a binary search a cluster, whatever the number of values.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comera.checkpoint import vectors

LEARNED_FROM = 1 << 18
"""Values a codebook is learned from at most, evenly spaced among all: more change nothing."""

_PASSES = 200
_BINS = 512
_MOST_BY_SEARCH = 31
"""Clusters that the best of bins are searched for; the search takes a time in proportion."""


@dataclass(frozen=True)
class Codebook:
    """Values, ascending, and the walls between what each of them stands for.

    Attributes:
        values: float32 (k,), k <= 256.
        walls: float32 (k - 1,).
    """

    values: Tensor
    walls: Tensor

    def codes(self, values_n: Tensor) -> Tensor:
        """The number of the value that stands for each, uint8 (n,)."""
        return vectors.above(values_n, self.walls)


def learn(values_n: Tensor, size: int, rate: float = 0.0, zeros: int | None = None) -> Codebook:
    """At most ``size`` values that come near to all in the mean square.

    Starts from the best clusters of a few hundred bins, and goes on by Lloyd's algorithm until
    hardly a value moves. With a rate, a value is given to the cluster with the least sum of its
    squared error and the price of the bits that an entropy coder needs to name that cluster, so
    rare clusters die out (entropy-constrained quantisation: Chou, Lookabaugh and Gray 1989).

    Args:
        values_n: Finite float32, shape (n,).
        size: 1 to 256. No more than ``size`` distinct values are kept exactly if there is no rate.
        rate: The price of a bit, as a share of the variance of the values.
        zeros: There are so many zeros beside the values, and zero is one of the values learned.
    """
    step = max(1, values_n.numel() // LEARNED_FROM)
    sorted_n = vectors.ascending(values_n[::step])
    if not len(sorted_n):
        return _between(values_n.new_zeros(0 if zeros is None else 1).double())
    if zeros is None and rate == 0:
        few = _distinct(sorted_n, size)
        if few is not None:
            return _between(few.double())
    sums = torch.zeros(len(sorted_n) + 1, dtype=torch.float64, device=sorted_n.device)
    torch.cumsum(sorted_n, 0, dtype=torch.float64, out=sums[1:])
    price = rate * float(sorted_n.var(correction=0))
    centres = _lattice(sorted_n, size, price) if price else _best_of_bins(sorted_n, sums, size)
    lean: Tensor | float = 0.0  # of the walls towards the rarer of two neighbours
    edges = torch.zeros(0, dtype=torch.long)
    beside = 0.0 if zeros is None else 1 + zeros / step  # at least one: zero never dies out
    still = len(sorted_n) // 10_000
    for _ in range(_PASSES):
        pinned = None if zeros is None else int(centres.abs().argmin())
        if pinned is not None:
            centres[pinned] = 0
        walls = ((centres[1:] + centres[:-1]) / 2 + lean).cummax(0).values
        before, edges = edges, _edges(sorted_n, walls)
        if len(before) == len(edges) and int((edges - before).abs().sum()) <= still:
            break
        counts = edges.diff().double()
        centres = torch.where(counts > 0, sums[edges].diff() / counts, centres)
        if pinned is not None:
            centres[pinned] = 0
            counts[pinned] += beside
        centres, counts = centres[counts > 0], counts[counts > 0]
        if price:
            lean = price * (counts[:-1] / counts[1:]).log2() / (2 * centres.diff())
    return Codebook(centres.float(), walls.float())


def _between(values: Tensor) -> Codebook:
    return Codebook(values.float(), ((values[1:] + values[:-1]) / 2).float())


def _edges(sorted_n: Tensor, walls: Tensor) -> Tensor:
    """Where each cluster begins, and the end of the last."""
    edges = torch.zeros(len(walls) + 2, dtype=torch.long, device=sorted_n.device)
    # A value on a wall belongs below it, as in `codes`.
    edges[1:-1] = torch.searchsorted(sorted_n, walls.float(), right=True)
    edges[-1] = len(sorted_n)
    return edges


def _distinct(sorted_n: Tensor, size: int) -> Tensor | None:
    """The distinct values if there are no more than ``size``."""
    found, rest = sorted_n[:0], sorted_n
    while len(rest):  # ``size`` searches at most instead of a look at every value
        if len(found) == size:
            return None
        found = torch.cat((found, rest[:1]))
        rest = rest[int(torch.searchsorted(rest, rest[0], right=True)) :]
    return found


def _lattice(sorted_n: Tensor, size: int, price: float) -> Tensor:
    """Centres, float64, at the distance that is best where bits have a price and are many."""
    distance = (12 * price / (2 * math.log(2))) ** 0.5
    middle = sorted_n[len(sorted_n) // 2].double()
    low, high = sorted_n[0].double() - middle, sorted_n[-1].double() - middle
    below, above = int(-low / distance + 0.5), int(high / distance + 0.5)
    while below + above + 1 > size:  # tails go to the outermost
        below, above = (below - 1, above) if below > above else (below, above - 1)
    steps = torch.arange(-below, above + 1, dtype=torch.float64, device=sorted_n.device)
    return middle + steps * distance


def _best_of_bins(sorted_n: Tensor, sums: Tensor, size: int) -> Tensor:
    """Centres, float64: of a few clusters the best there are, of many nearly so.

    The bins are as many of equal counts as of equal widths, lest tails share one.
    """
    count, device = len(sorted_n), sorted_n.device
    low, high = sorted_n[0].double(), sorted_n[-1].double()
    share = torch.linspace(0, 1, _BINS // 2 + 1, dtype=torch.float64, device=device)
    ends = torch.searchsorted(sorted_n, (low + (high - low) * share).float(), right=True)
    ends = torch.cat((ends, (share * count).long()))
    ends[0], ends[-1] = 0, count
    ends = ends.unique()
    counts, sums = ends.diff().double(), sums[ends].diff()
    if size > _MOST_BY_SEARCH:
        # as dense as the cube root of the density of the values (Panter and Dite 1951)
        at = sorted_n[torch.cat((ends[:-1], ends[-1:] - 1))].double()
        mass = (counts * at.diff().square()).pow(1 / 3).cumsum(0)
        mass = torch.cat((mass.new_zeros(1), mass))
        wanted = (torch.arange(size, device=device) + 0.5) * (mass[-1] / size)
        k = torch.searchsorted(mass, wanted).clamp(1, len(mass) - 1)
        share = (wanted - mass[k - 1]) / (mass[k] - mass[k - 1])
        return torch.lerp(at[k - 1], at[k], share)
    counts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    sums = torch.cat((sums.new_zeros(1), sums.cumsum(0)))
    # Less by the sum of squares, which is the same for all clusterings.
    between = counts - counts[:, None]
    costs = -(sums - sums[:, None]).square() / between
    costs.masked_fill_(between <= 0, torch.inf)
    best, choices = costs[0], []
    for _ in range(size - 1):
        best, choice = (best[:, None] + costs).min(0)
        choices.append(choice)
    walls = [len(counts) - 1]
    for choice in reversed(choices):
        walls.append(int(choice[walls[-1]]))
    at = torch.tensor([0, *walls[::-1]], device=device).unique()
    return sums[at].diff() / counts[at].diff()
