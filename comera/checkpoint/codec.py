"""Write one tensor into streams and read it back: exactly, as a change, or as a pair of moments.

Changes and moments are pruned and quantised, after ExCP (arXiv 2406.11257). Each ``write_`` returns
a record, all that its ``read_`` needs beside the streams; both give the same reconstruction, bit by
bit. Shapes: n = entries, k = kept entries.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from comera.checkpoint.codebook import learn, median, norm, positions
from comera.checkpoint.snapshot import DTYPES
from comera.checkpoint.streams import (
    Bytes,
    DamagedError,
    StreamReader,
    Streams,
    codes_to_a_byte,
    from_gaps,
    pack,
    to_gaps,
    unpack,
)


@dataclass(frozen=True)
class Quality:
    """Precision of lossy tensors; see :class:`comera.checkpoint.chain.CheckpointChain`."""

    bits: int = 4
    rate: float = 0.055
    alpha: float = 0.0
    beta: float = 4.0
    key_bits: int = 6

    def of(self, name: str) -> "Quality":
        """Return the quality of a tensor of this name: cores of tensor trains are kept finer.

        The errors of all cores of a layer add up in its weight, and a loss feels those. As coarse
        as dense weights, tensor trains were read with a loss up to 3.8 percent too high after their
        ranks were cut, so with less than one (docs/experiments.md).
        """
        if not _CORE.search(name):
            return self
        return replace(self, rate=self.rate / _FINER, key_bits=min(8, self.key_bits + 2))


_CORE = re.compile(r"(^|\.)cores\.\d+$")
_FINER = 5.5


class Section:
    """The streams of one part of a checkpoint, which can be read without those of the others."""

    def __init__(self, name: str, streams: Streams | StreamReader) -> None:
        self._name, self._streams = name, streams

    def write(self, kind: str, values: Bytes) -> None:
        assert isinstance(self._streams, Streams)
        self._streams.write(f"{self._name}/{kind}", values)

    def read(self, kind: str, count: int) -> Bytes:
        assert isinstance(self._streams, StreamReader)
        return self._streams.read(f"{self._name}/{kind}", count)


_LARGEST = 1 << 48
_MOST_VALUES = 255


@dataclass(frozen=True)
class Record:
    """One tensor, or the two moments of one weight, in the streams of a checkpoint.

    Attributes:
        codec: The pair of functions that writes and reads it: ``exact``, ``change``, ``moments``.
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

    codec: str
    change: bool = False
    kept: int = 0
    books: tuple[int, ...] = ()
    places: str | int = "all"
    weight: str | None = None
    names: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()

    def of(self, names: list[str], tensors: list[Tensor], weight: str | None = None) -> Self:
        """Return the same record with the names, the shape and the dtypes of its tensors."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        shape = tuple(tensors[0].shape)
        return replace(self, names=tuple(names), shape=shape, dtypes=dtypes, weight=weight)

    @property
    def bytes(self) -> int:
        """Count the bytes of the tensors in memory."""
        return sum(math.prod(self.shape) * dtype.itemsize for dtype in self.dtypes)

    @property
    def is_of_model(self) -> bool:
        """Return whether the tensor is one of the model, not of the optimizer or extra state."""
        return self.names[0].startswith("model.")

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        }

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Return the record that plain values describe.

        Raises:
            DamagedError: If :meth:`as_json` could not have written them.
        """
        try:
            plain = {key: tuple(x) if isinstance(x, list) else x for key, x in value.items()}
            record = cls(**plain | {"dtypes": tuple(DTYPES[name] for name in value["dtypes"])})
            if record._is_possible():
                return record
        except (AttributeError, KeyError, TypeError):  # not a dict, or of other things
            pass
        raise DamagedError(f"no such tensor: {str(value)[:80]}")

    def _is_possible(self) -> bool:
        """Return whether everything is of its type, and figures fit tensors of this size."""
        exact, count = self.codec == "exact", len(self.dtypes)
        if not (
            isinstance(self.change, bool)
            and all(map(_is_count, (self.kept, *self.shape, *self.books)))
            and all(isinstance(name, str) for name in self.names)
            and isinstance(self.weight, str | None)
        ):
            return False
        entries = math.prod(self.shape)
        most_gaps = self.kept + entries // 255  # bytes
        return (
            self.codec in ("exact", "change", "moments")
            and 1 <= count == len(self.names) <= (2 if self.codec == "moments" else 1)
            and len(self.books) == (0 if exact else count)
            and all(book <= _MOST_VALUES for book in self.books)
            and (exact or all(dtype.is_floating_point for dtype in self.dtypes))
            and self.kept <= entries
            and (self.places != "all" or self.codec != "moments")
            and (
                self.places in ("all", "many")
                or (_is_count(self.places) and self.places <= most_gaps)
            )
        )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


