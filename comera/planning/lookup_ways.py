"""The ways rows of a tensor-train table can be read, and the dense table, as lists of steps.

By ``from_factors`` the cores are contracted to a left and a right factor, and each row is the
product of one slice of each; ``unique`` does the same once for every distinct row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from comera.planning.candidate import (
    OUTPUT_GRADIENT,
    Candidate,
    Step,
    candidate,
    factor_chains,
    gate_gradients,
    gates,
    product,
)
from comera.planning.contraction import Search, lookup_network, search
from comera.planning.machine import Machine, item_size
from comera.planning.products import check_count, check_width
from comera.shapes import TTMShape

_INDEX = 8
"""Bytes of an index."""

OPERATORS = 3
"""Python operators of a tensor-train table in each direction: two factors and the lookup."""


@dataclass(frozen=True)
class Lookup:
    """One batch of lookups in a table.

    Args:
        shape: Modes and ranks.
        tokens: Indices in the batch.
        distinct: Number of different indices to expect; as many as there can be if None.
        num_embeddings: Rows of the table if the modes multiply to more.
        embedding_dim: Width of the table if the modes multiply to more.
        train: Whether a backward pass follows.

    Raises:
        ValueError: If ``tokens`` is below one, ``distinct`` is not between one and ``tokens``, or a
            size does not fit the modes.
    """

    shape: TTMShape
    tokens: int
    distinct: int = None  # type: ignore[assignment]  # filled in by __post_init__
    num_embeddings: int = None  # type: ignore[assignment]
    embedding_dim: int = None  # type: ignore[assignment]
    train: bool = True

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens)
        rows = check_width("num_embeddings", self.num_embeddings, self.shape.num_rows)
        columns = check_width("embedding_dim", self.embedding_dim, self.shape.num_cols)
        distinct = min(self.tokens, rows) if self.distinct is None else self.distinct
        if not 1 <= distinct <= self.tokens:
            raise ValueError(f"distinct={distinct} must be between 1 and tokens={self.tokens}")
        object.__setattr__(self, "num_embeddings", rows)
        object.__setattr__(self, "embedding_dim", columns)
        object.__setattr__(self, "distinct", distinct)

    def __str__(self) -> str:
        return (
            f"embedding {self.num_embeddings} x {self.embedding_dim}, modes "
            f"{self.shape.describe_modes()}, ranks {' '.join(map(str, self.shape.ranks))}, "
            f"{self.distinct} distinct rows"
        )


def candidates(lookup: Lookup, machine: Machine, dtype: str) -> tuple[list[Candidate], set[str]]:
    """Return the candidates of a table, and the names of those that it runs."""
    if 0 in lookup.shape.ranks:
        return [only_zeros(lookup, machine, dtype)], {"zeros"}
    each = [from_factors(lookup, machine, dtype, unique=unique) for unique in (True, False)]
    return each, {"unique"}


def best_tree(lookup: Lookup) -> Search | None:
    """Return the best tree of a lookup row by row; None for a table that has vanished."""
    if 0 in lookup.shape.ranks:
        return None
    network = lookup_network(lookup.shape, lookup.tokens)
    return search(network, network.tensors if lookup.train else ())


def from_factors(lookup: Lookup, machine: Machine, dtype: str, *, unique: bool) -> Candidate:
    """Plan every row, or with ``unique`` every distinct one, as a product of slices of two factors.

    The factors are counted as contracted whole. On a CPU that is too much for large tables and
    small batches, for which only those slices are contracted that they read.
    """
    # Sizes: `rows` are made from slices (wide, rank) and (rank, high) of the two factors.
    shape, rank = lookup.shape, lookup.shape.ranks[lookup.shape.split - 1]
    rows = lookup.distinct if unique else lookup.tokens
    left, right = factor_chains(shape)
    wide, high = (
        math.prod(shape.col_modes[: shape.split]),
        math.prod(shape.col_modes[shape.split :]),
    )
    left_size = math.prod(shape.slice_sizes[: shape.split]) * rank
    right_size = math.prod(shape.slice_sizes[shape.split :]) * rank
    # Distinct rows are an intermediate: they are sorted out first and gathered to y at the end.
    numbers = lookup.tokens * lookup.embedding_dim
    made = "rows" if unique else "y"
    gradient = "grad(rows)" if unique else OUTPUT_GRADIENT
    search = [_sort(lookup.tokens, dtype)] if unique else []
    gathers = [
        _gather("slices of A", left.name, rows * wide * rank),
        _gather("slices of B", right.name, rows * rank * high),
    ]
    forward = [
        *gates(shape, OPERATORS),
        *left.forward,
        *right.forward,
        # The modes of rows come first afterwards, so that a slice lies in one piece.
        _permute(left.name, left_size),
        _permute(right.name, right_size),
        *search,
        *gathers,
        product(made, ("slices of A", "slices of B"), "bpr,brq->bpq", (rows, wide, rank, high)),
        *([_gather("y", made, numbers)] if unique else []),
    ]
    # The slices are gathered again: keeping them would take a multiple of the output's memory.
    # Sorted indices and their order are kept.
    by_row = _scatter(gradient, OUTPUT_GRADIENT, numbers, rows * wide * high)
    backward = [
        *([replace(by_row, reads=(*by_row.reads, "distinct"))] if unique else []),
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
        *gate_gradients(shape, OPERATORS),
    ]
    name = "unique" if unique else "factors"
    return _lookup(name, lookup, machine, dtype, forward, backward, _cores(shape))


def torch_embedding(lookup: Lookup, machine: Machine, dtype: str) -> Candidate:
    """Plan ``torch.nn.Embedding`` with a dense gradient, for comparison; no optimizer counted."""
    weight = lookup.num_embeddings * lookup.embedding_dim
    numbers = lookup.tokens * lookup.embedding_dim
    forward = [replace(_gather("y", "weight", numbers), modules=0.5)]
    scattered = _scatter("grad(weight)", OUTPUT_GRADIENT, numbers, weight)
    backward = [replace(scattered, modules=0.5)]
    return _lookup("nn.Embedding", lookup, machine, dtype, forward, backward, {"weight": weight})


def only_zeros(lookup: Lookup, machine: Machine, dtype: str) -> Candidate:
    """Plan a table that has vanished: every row is zero."""
    numbers = lookup.tokens * lookup.embedding_dim
    forward = [Step("y", (), "zeros", numbers, moved=numbers)]
    return _lookup("zeros", lookup, machine, dtype, forward, [], {})


def _lookup(
    name: str,
    lookup: Lookup,
    machine: Machine,
    dtype: str,
    forward: Sequence[Step],
    backward: Sequence[Step],
    parameters: Mapping[str, int],
) -> Candidate:
    return candidate(
        name,
        machine,
        dtype,
        forward=forward,
        backward=backward if lookup.train else [],
        inputs={"indices": lookup.tokens * _INDEX // item_size(dtype)},
        output_gradient=lookup.tokens * lookup.embedding_dim,
        parameters=parameters,
    )


def _cores(shape: TTMShape) -> dict[str, int]:
    return {f"core{k}": math.prod(size) for k, size in enumerate(shape.core_shapes)}


def _sort(tokens: int, dtype: str) -> Step:
    """Count a sort: numbers and their eight-byte positions move about log2(tokens) times each."""
    moved = math.ceil(4 * tokens * math.log2(max(2, tokens)))
    size = 2 * tokens * _INDEX // item_size(dtype)
    return Step("distinct", ("indices",), "sort the indices", size, moved=moved, calls=6)


def _gather(name: str, source: str, numbers: int) -> Step:
    return Step(name, (source, "indices"), f"gather from {source}", numbers, copied=numbers)


def _scatter(name: str, source: str, numbers: int, size: int) -> Step:
    what = f"add up {source}"
    return Step(name, (source, "indices"), what, size, moved=size, copied=numbers, calls=2)


def _permute(name: str, numbers: int) -> Step:
    return Step(name, (name,), "rows and columns apart", numbers, copied=numbers)
