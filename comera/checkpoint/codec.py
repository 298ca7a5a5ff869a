"""Write one tensor into streams and read it back: exactly, as a change, or as a pair of moments.

Changes and moments are pruned and quantised, after ExCP (arXiv 2406.11257). Each ``write_`` returns
a record with all that its ``read_`` needs besides the streams; both return the same tensor, bit by
bit. Shapes: n = entries, k = kept entries.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from comera.checkpoint.codebook import learn, norm, positions
from comera.checkpoint.skeleton import DTYPES
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
from comera.params import bytes_of

_LARGEST = 1 << 48
_MOST_VALUES = 255
_LARGEST_WHOLE = 8
"""Bytes of the largest integers of numpy; an entry of more is several of them."""
_CORE = re.compile(r"(^|\.)cores\.\d+$")
_FINER = 5.5
_LARGEST_ERROR = 0.25
"""Largest error of a weight that is read by its base, as a share of the weight."""
_MOST_ZEROS = 1 / 256
"""Share of all entries that may become zero by chance, as some do in half precision."""
_MOST_MEDIANS = 2.5
"""No change of a weight larger than so many medians is left out, as in the authors' code."""
_BETWEEN = 0.75
"""0 is a price that is a share of the variance of the change; 2, of that of the weight."""
_DEAREST = 0.7
"""Highest price of a bit as a share of the change's variance: no change is lost as a whole."""
_MANY = 12
"""Entries for each kept one below which a code for all takes fewer bytes than gaps."""
_STEPS = 5.0
"""Codes of means to a factor of two: the root of a mean is within 4 percent."""
_LEAST = 2.0**-149
"""The smallest number of float32 above zero."""


@dataclass(frozen=True)
class Quality:
    """Settings of lossy tensors; see :class:`comera.checkpoint.chain.CheckpointChain`."""

    bits: int = 4
    rate: float = 0.055
    alpha: float = 0.0
    beta: float = 4.0
    key_bits: int = 6

    def of(self, name: str) -> "Quality":
        """Return a tensor's quality, which is finer for cores: their errors add up in a weight."""
        if not _CORE.search(name):
            return self
        return replace(self, rate=self.rate / _FINER, key_bits=min(8, self.key_bits + 2))