# ── exactly ──────────────────────────────────────────────────────────────────────────────────────


def write_exact(section: Section, tensor: Tensor, base: Tensor | None = None) -> Record:
    """Write every bit of a tensor, or of its difference to a ``base`` of its dtype and shape.

    The bits are taken as integers, whose difference is small where the floats are near; the first
    bytes of all, the second bytes of all and so on each make a stream.
    """
    bits = _bits(tensor)
    if base is not None:
        bits = _zigzag(bits - _bits(base))
    for k, byte in enumerate(bits.view(np.uint8).reshape(-1, bits.itemsize).T):
        section.write(f"byte {k} of {bits.itemsize}", np.ascontiguousarray(byte))
    return Record("exact", change=base is not None)


def read_exact(
    section: Section, record: Record, shape: list[int], dtype: torch.dtype, base: Tensor | None
) -> Tensor:
    """Read a tensor that :func:`write_exact` wrote."""
    size = min(dtype.itemsize, _LARGEST_WHOLE)
    count = math.prod(shape) * dtype.itemsize // size
    bits = np.empty((count, size), np.uint8)
    for k in range(size):
        bits[:, k] = section.read(f"byte {k} of {size}", count)
    whole = bits.reshape(-1).view(f"u{size}")
    if record.change:
        if base is None:
            raise DamagedError("a change has nothing before it")
        whole = _unzigzag(whole) + _bits(base)
    return torch.from_numpy(whole.view(np.uint8)).view(dtype).reshape(shape)


_LARGEST_WHOLE = 8
"""Bytes of the largest integers there are; entries of more are taken as several."""


def _bits(tensor: Tensor) -> Any:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one entry, expanded
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8).numpy().view(f"u{min(flat.itemsize, _LARGEST_WHOLE)}")


