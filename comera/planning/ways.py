"""Plan the ways to compute compressed layers and lookups, and the dense ones, as lists of steps.

A factorized layer multiplies the batch by the contracted factors ``A (in, r)`` and ``B (r, out)``
in turn, a reconstructed one by ``W = A B``. A block tensor train is two batched products. A lookup
contracts the cores to two factors, and multiplies a slice of each for every distinct row read.

Letters of the equations of blocks: t = tokens, a and b = blocks of the input and the numbers in
each, c and d = those of the output, r = rank of the blocks.
"""

import math
from collections.abc import Callable, Sequence
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
from comera.planning.machine import PACKED_FROM, Machine, item_size
from comera.shapes import (
    BTTShape,
    LinearShape,
    TTMShape,
    TTShape,
    check_whole_numbers,
    padded_rank,
)

Dims = tuple[int, int, int]
"""``(rows, depth, columns)`` of one matrix product."""

_INDEX_BYTES = 8
_OPERATORS = 3
"""Python operators of a tensor-train table in each direction: two factors and the lookup."""


@dataclass(frozen=True)
class Layer(Work):
    """One linear layer at one batch.

    Args:
        shape: Modes and ranks.
        tokens: Rows of the batch: all dimensions of the input but the last, multiplied.
        in_features: Width of the input if the modes multiply to more.
        out_features: Width of the output if the modes multiply to more.
        bias: Whether a bias is added.
        together: Number of layers of this shape that contract their cores in the same calls.
        grouped: Whether those layers multiply their batches in the same calls too, as experts with
            few rows do.
    """

    shape: LinearShape
    tokens: int
    in_features: int = None  # type: ignore[assignment]  # filled in by __post_init__
    out_features: int = None  # type: ignore[assignment]
    bias: bool = True
    together: int = 1
    grouped: bool = False

    def __post_init__(self) -> None:
        check_whole_numbers(1, tokens=self.tokens, together=self.together)
        self.fill_width("in_features", self.shape.in_width)
        self.fill_width("out_features", self.shape.out_width)

    def __str__(self) -> str:
        return (
            f"linear {self.in_features} -> {self.out_features}, modes "
            f"{self.shape.describe_modes()}, ranks {' '.join(map(str, self.shape.ranks))}"
        )

    def sizes(self, dtype: str) -> tuple[dict[str, int], int]:
        return {"x": self.tokens * self.in_features}, self.tokens * self.out_features

    @property
    def rank(self) -> int:
        """The bond between the factors."""
        return self.shape.ranks[self.shape.split - 1]

    @property
    def bond(self) -> int:
        """The bond between the factors as computed: padded, with room for the bias."""
        return padded_rank(self.rank, self.bias)

    @property
    def operators(self) -> float:
        """Python operators in each pass: for the batch and, as a share, for the cores."""
        return (1 / self.together if self.grouped else 1) + 1 / self.together

    @property
    def biases(self) -> dict[str, int]:
        """The bias's size by its name; empty without a bias."""
        return {"bias": self.out_features} if self.bias else {}


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


def candidates(layer: Layer | Lookup, machine: Machine, dtype: str) -> list[Candidate]:
    """Return the candidates of a layer, which can run all of them; a table has one."""
    if 0 in layer.shape.ranks:
        return [vanished(layer, machine, dtype)]
    if isinstance(layer, Lookup):
        return [from_factors(layer, machine, dtype)]
    return [plan(layer, machine, dtype) for plan in BY_FORMAT[type(layer.shape)]]


def _reconstructed_products(layer: Layer) -> tuple[Dims, ...]:
    """List the sizes of the products that make W, y, and the gradients of x, W, A and B."""
    batch, bond, wide, high = layer.tokens, layer.bond, layer.in_features, layer.out_features
    w, y, grad_x = (wide, bond, high), (batch, wide, high), (batch, high, wide)
    return w, y, grad_x, (wide, batch, high), (wide, high, bond), (bond, wide, high)


