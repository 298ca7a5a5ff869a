"""What the index of a checkpoint says of each tensor: how it is coded, and what was kept of it."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeGuard

import torch
from torch import Tensor

from comera.checkpoint.streams import DamagedError
from comera.checkpoint.tree import DTYPES

_LARGEST = 1 << 48
_MOST_VALUES = 255


@dataclass(frozen=True)
class Record:
    """One tensor, or the two moments of one weight, in the streams of a checkpoint.

    Attributes:
        codec: Which pair of functions writes and reads it.
        change: Whether the bits of ``exact`` are those of a difference to the one before.
        kept: How many entries the other codecs have kept.
        books: How many values each of their codebooks has; two for first and second moments.
        places: Where kept entries lie: ``all``, ``many`` (marked one by one), or the bytes of their
            gaps.
        weight: The weight without whose changes ``moments`` cannot be read, if any.
        names: Names of the tensors.
        shape: Shape that all of them have.
        dtypes: Dtype of each of them.
    """

    codec: Literal["exact", "change", "moments"]
    change: bool = False
    kept: int = 0
    books: tuple[int, ...] = ()
    places: str | int = "all"
    weight: str | None = None
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def of(self, names: list[str], tensors: list[Tensor], weight: str | None = None) -> Self:
        """Return the same record with what is said of the tensors themselves."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        shape = tuple(tensors[0].shape)
        return replace(self, names=tuple(names), shape=shape, dtypes=dtypes, weight=weight)

    @property
    def bytes(self) -> int:
        """Count the bytes of the tensors in memory."""
        return sum(math.prod(self.shape) * dtype.itemsize for dtype in self.dtypes)

    @property
    def is_of_model(self) -> bool:
        """Tell whether the tensor is one of the model, not of the optimizer or extra state."""
        return self.names[0].startswith("model.")

    def as_json(self) -> dict[str, Any]:
        """Return plain values, their keys in the order in which every archive has them."""
        coded: dict[str, Any]
        if self.codec == "exact":
            coded = {"change": self.change}
        elif self.codec == "change":
            coded = {"kept": self.kept, "book": self.books[0], "places": self.places}
        else:
            coded = {"kept": self.kept, "books": list(self.books), "places": self.places}
            coded["weight"] = self.weight
        return {
            "codec": self.codec,
            **coded,
            "names": list(self.names),
            "shape": list(self.shape),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
        }

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Return the record that plain values describe.

        Raises:
            DamagedError: If :meth:`as_json` could not have written them.
        """
        match value:
            case {"names": list(names), "shape": list(shape), "dtypes": list(dtypes)} if (
                1 <= len(names) == len(dtypes) <= 2
                and all(isinstance(name, str) for name in names)
                and all(_is_count(size) for size in shape)
                and all(isinstance(dtype, str) and dtype in DTYPES for dtype in dtypes)
            ):
                record = cls._coded(value)
                kinds = tuple(DTYPES[dtype] for dtype in dtypes)
                if record is not None and record._fits(math.prod(shape), kinds):
                    return replace(record, names=tuple(names), shape=tuple(shape), dtypes=kinds)
        raise DamagedError(f"no such tensor: {str(value)[:80]}")

    @classmethod
    def _coded(cls, value: dict[str, Any]) -> Self | None:
        match value:
            case {"codec": "exact", "change": bool(change)}:
                return cls("exact", change)
            case {"codec": "change", "kept": kept, "book": book, "places": places}:
                return cls("change", kept=kept, books=(book,), places=places)
            case {
                "codec": "moments",
                "kept": kept,
                "books": list(books),
                "places": places,
                "weight": None | str() as weight,
            } if places != "all":
                return cls("moments", False, kept, tuple(books), places, weight)
        return None

    def _fits(self, entries: int, kinds: tuple[torch.dtype, ...]) -> bool:
        """Tell whether the figures are possible for tensors of so many entries."""
        if self.codec == "exact":
            return len(kinds) == 1
        if not all(kind.is_floating_point for kind in kinds) or len(kinds) != len(self.books):
            return False
        if not (_is_count(self.kept) and self.kept <= entries):
            return False
        if not all(_is_count(book) and book <= _MOST_VALUES for book in self.books):
            return False
        most = self.kept + entries // 255  # bytes of gaps
        places = self.places
        return places in ("all", "many") or (_is_count(places) and places <= most)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
