"""Quantize scalars by one-dimensional k-means with a price on bits.

A cluster of sorted values is an interval, whose sum is a difference of two prefix sums, so a pass
of Lloyd's algorithm takes a binary search for each cluster. Everything is on the CPU.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LEARNED_FROM = 1 << 18
"""Most values that a codebook is learned from, spread evenly over all."""
_PASSES = 200
_BINS = 512
_MOST_BY_SEARCH = 31
"""Most clusters for which bins are searched: the search takes a time in proportion."""
_LITTLE = 2.0
"""A rate of this over the square of the size makes a lattice four standard deviations wide."""
_AT_A_TIME = 1 << 16
"""Values that stay in the cache of a core from pass to pass."""


@dataclass(frozen=True)
class Codebook:
    """Ascending ``values``, float32 (k,), k <= 256, and ``walls`` (k - 1,) between their cells."""

    values: Tensor
    walls: Tensor

    def codes(self, values_n: Tensor) -> Tensor:
        """Return for each entry the index of its cell, uint8 (n,)."""
        values, walls = values_n.numpy(), self.walls.numpy()
        count = np.zeros(len(values), np.uint8)
        above = np.empty(_AT_A_TIME, bool)
        for start in range(0, len(values), _AT_A_TIME):
            some, counted = (x[start : start + _AT_A_TIME] for x in (values, count))
            for wall in walls:  # a pass of comparisons is faster than a search for each value
                counted += np.greater(some, wall, out=above[: len(some)]).view(np.uint8)
        return torch.from_numpy(count)


def learn(values_n: Tensor, size: int, rate: float = 0.0, zeros: int | None = None) -> Codebook:
    """Learn at most ``size`` values with the least mean squared error.

    Lloyd's algorithm starts from the best clusters of a few hundred bins. With a rate, the cost of
    a value is its squared error plus the price of its code's bits, so rare clusters die out
    (entropy-constrained quantisation: Chou, Lookabaugh and Gray 1989). Values are finite float32
    (n,), ``size`` is up to 256; without a rate, values are kept exactly if no more differ. ``rate``
    is the price of a bit as a share of the variance, ``zeros`` the number of zeros in addition to
    the values; zero is then among the learned values.
    """
    step = max(1, values_n.numel() // _LEARNED_FROM)
    if step > 1:
        # One of every ``step`` at random, as equal distances could hit the same columns of a
        # matrix; and the least and the largest of all.
        starts = torch.arange(0, len(values_n) - step + 1, step, device="cpu")
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = starts + torch.randint(step, starts.shape, generator=generator, device="cpu")
        values_n = torch.cat((values_n[drawn], *map(torch.atleast_1d, values_n.aminmax())))
    sorted_n = torch.from_numpy(np.sort(values_n.numpy()))
    if not len(sorted_n):
        return _between(values_n.new_zeros(0 if zeros is None else 1).double())
    if rate == 0:
        few = sorted_n.unique_consecutive()
        if len(few) <= size and (zeros is None or 0 in few):
            return _between(few.double())
    # At a largest magnitude of about 1, squares are neither inf nor 0.
    largest = float(max(-sorted_n[0], sorted_n[-1]))
    power = 2.0 ** (math.frexp(largest)[1] - 1) if largest else 1.0
    beside = 0.0 if zeros is None else 1 + zeros / step  # at least one: zero never dies out
    book = _learned((sorted_n.double() / power).float(), size, rate, beside)
    return Codebook(*((x.double() * power).float() for x in (book.values, book.walls)))


def _between(values: Tensor) -> Codebook:
    return Codebook(values.float(), ((values[1:] + values[:-1]) / 2).float())


def _learned(sorted_n: Tensor, size: int, rate: float, beside: float) -> Codebook:
    """Learn a codebook from several starts; ``beside`` counts zeros in addition to the values."""
    # Prefix sums from the middle to both sides: values far out do not take digits from the rest.
    middle = len(sorted_n) // 2
    below = sorted_n[:middle].flip(0).cumsum(0, dtype=torch.float64).neg().flip(0)
    above = sorted_n[middle:].cumsum(0, dtype=torch.float64)
    sums = torch.cat((below, below.new_zeros(1), above))
    price = rate * float(sorted_n.var(correction=0))
    ends = _bins(sorted_n)
    starts = []
    if price:
        starts.append(_lattice(sorted_n, size, price))
    if not price or rate < _LITTLE / size**2:  # else the lattice reaches over all values
        quartiles = sorted_n[[len(sorted_n) // 4, 3 * len(sorted_n) // 4]].double().diff()
        if size <= _MOST_BY_SEARCH:
            starts.append(_best_of_bins(sums, ends, size))
        starts += [_as_dense(sorted_n, ends, size, most) for most in (math.inf, float(quartiles))]
    if not price:
        books = [_refined(sorted_n, sums, centres, price, beside)[0] for centres in starts]
        errors = [book.values[book.codes(sorted_n).long()].double() - sorted_n for book in books]
        return min(zip(books, errors, strict=True), key=lambda found: float(found[1] @ found[1]))[0]
    # Of many centres the rare ones die out, and can take the others along where values are few.
    for count in (2, 4):
        centres = _best_of_bins(sums, ends, max(1, min(count, size - 1)))
        zero = centres.new_zeros(1 if beside else 0)
        starts.append(torch.cat((centres, zero)).sort().values[:size])
    refined = [_refined(sorted_n, sums, centres, price, beside) for centres in starts]
    return min(refined, key=lambda found: found[1])[0]


def _refined(
    sorted_n: Tensor, sums: Tensor, centres: Tensor, price: float, beside: float
) -> tuple[Codebook, float]:
    """Run Lloyd's algorithm; return the codebook, and its cost up to a constant.

    ``sums`` are prefix sums of the values, float64 ``(n + 1,)``; ``price`` is the cost of a bit.
    ``beside`` counts zeros in addition to the values; if there are any, one centre stays zero.
    """
    bits = torch.zeros_like(centres)
    edges = torch.zeros(0, dtype=torch.long)
    still = len(sorted_n) // 10_000
    for left in reversed(range(_PASSES)):
        zero = torch.zeros_like(centres, dtype=torch.bool)
        if beside:
            zero[centres.abs().argmin()] = True
        centres = torch.where(zero, 0, centres)
        walls = _walls(centres, price * bits)
        before = edges
        # A value on a wall belongs below it, as in `codes`.
        inner = torch.searchsorted(sorted_n, walls.float(), right=True)
        edges = torch.cat((inner.new_zeros(1), inner, inner.new_tensor([len(sorted_n)])))
        counts, totals = edges.diff().double(), sums[edges].diff()
        weighed = counts + beside * zero
        settled = len(before) == len(edges) and int((edges - before).abs().sum()) <= still
        if settled or not left:
            break
        centres = torch.where(zero | (counts == 0), centres, totals / counts)
        centres, weighed = centres[weighed > 0], weighed[weighed > 0]
        bits = -(weighed / weighed.sum()).log2()
    squares = counts @ centres.square() - 2 * (totals @ centres)
    weighed = weighed[weighed > 0]
    coded = -(weighed @ (weighed / weighed.sum()).log2())
    return Codebook(centres.float(), walls.float()), float(squares + price * coded)


def _walls(centres: Tensor, prices: Tensor) -> Tensor:
    """Compute the values at which the next centre becomes cheaper, as float64 ``(k - 1,)``.

    Cost is squared distance plus price. A centre that is nowhere the cheapest has equal walls.
    """
    at, costs = centres.tolist(), (centres.square() + prices).tolist()
    best: list[int] = []  # the centres that cost least somewhere
    begin: list[float] = []  # and from where on
    for k in range(len(at)):
        wall = -math.inf
        while best:
            apart, more = at[k] - at[best[-1]], costs[k] - costs[best[-1]]
            wall = more / (2 * apart) if apart > 0 else math.copysign(math.inf, more)
            if wall > begin[-1]:
                break
            wall = -math.inf
            best.pop(), begin.pop()
        best.append(k)
        begin.append(wall)
    walls = [-math.inf] * best[0]
    for k, following, wall in zip(best, best[1:], begin[1:], strict=False):
        walls += [wall] * (following - k)
    walls += [math.inf] * (len(at) - 1 - best[-1])
    return centres.new_tensor(walls, dtype=torch.float64)


def _lattice(sorted_n: Tensor, size: int, price: float) -> Tensor:
    """Return evenly spaced centres, float64, at the best distance for a high price of bits."""
    distance = (12 * price / (2 * math.log(2))) ** 0.5
    middle = sorted_n[len(sorted_n) // 2].double()
    low, high = sorted_n[0].double() - middle, sorted_n[-1].double() - middle
    below, above = (int(min(x / distance + 0.5, size)) for x in (float(-low), float(high)))
    if below + above + 1 > size:  # tails go to the outermost
        below = max(size - 1 - above, min(below, size // 2))
        above = size - 1 - below
    return middle + torch.arange(-below, above + 1, device="cpu").to(middle) * distance


def _bins(sorted_n: Tensor) -> Tensor:
    """Return the ends of some hundred bins: half have equal counts, half equal widths; int64."""
    low, high = sorted_n[0].double(), sorted_n[-1].double()
    share = torch.linspace(0, 1, _BINS // 2 + 1, dtype=torch.float64, device="cpu")
    ends = torch.searchsorted(sorted_n, (low + (high - low) * share).float(), right=True)
    ends = torch.cat((ends, (share * len(sorted_n)).long()))
    ends[0], ends[-1] = 0, len(sorted_n)
    return ends.unique()


def _as_dense(sorted_n: Tensor, ends: Tensor, size: int, most: float) -> Tensor:
    """Return centres as dense as the cube root of the values' density (Panter and Dite 1951).

    Bins count as at most ``most`` wide, so that the gap before an outlier attracts no centres.
    """
    at = sorted_n[torch.cat((ends[:-1], ends[-1:] - 1))].double()
    mass = (ends.diff() * at.diff().clamp(max=most).square()).pow(1 / 3).cumsum(0)
    mass = torch.cat((mass.new_zeros(1), mass))
    wanted = torch.arange(0.5, size, dtype=torch.float32, device="cpu") * (mass[-1] / size)
    k = torch.searchsorted(mass, wanted).clamp(1, len(mass) - 1)
    return torch.lerp(at[k - 1], at[k], (wanted - mass[k - 1]) / (mass[k] - mass[k - 1]))


def _best_of_bins(sums: Tensor, ends: Tensor, size: int) -> Tensor:
    """Return the best centres, float64, if each of ``size`` clusters consists of whole bins."""
    counts, sums = ends.diff().double(), sums[ends].diff()
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
    at = ends.new_tensor([0, *walls[::-1]]).unique()
    return sums[at].diff() / counts[at].diff()


def norm(values: Tensor) -> float:
    """Return the root of the sum of squares of a tensor; not finite if an entry is not."""
    found = float(torch.linalg.vector_norm(values)) if values.dtype == torch.float32 else 0.0
    if 1e-15 < found < 1e15:  # no square left the range of float32 that counts
        return found
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def positions(mask_n: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask_n.numpy()))
