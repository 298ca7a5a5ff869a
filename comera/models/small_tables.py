"""Small embedding tables of other kinds, which tensor trains are compared with at equal size.

Shape suffixes: B = bags, N = entries of all bags, D = width, R = rank.
"""

import bisect
import math
import random
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["hashed", "quotient_remainder", "shared_array"]

_PRIME = 2**31 - 1
"""Of the hash ``(a x + b) mod p``: products of two numbers below it fit in 64 bits."""


class SmallTable(nn.Module):
    """Base of tables that add up rows, each of which is made when it is asked for.

    Args:
        num_embeddings: Rows that can be asked for.
        embedding_dim: Their width D.

    Shapes:
        indices ``(B, n)`` integers, or ``(N,)`` with offsets ``(B,)``; output ``(B, D)``.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def rows(self, indices_N: Tensor) -> Tensor:
        """Make rows ``(N, D)``."""
        raise NotImplementedError

    def forward(self, indices: Tensor, offsets_B: Tensor | None = None) -> Tensor:
        rows_ND = self.rows(indices.flatten())
        if offsets_B is None:
            return rows_ND.unflatten(0, indices.shape).sum(1)
        order_N = torch.arange(len(rows_ND), device=rows_ND.device)
        return F.embedding_bag(order_N, rows_ND, offsets_B.to(order_N), mode="sum")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class HashedTable(SmallTable):
    """Rows that share fewer ones, by the remainder of their index (arXiv 0902.2206).

    Args:
        num_embeddings: Rows that can be asked for; the most frequent ones come first.
        embedding_dim: Their width D.
        kept: Number of rows that exist.
        own: How many of these are those of the first indices alone.
        rank: Width R at which rows are kept, of which a matrix ``(R, D)`` makes D; None for D.
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
    """Products of a row for the quotient and one for the remainder of the index.

    Shi et al. 2020, arXiv 1909.02107, section 3, with the elementwise product.

    Args:
        num_embeddings: Rows that can be asked for.
        embedding_dim: Their width.
        divisor: Number of remainders.
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
        quotients = self.quotients(indices_N // divisor)
        return self.remainders(indices_N % divisor) * quotients


class SharedArrayTable(SmallTable):
    """Rows cut in blocks from one array that all tables share (ROBE, arXiv 2108.02191).

    Args:
        num_embeddings: Rows that can be asked for.
        embedding_dim: Their width D.
        array: The numbers ``(M,)``, held by a module that all of them know.
        block: Numbers that lie side by side in the array; divides D.
        number: Number of this table, so that each has a hash of its own.
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


class _Array(nn.Module):
    def __init__(self, params: int, bound: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(params).uniform_(-bound, bound))


def replace_tables_(
    tables: nn.ModuleDict,
    kind: Kind,
    params: int,
    rank: int | None = None,
    own: float = 0.0,
    block: int = 16,
) -> nn.ModuleDict:
    """Replace dense tables by small ones of at most ``params`` parameters together.

    All tables get as many rows, and none more than it had: one that is small already stays dense.

    Args:
        tables: :class:`torch.nn.EmbeddingBag` by name, of one width.
        kind: ``hashed``, ``quotient_remainder`` or ``shared_array``.
        params: Parameters of all of them.
        rank: Of hashed tables, see :class:`HashedTable`.
        own: Share of the rows of hashed tables that are those of the first indices alone.
        block: Of a shared array, see :class:`SharedArrayTable`.

    Returns:
        ``tables``, changed in place.

    Raises:
        ValueError: If so few parameters do not suffice.
    """
    sizes = {name: int(table.num_embeddings) for name, table in tables.items()}  # type: ignore[arg-type]
    width = int(next(iter(tables.values())).embedding_dim)  # type: ignore[arg-type]
    if kind == "shared_array":
        if params < block:
            raise ValueError(f"params={params} is less than a block of {block} numbers")
        array = _Array(params, 1 / math.sqrt(sum(sizes.values()) / len(sizes)))
        for number, (name, size) in enumerate(sizes.items()):
            tables[name] = SharedArrayTable(size, width, array, block, number)
        tables[next(iter(sizes))].array = array
        return tables

    def kept_of(size: int, most: int) -> int:
        return min(size, most)

    def composed_of(size: int, most: int) -> int:
        return min(size, most + math.ceil(size / most))

    if kind == "hashed":
        each, widen = rank or width, (rank or 0) * width
        most = _most_rows(sizes, lambda size, n: each * kept_of(size, n) + widen, params)
        for name, size in sizes.items():
            if rank or size > most:
                kept = kept_of(size, most)
                tables[name] = HashedTable(size, width, kept, int(own * kept), rank)
        return tables
    fewest = math.isqrt(max(sizes.values()))  # with as many remainders as quotients
    most = _most_rows(sizes, lambda size, n: width * composed_of(size, n), params, fewest)
    for name, size in sizes.items():
        if composed_of(size, most) < size:
            tables[name] = QuotientRemainderTable(size, width, most)
    return tables


def _most_rows(
    sizes: Mapping[str, int], cost: Callable[[int, int], int], params: int, from_: int = 1
) -> int:
    """Return the largest number of rows a table at which all of them cost at most ``params``.

    The cost may not fall with more rows, from ``from_`` of them on.
    """
    counts = range(from_, max(sizes.values()) + 1)
    fitting = bisect.bisect_right(
        counts, params, key=lambda n: sum(cost(size, n) for size in sizes.values())
    )
    if not fitting:
        raise ValueError(f"params={params} do not suffice for {len(sizes)} tables")
    return counts[fitting - 1]