def _zigzag(difference: Any) -> Any:
    """Turn integers near zero from either side into unsigned ones near zero."""
    signed = difference.view(f"i{difference.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _unzigzag(coded: Any) -> Any:
    return (coded >> 1) ^ (0 - (coded & 1))


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


def write_change(
    section: Section,
    weight: Tensor,
    base: Tensor | None,
    second: Tensor | None,
    quality: Quality,
) -> tuple[Record, Tensor, Tensor]:
    """Write the change of a weight since ``base``, or all of it, pruned and quantised.

    All of it where there is no base, and where the weight is not near to it: a base saves
    log2(|weight| / |change|) bits an entry, and errors are a share of the change. Where that is as
    large as the weight, as after :func:`comera.canonicalize_` or a new initialisation, it saves
    nothing and leaves errors of 20 percent of the weight and more, which multiply from core to
    core. So a base is used where the squares of the change sum to no more than half of those of
    the weight, which saves half a bit an entry or more; and where no more than one of 256 entries
    became zero, since without a base zeros are read as zeros, with one as what is left of them.

    What is read differs from the weight by a root mean square of no more than a quarter of the
    weight's, and of no more than ``4 / 2**key_bits`` of it where there is no base. What cannot be
    coded as well as that is written exactly.

    Args:
        section: The section that is written to.
        weight: Finite floats of any shape and size; of float64, ones that float32 can hold.
        base: The weight as the checkpoint before is read; same shape and dtype.
        second: The weight's second moments, by which small changes are left out.
        quality: ``bits`` and ``key_bits``: entries become one of so many values with a base and
            without; ``rate``: the price of a bit for a change as large as the weight, and more for
            a smaller one, by :func:`_worth_of_bits`; ``alpha``: factor of :func:`changed_weights`.

    Returns:
        The record, where kept entries lie (k,), and what will be read: error included, so that
        the next change makes up for it.
    """
    size, flat = norm(weight), weight.detach().float().reshape(-1)
    if base is not None and _is_near(weight, base, size):
        change = flat - base.float().reshape(-1)
        mask = changed_weights(change, second, quality.alpha)
        rate = min(quality.rate * _worth_of_bits(weight, change), max(quality.rate, _DEAREST))
        kept, book, codes = _quantised(change, mask, quality.bits, rate)
        now = _changed(weight.shape, weight.dtype, base, kept, book, codes)
        if distance(weight, now) <= _LARGEST_ERROR * size:
            places: str | int = "many"
            if MANY * len(kept) > len(flat):  # what is left out has a code of its own
                all_codes = torch.zeros(len(flat), dtype=torch.uint8)
                all_codes[kept] = codes + 1
                section.write("books", as_floats(book))
                section.write("codes of all", pack(all_codes.numpy(), len(book) + 1))
            else:
                places = write_gaps(section, kept)
                write_coded(section, "change", book, codes)
            return Record("change", kept=len(kept), books=(len(book),), places=places), kept, now
    kept = torch.arange(len(flat))
    some_are_zero = int(flat.count_nonzero()) < len(flat)
    learned = learn(flat, 2**quality.key_bits - 1, zeros=0 if some_are_zero else None)
    book, codes = learned.values, learned.codes(flat)
    now = _changed(weight.shape, weight.dtype, None, kept, book, codes)
    if distance(weight, now) <= 4 / 2**quality.key_bits * size:
        write_coded(section, "change", book, codes)
        return Record("change", kept=len(kept), books=(len(book),)), kept, now
    return write_exact(section, weight), kept, weight


_LARGEST_ERROR = 0.25
"""Largest error of a weight that is read by its base, as a share of the weight."""

_MOST_ZEROS = 1 / 256
"""Share of all entries that may be zero by chance, as some become in half precision."""


def distance(weight: Tensor, other: Tensor) -> float:
    """Return the root of the sum of squared differences; not finite if one is not."""
    return norm(weight.float() - other.float())


def _is_near(weight: Tensor, base: Tensor, size: float) -> bool:
    """Return whether a base is of use, see :func:`write_change`; one that is not finite is not."""
    if not 2 * distance(weight, base) ** 2 <= size**2:  # also where it is not a number
        return False
    most = _MOST_ZEROS * weight.numel()
    if weight.numel() - int(weight.count_nonzero()) <= most:
        return True
    return int(((weight == 0) & (base != 0)).sum()) <= most


_MOST_MEDIANS = 2.5
"""No change of a weight larger than so many medians is left out, as in the authors' code."""


def changed_weights(change_n: Tensor, second: Tensor | None, alpha: float) -> Tensor:
    """Mark the weights that have changed enough to be kept (ExCP, arXiv 2406.11257, section 3.3).

    Those with ``|change| > median|change| * min(2.5, alpha / sqrt(mean(second)))``: where
    gradients are large, smaller changes are kept too.

    Args:
        change_n: Change of the weights since the last checkpoint, float32 (n,).
        second: The second moments, of any shape; None if the optimizer keeps none.
        alpha: 0 or more, and 0 keeps every change there is; the paper's is 5e-5.

    Returns:
        bool (n,).
    """
    size = change_n.abs()
    root = 0.0 if second is None else float(second.mean(dtype=torch.float64)) ** 0.5
    medians = min(_MOST_MEDIANS, alpha / root if root else _MOST_MEDIANS) if alpha else 0.0
    return size > median(size) * medians


def _worth_of_bits(weight: Tensor, change: Tensor) -> float:
    """Return the factor of a bit's price: more, the smaller a change is beside the weight.

    Early in training a weight changes by half of itself from checkpoint to checkpoint, at the end
    by a hundredth. A loss suffers from errors in proportion to the weight, and at the end from
    smaller ones than at first: a price on bits between a share of the change and one of the weight
    makes the same loss of fewer bits than either (docs/experiments.md).
    """
    spreads = [_spread(values.float()) for values in (weight, change)]
    return (spreads[0] / spreads[1]) ** _BETWEEN if all(spreads) else 1.0


def _spread(values: Tensor) -> float:
    """Return the standard deviation, also where squares leave the range of float32."""
    found = float(values.std(correction=0))
    return found if 1e-15 < found < 1e15 else float(values.double().std(correction=0))


_BETWEEN = 0.75
"""0 is a price that is a share of the variance of the change; 2, of that of the weight."""

_DEAREST = 0.7
"""Highest price of a bit as a share of the change's variance: however small, it is not lost."""


def _quantised(
    change: Tensor, mask: Tensor, bits: int, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where entries are kept, a few values, and the number of each entry's value.

    With a price on bits, zero is one of the values, and what is nearest to it is not kept either.
    """
    kept = positions(mask)
    if not rate:
        learned = learn(change[kept], 2**bits - 1)
        return kept, learned.values, learned.codes(change[kept])
    learned = learn(change[kept], 2**bits, rate, zeros=len(change) - len(kept))
    codes = learned.codes(change[kept])
    zero = int((learned.values == 0).nonzero())
    some = positions(codes != zero)
    codes = codes[some]
    codes -= (codes > zero).to(torch.uint8)
    return kept[some], learned.values[learned.values != 0], codes


def read_change(
    section: Section, record: Record, shape: list[int], dtype: torch.dtype, base: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return where kept entries lie (k,), and the weight that :func:`write_change` wrote."""
    count, below, places = record.kept, math.prod(shape), record.places
    if base is None and places != "all":
        raise DamagedError("a change has nothing before it")
    if places == "many":
        book = read_floats(section, record.books[0])
        packed = section.read("codes of all", -(-below // codes_to_a_byte(len(book) + 1)))
        codes = torch.from_numpy(unpack(packed, len(book) + 1, below))
        kept = positions(codes > 0)
        codes = codes[kept] - 1
        _check_codes(codes, len(book))
    else:
        kept = torch.arange(below)
        if isinstance(places, int):
            kept = torch.from_numpy(from_gaps(section.read("gaps", places), count, below))
        book, codes = read_coded(section, "change", record.books[0], len(kept))
    if len(kept) != count:
        raise DamagedError(f"{len(kept)} entries are kept where {count} are stated")
    return kept, _changed(
        torch.Size(shape), dtype, None if places == "all" else base, kept, book, codes
    )


def _changed(
    shape: torch.Size,
    dtype: torch.dtype,
    base: Tensor | None,
    kept: Tensor,
    book: Tensor,
    codes: Tensor,
) -> Tensor:
    if base is None:
        return book[codes.long()].to(dtype).reshape(shape)
    flat = base.to(torch.float32, copy=True).reshape(-1)
    flat[kept] += book[codes.long()]
    return flat.to(dtype).reshape(shape)


# ── moments ──────────────────────────────────────────────────────────────────────────────────────


def write_moments(
    section: Section,
    first: Tensor,
    second: Tensor | None,
    kept_weights: Tensor | None,
    quality: Quality,
) -> Record:
    """Write first moments, and second moments if there are, pruned together and quantised.

    A first moment that is left out is read as zero. Its second moment is not: it is read as the
    product of its row's and its column's mean among those left out, for with a second moment that
    starts from zero, the next steps would be several times as long as before. The roots of second
    moments are what is quantised, since updates are divided by them.

    Args:
        section: The section that is written to.
        first: Finite floats of any shape.
        second: Numbers of the same shape, not negative.
        kept_weights: Where changes of the weight were kept; others' moments are left out. None
            considers all.
        quality: ``bits``: kept moments become one of so many values; ``rate``: the price of a bit;
            ``beta``: first moments up to ``beta`` times the mean magnitude are left out.
    """
    flat = first.detach().float().reshape(-1)
    mean = float(flat.abs().mean(dtype=torch.float64)) if len(flat) else 0.0
    among = flat if kept_weights is None else flat[kept_weights]
    mask = among.abs() > quality.beta * mean
    places = positions(mask)
    among = among[places]
    book = learn(among, 2**quality.bits - 1, quality.rate)
    write_coded(section, "first", book.values, book.codes(among))
    books: tuple[int, ...] = (len(book.values),)
    at: str | int = "many"
    if MANY * len(places) > len(mask):
        section.write("places of moments", np.packbits(mask.numpy()))
    else:
        at = write_gaps(section, places, " of moments")
    if second is not None:
        kept = places if kept_weights is None else kept_weights[places]
        roots = second.detach().float().reshape(-1)[kept].sqrt()
        book = learn(roots, 2**quality.bits - 1, quality.rate)
        write_coded(section, "second", book.values, book.codes(roots))
        books += (len(book.values),)
        _write_means(section, second, kept)
    return Record("moments", kept=len(places), books=books, places=at)


def read_moments(
    section: Section,
    record: Record,
    shape: list[int],
    dtypes: list[torch.dtype],
    kept_weights: Tensor | None,
) -> list[Tensor]:
    """Return the first moments, and the second if they were written by :func:`write_moments`."""
    size = math.prod(shape)
    below, count = size if kept_weights is None else len(kept_weights), record.kept
    if record.places == "many":
        mask = np.unpackbits(section.read("places of moments", -(-below // 8)), count=below)
        kept = torch.from_numpy(np.flatnonzero(mask))
        if len(kept) != count:
            raise DamagedError(f"{len(kept)} moments are kept where {count} are stated")
    else:
        gaps = section.read("gaps of moments", int(record.places))
        kept = torch.from_numpy(from_gaps(gaps, count, below))
    kept = kept if kept_weights is None else kept_weights[kept]
    book, codes = read_coded(section, "first", record.books[0], count)
    first = torch.zeros(size)
    first[kept] = book[codes.long()]
    moments = [first]
    if len(record.books) == 2:
        book, codes = read_coded(section, "second", record.books[1], count)
        second = _read_means(section, shape).reshape(-1)
        second[kept] = book.square()[codes.long()]
        moments.append(second)
    return [_narrowed(m, dtype).reshape(shape) for m, dtype in zip(moments, dtypes, strict=True)]


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to another dtype; what was rounded up beyond its range is its largest number."""
    return values.clamp(max=min(torch.finfo(t).max for t in (dtype, torch.float32))).to(dtype)


_STEPS = 5.0
"""Codes of means to a factor of two: the root of a mean is within 4 percent."""


def _write_means(section: Section, second: Tensor, kept: Tensor) -> None:
    rest = second.detach().float().reshape(-1).clone()
    rest[kept] = 0
    there = torch.ones_like(rest)
    there[kept] = 0
    vectors_of_means = [rest.sum(dtype=torch.float64) / there.sum().clamp(min=1)]
    if _has_lines(second.shape):
        matrix, there = (x.reshape(second.shape[0], -1) for x in (rest, there))
        vectors_of_means += [
            matrix.sum(d, dtype=torch.float64) / there.sum(d).clamp(min=1) for d in (1, 0)
        ]
    for means in vectors_of_means:
        means = means.float().reshape(-1)
        largest = means.amax()
        section.write("books", as_floats(largest))
        down = torch.log2(largest / means.double()) * _STEPS  # infinite for a mean of zero
        codes = torch.where(means > 0, (255 - down).round().clamp(min=1), 0)
        section.write("means", codes.to(torch.uint8).numpy())


def _read_means(section: Section, shape: list[int]) -> Tensor:
    def read(count: int) -> Tensor:
        largest = read_floats(section, 1)
        codes = torch.from_numpy(section.read("means", count).astype(np.float32))
        return torch.where(codes > 0, largest * torch.exp2((codes - 255) / _STEPS), 0)

    whole, size = read(1), math.prod(shape)
    if not _has_lines(shape):
        return whole.expand(size).clone()
    rows, columns = read(shape[0]), read(size // shape[0])
    ratios = (columns / whole.double().clamp(min=_LEAST)).float()
    return torch.outer(rows, ratios).clamp(max=torch.finfo(torch.float32).max)


_LEAST = 2.0**-149
"""The smallest number of float32 that is not zero."""


def _has_lines(shape: torch.Size | list[int]) -> bool:
    """Return whether a mean a row and a column costs little beside the rest."""
    size = math.prod(shape)
    return len(shape) > 1 and size > 0 and shape[0] + size // shape[0] <= size // 32


# ── places and codes ─────────────────────────────────────────────────────────────────────────────


MANY = 12
"""Entries for each kept one below which a code for all takes fewer bytes than gaps."""


def write_gaps(section: Section, places: Tensor, of: str = "") -> int:
    """Write positions as gaps; returns their bytes."""
    gaps = to_gaps(places.numpy())
    section.write(f"gaps{of}", gaps)
    return len(gaps)


def write_coded(section: Section, kind: str, book: Tensor, codes: Tensor) -> None:
    section.write("books", as_floats(book))
    section.write(f"codes of {kind}", pack(codes.numpy(), len(book)))


def read_coded(section: Section, kind: str, size: int, count: int) -> tuple[Tensor, Tensor]:
    if not 0 <= size <= 255:
        raise DamagedError(f"a codebook has {size} values")
    book = read_floats(section, size)
    packed = section.read(f"codes of {kind}", -(-count // codes_to_a_byte(size)))
    codes = torch.from_numpy(unpack(packed, size, count))
    _check_codes(codes, size)
    return book, codes


def _check_codes(codes: Tensor, size: int) -> None:
    if len(codes) and int(codes.max()) >= size:
        raise DamagedError(f"a code lies beyond the {size} values of its codebook")


def as_floats(values: Tensor) -> Bytes:
    return _bits(values.float()).view(np.uint8)


def read_floats(section: Section, count: int) -> Tensor:
    return torch.from_numpy(section.read("books", 4 * count).view(np.float32).copy())
