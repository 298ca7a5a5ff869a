"""Look up several embedding bags together, such as those of a recommendation model."""

import contextlib
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.embedding import TTEmbeddingBag
from comera.nn.fused import is_plain
from comera.nn.table import HotRows
from comera.ops.operator import is_concrete
from comera.ops.table.distinct_rows import Lookup
from comera.ops.table.tt_embedding import places, read_factors, tt_embedding_bags

_RANKS_ALIKE = 8
"""Ranks are padded to multiples of this."""

_FORWARD = TTEmbeddingBag.forward

Bags = Tensor | Mapping[str, Any] | Sequence[Any]


class TTEmbeddingBagCollection(nn.ModuleDict):
    """A dictionary of embedding bags, dense ones and tensor trains, with one forward pass for all.

    Tensor trains of equal width and similar rank are looked up in one call. Dense tables, and those
    with mode ``max`` or a ``hot_rank``, are looked up one by one.

    Args:
        tables: :class:`torch.nn.EmbeddingBag` and :class:`~comera.TTEmbeddingBag` by name.

    Shapes:
        The input has for every table, by name or in order, integers ``(bags, entries)``, or the
        arguments of the table's ``forward`` as a tuple: ``(indices (N,), offsets (bags,))``, and
        ``per_sample_weights`` if needed. A tensor ``(bags, tables)`` has one entry for each bag and
        table. The output is ``(bags, width)`` by name.

    Errors name the table.

    Example::

        tables = comera.TTEmbeddingBagCollection(
            {name: nn.EmbeddingBag(rows, 64, mode="sum") for name, rows in sizes.items()}
        )
        comera.tensorize_(tables, comera.TTConfig(rank=16))
        vectors = tables({"user": (indices, offsets), "item": item_indices})["user"]
    """

    def __init__(self, tables: Mapping[str, nn.Module] | None = None) -> None:
        if not isinstance(tables, Mapping | None):
            raise TypeError(
                f"tables={reprlib.repr(tables)} must be bags by name: "
                '{"user": nn.EmbeddingBag(1000, 64, mode="sum")}'
            )
        super().__init__(tables)
        self._at: dict[tuple[str, ...], tuple[Any, Tensor]] = {}  # see _places

    def forward(self, bags: Bags) -> dict[str, Tensor]:
        if isinstance(bags, Tensor):
            if bags.dim() != 2 or bags.shape[1] != len(self):
                raise ValueError(
                    f"a tensor asks each table for one entry a bag: (bags, {len(self)}), "
                    f"got {tuple(bags.shape)}"
                )
            bags = bags.split(1, 1)
        if not isinstance(bags, Mapping):
            if len(bags) != len(self):
                raise ValueError(f"there are {len(self)} tables, got bags of {len(bags)}")
            bags = dict(zip(self, bags, strict=True))
        if bags.keys() != set(self):
            raise ValueError(f"the tables are {sorted(self)}, got bags of {sorted(bags)}")
        request = {k: (of,) if isinstance(of, Tensor) else tuple(of) for k, of in bags.items()}
        groups: dict[Any, list[str]] = {}
        for name, each in self.items():
            groups.setdefault(_kind(each) or name, []).append(name)
        found: dict[str, Tensor] = {}
        for names in groups.values():
            if len(names) == 1:
                with _named(names[0]):
                    found[names[0]] = self.get_submodule(names[0])(*request[names[0]])
                continue
            requests = []
            for name in names:
                table: Any = self[name]  # a TTEmbeddingBag, see _kind
                with _named(name):
                    requests.append(table._request(*request[name])[2])
            parts = dict(zip(names, read_factors(requests), strict=True))
            sums = tt_embedding_bags(list(parts.values()), self._places(parts))
            found |= zip(names, sums, strict=True)
        return {name: found[name] for name in self}

    def _places(self, parts: Mapping[str, Lookup]) -> Tensor:
        """Return the places of the tables within the joined table, cached for CUDA graphs."""
        at, names = places(list(parts.values())), tuple(parts)
        device = parts[names[0]].left_VPR.device
        kept_at, kept = self._at.get(names, (None, None))
        if kept is not None and kept_at == (at, device):
            return kept
        made = torch.tensor(at, device=device)
        if is_concrete(made):
            self._at[names] = (at, device), made
        return made


@contextlib.contextmanager
def _named(table: str) -> Iterator[None]:
    """Add the table's name to the message of an error that is raised inside."""
    try:
        yield
    except (IndexError, ValueError, TypeError) as problem:
        raise type(problem)(f"table {table!r}: {problem}") from problem


def _kind(table: nn.Module) -> Any:
    """Return a key of tables that are looked up together; None for a table looked up alone."""
    if type(table) is not TTEmbeddingBag or table.mode == "max" or not is_plain(table, _FORWARD):
        return None
    if isinstance(table.hot, HotRows) or any(p.numel() == 0 for p in table.cores):
        return None
    shape, split = table.shape, table.shape.split
    columns = math.prod(shape.col_modes[:split]), math.prod(shape.col_modes[split:])
    rank, like = -(-table.ranks[split - 1] // _RANKS_ALIKE), table.cores[0]
    return table.embedding_dim, *columns, rank, like.dtype, like.device