def factorized(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``y = (x A) B``; the bias is one more row of B, against a column of ones."""
    left, right = factor_chains(layer.shape)
    batch, bond, wide, high = layer.tokens, layer.bond, layer.in_features, layer.out_features
    ones = Step("t", ("t",), "ones for the bias", batch * bond, moved=batch)
    forward = [
        *_factors(layer),
        product("t", ("x", "A"), "bi,ir->br", (1, batch, wide, bond)),
        *([ones] if layer.bias else []),
        product("y", ("t", "B"), "br,ro->bo", (1, batch, bond, high)),
    ]
    backward = [
        product("grad(t)", ("gy", "B"), "bo,ro->br", (1, batch, high, bond)),
        product("grad(x)", ("grad(t)", "A"), "br,ir->bi", (1, batch, bond, wide)),
        product(f"grad({left.name})", ("x", "grad(t)"), "bi,br->ir", (1, wide, batch, bond)),
        product(f"grad({right.name})", ("t", "gy"), "br,bo->ro", (1, bond, batch, high)),
        *_core_gradients(layer),
    ]
    parameters = layer.cores() | layer.biases
    return candidate("factorized", layer, machine, dtype, forward, backward, parameters)


def reconstructed(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``W = A B``, then the products of an ordinary linear layer."""
    left, right = factor_chains(layer.shape)
    w, y, gx, gw, ga, gb = _reconstructed_products(layer)
    forward = [
        *_factors(layer),
        product("W", ("A", "B"), "ir,ro->io", (1, *w)),
        product("y", ("x", "W"), "bi,io->bo", (1, *y)),
    ]
    backward = [
        product("grad(x)", ("gy", "W"), "bo,io->bi", (1, *gx)),
        product("grad(W)", ("x", "gy"), "bi,bo->io", (1, *gw)),
        *_bias_gradient(layer),
        product(f"grad({left.name})", ("grad(W)", "B"), "io,ro->ir", (1, *ga)),
        product(f"grad({right.name})", ("A", "grad(W)"), "ir,io->ro", (1, *gb)),
        *_core_gradients(layer),
    ]
    parameters = layer.cores() | layer.biases
    return candidate("reconstructed", layer, machine, dtype, forward, backward, parameters)


def torch_linear(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``torch.nn.Linear`` of the same widths, for comparison."""
    _, y, gx, gw, _, _ = _reconstructed_products(layer)
    forward = [replace(product("y", ("x", "weight"), "bi,oi->bo", (1, *y)), modules=0.5)]
    backward = [
        product("grad(x)", ("gy", "weight"), "bo,oi->bi", (1, *gx)),
        replace(product("grad(weight)", ("gy", "x"), "bo,bi->oi", (1, *gw)), modules=0.5),
        *_bias_gradient(layer),
    ]
    parameters = {"weight": layer.in_features * layer.out_features} | layer.biases
    machine = machine.without_onednn
    return candidate("nn.Linear", layer, machine, dtype, forward, backward, parameters)


def vanished(work: Layer | Lookup, machine: Machine, dtype: str) -> Candidate:
    """Plan a rank of zero: outputs are the bias or zeros, and so are gradients of inputs."""
    _, high = work.sizes(dtype)
    if isinstance(work, Lookup):
        zeros = [Step("y", (), "zeros", high, moved=high)]
        return candidate("zeros", work, machine, dtype, zeros, [], {})
    wide, what = work.tokens * work.in_features, "the bias in every row" if work.bias else "zeros"
    forward = [Step("y", (), what, high, moved=high)]
    backward = [Step("grad(x)", (), "zeros", wide, moved=wide), *_bias_gradient(work)]
    return candidate("only the bias", work, machine, dtype, forward, backward, work.biases)


def _factors(layer: Layer) -> list[Step]:
    """List the steps that contract the cores to A and B and pad the bond between them."""
    left, right = factor_chains(layer.shape)
    rank, bond, wide, high = layer.rank, layer.bond, layer.in_features, layer.out_features
    what = f"bond {rank} padded to {bond}"
    steps = [
        gates(layer.shape, layer.operators),
        *left.forward,
        *right.forward,
        Step("A", (left.name,), what, wide * bond, moved=wide * (rank + bond), calls=2),
        Step(
            "B", (right.name, *layer.biases), what, high * bond, moved=high * (rank + bond), calls=2
        ),
    ]
    return [replace(step, calls=step.calls / layer.together) for step in steps]


def _core_gradients(layer: Layer) -> list[Step]:
    left, right = factor_chains(layer.shape)
    steps = [*left.backward, *right.backward, gates(layer.shape, layer.operators, backward=True)]
    return [replace(step, calls=step.calls / layer.together) for step in steps]


def _bias_gradient(layer: Layer) -> list[Step]:
    if not layer.bias:
        return []
    numbers = layer.tokens * layer.out_features
    return [Step("grad(bias)", ("gy",), "sum over rows", layer.out_features, moved=numbers)]


def blocks(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``y = (x A) B``, A and B being matrices with blocks along their diagonals."""
    shape = layer.shape
    assert isinstance(shape, BTTShape)
    (a, b), (c, d), (rank,), tokens = shape.in_modes, shape.out_modes, shape.ranks, layer.tokens
    hidden, high, wide = tokens * a * c * rank, tokens * c * d, tokens * a * b
    left_size, right_size = (size * rank for size in shape.slice_sizes)
    pads = wide if a * b > layer.in_features else 0
    # On a card products are written where they belong.
    y, gh, gx = (0, 0, 0) if machine.kind == "cuda" else (high, hidden, wide)
    forward = [
        gates(shape, 1 / layer.together),
        Step("A", ("core0",), "abcr to a,rc,b", left_size, copied=left_size),
        Step("B", ("core1",), "rcad to c,ar,d", right_size, copied=right_size),
        product("h", ("A", "x"), "arcb,abt->arct", (a, c * rank, b, tokens), copied=pads),
        product("y", ("h", "B"), "arct,card->tcd", (c, tokens, a * rank, d), copied=y),
    ]
    backward = [
        *_bias_gradient(layer),
        product("grad(B)", ("h", "gy"), "arct,tcd->card", (c, a * rank, tokens, d)),
        product("grad(h)", ("gy", "B"), "tcd,card->arct", (c, tokens, d, a * rank), copied=gh),
        product("grad(A)", ("x", "grad(h)"), "abt,arct->arcb", (a, b, tokens, c * rank)),
        product("grad(x)", ("grad(h)", "A"), "arct,arcb->tab", (a, tokens, c * rank, b), copied=gx),
        gates(shape, 1 / layer.together, backward=True),
    ]
    parameters = layer.cores() | layer.biases
    machine = machine if rank * b >= PACKED_FROM else machine.without_onednn
    return candidate("blocks", layer, machine, dtype, forward, backward, parameters)


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


def _gather(name: str, source: str, numbers: int) -> Step:
    return Step(name, (source, "indices"), f"gather from {source}", numbers, copied=numbers)


def _scatter(name: str, source: str, numbers: int, size: int) -> Step:
    what = f"add up {source}"
    return Step(name, (source, "indices"), what, size, moved=size, copied=numbers, calls=2)


def _permute(name: str, numbers: int) -> Step:
    return Step(name, (name,), "rows and columns apart", numbers, copied=numbers)


Way = Callable[[Layer, Machine, str], Candidate]
BY_FORMAT: dict[type[LinearShape], Sequence[Way]] = {
    TTShape: (factorized, reconstructed), BTTShape: (blocks,),
}  # fmt: skip
"""The ways to compute a linear layer by the class of its shape; a format adds its own."""