@dataclass(frozen=True)
class Record:
    """One tensor, or the two moments of one weight, in the streams of a checkpoint.

    The ``codec`` is ``exact``, where ``change`` is whether the change since the previous checkpoint
    is stored, or ``change`` or ``moments``. These two have ``kept`` so many entries, with ``books``
    of so many values; ``places`` is how positions are coded: ``all`` are kept, ``many`` (marked one
    by one), or the number of bytes of gaps between them. Positions of ``moments`` refer to the kept
    entries of ``weight``, if it is given.
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

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return sum(self.size * dtype.itemsize for dtype in self.dtypes)

    @property
    def part(self) -> str:
        """Part of the checkpoint to which the tensors belong: ``model`` or ``rest``."""
        return _part_of(self.names[0])

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        }

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Return the record of :meth:`as_json`; ``DamagedError`` if the value is no such record."""
        try:
            plain = {key: tuple(x) if isinstance(x, list) else x for key, x in value.items()}
            record = cls(**plain | {"dtypes": tuple(DTYPES[name] for name in value["dtypes"])})
            if record._is_possible():
                return record
        except (AttributeError, KeyError, TypeError):  # not a dict, or of other things
            pass
        raise DamagedError(f"no such tensor: {str(value)[:80]}")

    def _is_possible(self) -> bool:
        exact, count = self.codec == "exact", len(self.dtypes)
        return (
            isinstance(self.change, bool)
            and all(map(_is_count, (self.kept, *self.shape, *self.books)))
            and all(isinstance(name, str) for name in self.names)
            and isinstance(self.weight, str | None)
            and self.codec in ("exact", "change", "moments")
            and 1 <= count == len(self.names) <= (2 if self.codec == "moments" else 1)
            and len(self.books) == (0 if exact else count)
            and all(book <= _MOST_VALUES for book in self.books)
            and (exact or all(dtype.is_floating_point for dtype in self.dtypes))
            and self.kept <= self.size
            and (self.places != "all" or self.codec != "moments")
            and (
                self.places in ("all", "many")
                or (_is_count(self.places) and self.places <= self.kept + self.size // 255)
            )
        )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _part_of(name: str) -> str:
    return "model" if name.startswith("model.") else "rest"


# ── exactly ──────────────────────────────────────────────────────────────────────────────────────


def write_exact(streams: Streams, name: str, tensor: Tensor, base: Tensor | None = None) -> Record:
    """Write every bit of a tensor, or of its difference to a ``base`` of its dtype and shape.

    The bits are taken as integers; each byte of these has a stream of its own.
    """
    bits = _bits(tensor)
    if base is not None:
        # Integers near zero from either side become unsigned ones near zero.
        signed = (bits - _bits(base)).view(f"i{bits.itemsize}")
        bits = ((signed << 1) ^ (signed >> (8 * bits.itemsize - 1))).view(bits.dtype)
    for k, byte in enumerate(bits.view(np.uint8).reshape(-1, bits.itemsize).T):
        streams.write(f"{_part_of(name)}/byte {k} of {bits.itemsize}", np.ascontiguousarray(byte))
    return Record(
        "exact", base is not None, names=(name,), shape=(*tensor.shape,), dtypes=(tensor.dtype,)
    )


def read_exact(reader: StreamReader, record: Record, base: Tensor | None) -> Tensor:
    (dtype,) = record.dtypes
    size = min(dtype.itemsize, _LARGEST_WHOLE)
    count = record.bytes // size
    bits = np.empty((count, size), np.uint8)
    for k in range(size):
        bits[:, k] = reader.read(f"{record.part}/byte {k} of {size}", count)
    whole = bits.reshape(-1).view(f"u{size}")
    if record.change:
        if base is None:
            raise DamagedError("a change has nothing before it")
        whole = ((whole >> 1) ^ (0 - (whole & 1))) + _bits(base)
    return torch.from_numpy(whole.view(np.uint8)).view(dtype).reshape(record.shape)


def _bits(tensor: Tensor) -> Any:
    return bytes_of(tensor).view(f"u{min(tensor.itemsize, _LARGEST_WHOLE)}")


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


def write_change(
    streams: Streams,
    name: str,
    weight: Tensor,
    base: Tensor | None,
    second: Tensor | None,
    quality: Quality,
) -> tuple[Record, Tensor, Tensor]:
    """Write the change of a weight since ``base``, or all of it, pruned and quantised.

    The base saves log2(|weight| / |change|) bits an entry. It is used if the squared norm of the
    change is at most half of the weight's, and at most one in 256 entries became zero: with a base
    these would not be read as zeros. The root mean square error is at most a quarter of the root
    mean square weight, and at most ``4 / 2**key_bits`` of it without a base; weights that cannot
    meet this are written exactly. ``weight`` holds finite floats of any shape, in the range of
    float32; ``base`` is the weight as read from the previous checkpoint, of its shape and dtype;
    ``second`` are its second moments. Returns the record, the positions of kept entries (k,), and
    the weight as it will be read.
    """
    quality, size = quality.of(name), norm(weight)
    flat = weight.detach().float().reshape(-1)
    record = Record("change", names=(name,), shape=(*weight.shape,), dtypes=(weight.dtype,))
    if base is not None and _is_near(weight, base, size):
        change = flat - base.float().reshape(-1)
        mask = changed_weights(change, second, quality.alpha)
        rate = min(quality.rate * _worth_of_bits(weight, change), max(quality.rate, _DEAREST))
        kept, book, codes = _quantised(change, mask, quality.bits, rate)
        now = _changed(record, base, kept, book, codes)
        if distance(weight, now) <= _LARGEST_ERROR * size:
            places: str | int = "many"
            if _MANY * len(kept) > len(flat):  # what is left out has a code of its own
                all_codes = torch.zeros_like(flat, dtype=torch.uint8)
                all_codes[kept] = codes + 1
                streams.write("model/books", _as_floats(book))
                streams.write("model/codes of all", pack(all_codes.numpy(), len(book) + 1))
            else:
                places = _write_gaps(streams, "model/gaps", kept)
                _write_coded(streams, "model", "change", book, codes)
            return replace(record, kept=len(kept), books=(len(book),), places=places), kept, now
    kept = torch.arange(len(flat), device=flat.device)
    some_are_zero = int(flat.count_nonzero()) < len(flat)
    learned = learn(flat, 2**quality.key_bits - 1, zeros=0 if some_are_zero else None)
    book, codes = learned.values, learned.codes(flat)
    now = _changed(record, None, kept, book, codes)
    if distance(weight, now) <= 4 / 2**quality.key_bits * size:
        _write_coded(streams, "model", "change", book, codes)
        return replace(record, kept=len(kept), books=(len(book),)), kept, now
    return write_exact(streams, name, weight), kept, weight


def distance(weight: Tensor, other: Tensor) -> float:
    """Return the root of the sum of squared differences; not finite if an entry is not."""
    return norm(weight.float() - other.float())


def _is_near(weight: Tensor, base: Tensor, size: float) -> bool:
    """Return whether :func:`write_change` uses a base: it must be finite and near the weight."""
    if not 2 * distance(weight, base) ** 2 <= size**2:  # also where it is not a number
        return False
    most, zeros = _MOST_ZEROS * weight.numel(), weight.numel() - int(weight.count_nonzero())
    return zeros <= most or int(((weight == 0) & (base != 0)).sum()) <= most


def changed_weights(change_n: Tensor, second: Tensor | None, alpha: float) -> Tensor:
    """Mark the weights that have changed enough to be kept (ExCP, arXiv 2406.11257, section 3.3).

    They have ``|change| > median|change| * min(2.5, alpha / sqrt(mean(second)))``: if gradients are
    large, smaller changes are kept too. Changes are float32 (n,); ``second`` are the
    second moments, of any shape, or None; an ``alpha`` of 0 keeps every change.
    """
    size = change_n.abs()
    if not alpha:
        return size > 0
    root = 0.0 if second is None else float(second.mean(dtype=torch.float64)) ** 0.5
    return size > size.median() * min(_MOST_MEDIANS, alpha / root if root else _MOST_MEDIANS)


def _worth_of_bits(weight: Tensor, change: Tensor) -> float:
    """Return the factor of a bit's price, which is larger for changes small beside their weight.

    It lies between a price relative to the change and one relative to the weight, and needs fewer
    bits for the same loss than both (docs/experiments.md).
    """
    spreads = []
    for values in (weight.float(), change):
        spread = float(values.std(correction=0))
        if not 1e-15 < spread < 1e15:  # squares left the range of float32
            spread = float(values.double().std(correction=0))
        spreads.append(spread)
    return (spreads[0] / spreads[1]) ** _BETWEEN if all(spreads) else 1.0


def _quantised(
    change: Tensor, mask: Tensor, bits: int, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return kept positions, codebook and codes; if bits have a price, zeros are not kept."""
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


def read_change(reader: StreamReader, record: Record, base: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions of kept entries (k,), and the weight that :func:`write_change` wrote."""
    (size,), count, places = record.books, record.kept, record.places
    if base is None and places != "all":
        raise DamagedError("a change has nothing before it")
    if places == "many":
        book = _read_floats(reader, "model", size)
        packed = reader.read("model/codes of all", -(-record.size // codes_to_a_byte(size + 1)))
        codes = torch.from_numpy(unpack(packed, size + 1, record.size))
        kept = positions(codes > 0)
        codes = codes[kept] - 1
        _check_codes(codes, size)
    else:
        kept = torch.arange(record.size, device="cpu")
        if isinstance(places, int):
            gaps = reader.read("model/gaps", places)
            kept = torch.from_numpy(from_gaps(gaps, count, record.size))
        book, codes = _read_coded(reader, "model", "change", size, len(kept))
    if len(kept) != count:
        raise DamagedError(f"{len(kept)} entries are kept where {count} are stated")
    return kept, _changed(record, None if places == "all" else base, kept, book, codes)


def _changed(
    record: Record, base: Tensor | None, kept: Tensor, book: Tensor, codes: Tensor
) -> Tensor:
    if base is None:
        flat = book[codes.long()]
    else:
        flat = base.to(torch.float32, copy=True).reshape(-1)
        flat[kept] += book[codes.long()]
    return flat.to(record.dtypes[0]).reshape(record.shape)


# ── moments ──────────────────────────────────────────────────────────────────────────────────────


def write_moments(
    streams: Streams,
    moments: Mapping[str, Tensor],
    weight: str | None,
    kept_weights: Tensor | None,
    quality: Quality,
) -> Record:
    """Write first moments, and any second moments, pruned together and quantised.

    Left-out first moments are read as zero, their second moments as the mean of those left out or,
    in a large matrix, row mean times column mean over mean. Roots of second moments are quantised.
    ``moments`` are finite floats by name, of one shape, the second ones not negative.
    ``kept_weights`` are positions of the kept changes of ``weight``, if these moments are its;
    other entries' moments are left out.
    """
    first, *seconds = moments.values()
    flat = first.detach().float().reshape(-1)
    mean = float(flat.abs().mean(dtype=torch.float64)) if len(flat) else 0.0
    among = flat if kept_weights is None else flat[kept_weights]
    mask = among.abs() > quality.beta * mean
    places = positions(mask)
    among = among[places]
    book = learn(among, 2**quality.bits - 1, quality.rate)
    _write_coded(streams, "rest", "first", book.values, book.codes(among))
    books = [len(book.values)]
    at: str | int = "many"
    if _MANY * len(places) > len(mask):
        streams.write("rest/places of moments", np.packbits(mask.numpy()))
    else:
        at = _write_gaps(streams, "rest/gaps of moments", places)
    for second in seconds:
        kept = places if kept_weights is None else kept_weights[places]
        roots = second.detach().float().reshape(-1)[kept].sqrt()
        book = learn(roots, 2**quality.bits - 1, quality.rate)
        _write_coded(streams, "rest", "second", book.values, book.codes(roots))
        books.append(len(book.values))
        _write_means(streams, second, kept)
    return Record(
        "moments", kept=len(places), books=(*books,), places=at, weight=weight, names=(*moments,),
        shape=(*first.shape,), dtypes=tuple(tensor.dtype for tensor in moments.values()),
    )  # fmt: skip


def read_moments(
    reader: StreamReader, record: Record, kept_weights: Tensor | None
) -> dict[str, Tensor]:
    """Read the moments that :func:`write_moments` wrote; return them by name."""
    count = record.kept
    below = record.size if kept_weights is None else len(kept_weights)
    if record.places == "many":
        mask = np.unpackbits(reader.read("rest/places of moments", -(-below // 8)), count=below)
        kept = torch.from_numpy(np.flatnonzero(mask))
        if len(kept) != count:
            raise DamagedError(f"{len(kept)} moments are kept where {count} are stated")
    else:
        gaps = reader.read("rest/gaps of moments", int(record.places))
        kept = torch.from_numpy(from_gaps(gaps, count, below))
    kept = kept if kept_weights is None else kept_weights[kept]
    book, codes = _read_coded(reader, "rest", "first", record.books[0], count)
    first = torch.zeros(record.size, dtype=torch.float32, device="cpu")
    first[kept] = book[codes.long()]
    moments = [first]
    for size in record.books[1:]:
        book, codes = _read_coded(reader, "rest", "second", size, count)
        second = _read_means(reader, record.shape).reshape(-1)
        second[kept] = book.square()[codes.long()]
        moments.append(second)
    found = {}
    for name, values, dtype in zip(record.names, moments, record.dtypes, strict=True):
        # What was rounded up beyond the range of its dtype is the largest number there.
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        found[name] = values.clamp(max=largest).to(dtype).reshape(record.shape)
    return found


def _write_means(streams: Streams, second: Tensor, kept: Tensor) -> None:
    """Write the means of moments that are not kept: of all, of each row and of each column."""
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
        streams.write("rest/books", _as_floats(largest))
        down = torch.log2(largest / means.double()) * _STEPS  # infinite for a mean of zero
        codes = torch.where(means > 0, (255 - down).round().clamp(min=1), 0)
        streams.write("rest/means", codes.to(torch.uint8).numpy())


def _read_means(reader: StreamReader, shape: Sequence[int]) -> Tensor:
    def read(count: int) -> Tensor:
        largest = _read_floats(reader, "rest", 1)
        codes = torch.from_numpy(reader.read("rest/means", count).astype(np.float32))
        return torch.where(codes > 0, largest * torch.exp2((codes - 255) / _STEPS), 0)

    whole, size = read(1), math.prod(shape)
    if not _has_lines(shape):
        return whole.expand(size).clone()
    rows, columns = read(shape[0]), read(size // shape[0])
    ratios = (columns / whole.double().clamp(min=_LEAST)).float()
    return torch.outer(rows, ratios).clamp(max=torch.finfo(torch.float32).max)


def _has_lines(shape: Sequence[int]) -> bool:
    """Return whether a mean of each row and column takes few bytes beside the tensor itself."""
    size = math.prod(shape)
    return len(shape) > 1 and size > 0 and shape[0] + size // shape[0] <= size // 32


# ── places and codes ─────────────────────────────────────────────────────────────────────────────


def _write_gaps(streams: Streams, name: str, places: Tensor) -> int:
    gaps = to_gaps(places.numpy())
    streams.write(name, gaps)
    return len(gaps)


def _write_coded(streams: Streams, part: str, kind: str, book: Tensor, codes: Tensor) -> None:
    streams.write(f"{part}/books", _as_floats(book))
    streams.write(f"{part}/codes of {kind}", pack(codes.numpy(), len(book)))


def _read_coded(
    reader: StreamReader, part: str, kind: str, size: int, count: int
) -> tuple[Tensor, Tensor]:
    book = _read_floats(reader, part, size)
    packed = reader.read(f"{part}/codes of {kind}", -(-count // codes_to_a_byte(size)))
    codes = torch.from_numpy(unpack(packed, size, count))
    _check_codes(codes, size)
    return book, codes


def _check_codes(codes: Tensor, size: int) -> None:
    if len(codes) and int(codes.max()) >= size:
        raise DamagedError(f"a code lies beyond the {size} values of its codebook")


def _as_floats(values: Tensor) -> Bytes:
    return _bits(values.float()).view(np.uint8)


def _read_floats(reader: StreamReader, part: str, count: int) -> Tensor:
    return torch.from_numpy(reader.read(f"{part}/books", 4 * count).view(np.float32).copy())
