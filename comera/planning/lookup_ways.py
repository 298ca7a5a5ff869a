"""Plan the ways to read rows of a tensor-train table, and of a dense table, as lists of steps.

The candidate ``unique`` contracts the cores to a left and a right factor, and multiplies a slice
of each for every distinct row read.
"""

import math
from dataclasses import dataclass, replace

from comera.planning.candidate import (
    OUTPUT_GRADIENT,
    Candidate,
    Step,
    Work,
    candidate,
    factor_chains,
    gates,
    product,
)
from comera.planning.machine import Machine, item_size
from comera.shapes import TTMShape, check_whole_numbers

_INDEX_BYTES = 8
_OPERATORS = 3
"""Python operators of a tensor-train table in each direction: two factors and the lookup."""


@dataclass(frozen=True)
class Lookup(Work):
    """One batch of ``tokens`` lookups in a table of ``shape``.

    ``distinct`` is the expected number of different indices; None means as many as possible.
    ``num_embeddings`` and ``embedding_dim`` are the table's sizes if the modes multiply to more.
    """

    shape: TTMShape
    tokens: int
    distinct: int = None  # type: ignore[assignment]  # filled in by __post_init__
    num_embeddings: int = None  # type: ignore[assignment]
    embedding_dim: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_whole_numbers(1, tokens=self.tokens)
        self.fill_width("num_embeddings", self.shape.num_rows)
        self.fill_width("embedding_dim", self.shape.num_cols)
        if self.distinct is None:
            object.__setattr__(self, "distinct", min(self.tokens, self.num_embeddings))

    def __str__(self) -> str:
        return (
            f"embedding {self.num_embeddings} x {self.embedding_dim}, modes "
            f"{self.shape.describe_modes()}, ranks {' '.join(map(str, self.shape.ranks))}, "
            f"{self.distinct} distinct rows"
        )

    def sizes(self, dtype: str) -> tuple[dict[str, int], int]:
        indices = self.tokens * _INDEX_BYTES // item_size(dtype)
        return {"indices": indices}, self.tokens * self.embedding_dim


def candidates(lookup: Lookup, machine: Machine, dtype: str) -> list[Candidate]:
    """Return the one candidate of a table."""
    vanished = 0 in lookup.shape.ranks
    return [(only_zeros if vanished else from_factors)(lookup, machine, dtype)]


def from_factors(lookup: Lookup, machine: Machine, dtype: str) -> Candidate:
    """Plan every distinct row as a product of slices of two factors.

    The plan contracts whole factors, which is too much for small batches on a CPU: these contract
    only the slices they read.
    """
    # Sizes: `rows` are made from slices (wide, rank) and (rank, high) of the two factors.
    shape, split = lookup.shape, lookup.shape.split
    rank, rows = shape.ranks[split - 1], lookup.distinct
    left, right = factor_chains(shape)
    wide, high = math.prod(shape.col_modes[:split]), math.prod(shape.col_modes[split:])
    left_size = math.prod(shape.slice_sizes[:split]) * rank
    right_size = math.prod(shape.slice_sizes[split:]) * rank
    # Distinct rows are an intermediate: they are sorted out first and gathered to y at the end.
    numbers = lookup.tokens * lookup.embedding_dim
    # The indices and their positions move log2(tokens) times.
    moved = math.ceil(4 * lookup.tokens * math.log2(max(2, lookup.tokens)))
    size = 2 * lookup.tokens * _INDEX_BYTES // item_size(dtype)
    sort = Step("distinct", ("indices",), "sort the indices", size, moved=moved, calls=6)
    gathers = [
        _gather("slices of A", left.name, rows * wide * rank),
        _gather("slices of B", right.name, rows * rank * high),
    ]
    forward = [
        gates(shape, _OPERATORS),
        *left.forward,
        *right.forward,
        # The modes of rows come first afterwards, so that a slice lies in one piece.
        _permute(left.name, left_size),
        _permute(right.name, right_size),
        sort,
        *gathers,
        product("rows", ("slices of A", "slices of B"), "bpr,brq->bpq", (rows, wide, rank, high)),
        _gather("y", "rows", numbers),
    ]
    # The slices are gathered again: keeping them would take a multiple of the output's memory.
    # Sorted indices and their order are kept.
    gradient = "grad(rows)"
    by_row = _scatter(gradient, OUTPUT_GRADIENT, numbers, rows * wide * high)
    backward = [
        replace(by_row, reads=(*by_row.reads, "distinct")),
        *gathers,
        product(
            "grad(slices of A)", (gradient, "slices of B"), "bpq,brq->bpr", (rows, wide, high, rank)
        ),
        product(
            "grad(slices of B)", ("slices of A", gradient), "bpr,bpq->brq", (rows, rank, wide, high)
        ),
        _scatter(f"grad({left.name})", "grad(slices of A)", rows * wide * rank, left_size),
        _scatter(f"grad({right.name})", "grad(slices of B)", rows * rank * high, right_size),
        _permute(f"grad({left.name})", left_size),
        _permute(f"grad({right.name})", right_size),
        *left.backward,
        *right.backward,
        gates(shape, _OPERATORS, backward=True),
    ]
    return candidate("unique", lookup, machine, dtype, forward, backward, lookup.cores())


def torch_embedding(lookup: Lookup, machine: Machine, dtype: str) -> Candidate:
    """Plan ``torch.nn.Embedding`` with a dense gradient, without optimizer, for comparison."""
    weight = lookup.num_embeddings * lookup.embedding_dim
    numbers = lookup.tokens * lookup.embedding_dim
    forward = [replace(_gather("y", "weight", numbers), modules=0.5)]
    scattered = _scatter("grad(weight)", OUTPUT_GRADIENT, numbers, weight)
    backward = [replace(scattered, modules=0.5)]
    parameters = {"weight": weight}
    return candidate("nn.Embedding", lookup, machine, dtype, forward, backward, parameters)


def only_zeros(lookup: Lookup, machine: Machine, dtype: str) -> Candidate:
    """Plan a table with a rank of zero, whose rows are all zero."""
    numbers = lookup.tokens * lookup.embedding_dim
    forward = [Step("y", (), "zeros", numbers, moved=numbers)]
    return candidate("zeros", lookup, machine, dtype, forward, [], {})


def _gather(name: str, source: str, numbers: int) -> Step:
    return Step(name, (source, "indices"), f"gather from {source}", numbers, copied=numbers)


def _scatter(name: str, source: str, numbers: int, size: int) -> Step:
    what = f"add up {source}"
    return Step(name, (source, "indices"), what, size, moved=size, copied=numbers, calls=2)


def _permute(name: str, numbers: int) -> Step:
    return Step(name, (name,), "rows and columns apart", numbers, copied=numbers)
