"""Write one tensor into streams and read it back: exactly, or as a pruned and quantised change.

Each ``write_`` returns what its ``read_`` needs beside the streams, as plain values; both give
the same reconstruction, bit by bit. Shapes: n = entries, k = kept entries.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.checkpoint import packing
from comera.checkpoint.codebook import learn
from comera.checkpoint.packing import codes_to_a_byte, from_gaps, pack, to_gaps, unpack
from comera.checkpoint.streams import Bytes, DamagedError, StreamReader, Streams
from comera.checkpoint.tree import Record


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
    flat = tensor.detach().cpu().contiguous().reshape(-1)
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
    *,
    bits: int,
    key_bits: int,
    rate: float,
    alpha: float,
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
        base: What the checkpoint before is read as; same shape and dtype.
        second: The weight's second moments, which say how small a change may be left out.
        bits: Kept changes become one of ``2 ** bits - 1`` values.
        key_bits: Entries become one of ``2 ** key_bits - 1`` values where there is no base.
        rate: Price of a bit, as :func:`codebook.learn` takes it, for a change as large as the
            weight; more for a smaller one, by :func:`_worth_of_bits`.
        alpha: Factor of :func:`pruning.changed_weights`.

    Returns:
        The record, where kept entries lie (k,), and what will be read: error included, so that
        the next change makes up for it.
    """
    size = packing.norm(weight)
    if base is not None and _is_near(weight, base, size):
        kept, book, codes = _coded_change(weight, base, second, bits, rate, alpha)
        now = _changed(weight.shape, weight.dtype, base, kept, book, codes)
        if distance(weight, now) <= _LARGEST_ERROR * size:
            return _write_kept(section, weight, kept, book, codes), kept, now
    flat = weight.detach().float().reshape(-1)
    kept = torch.arange(len(flat), device=flat.device)
    some_are_zero = int(flat.count_nonzero()) < len(flat)
    learned = learn(flat, 2**key_bits - 1, zeros=0 if some_are_zero else None)
    book, codes = learned.values, learned.codes(flat)
    now = _changed(weight.shape, weight.dtype, None, kept, book, codes)
    if distance(weight, now) <= 4 / 2**key_bits * size:
        record = Record("change", kept=len(kept), books=(len(book),))
        write_coded(section, "change", book, codes)
        return record, kept, now
    return write_exact(section, weight), kept, weight


_LARGEST_ERROR = 0.25
"""Largest error of a weight that is read by its base, as a share of the weight."""

_MOST_ZEROS = 1 / 256
"""Share of all entries that may be zero by chance, as some become in half precision."""


def distance(weight: Tensor, other: Tensor) -> float:
    """Return the root of the sum of squared differences; not finite if one is not."""
    return packing.norm(weight.float() - other.float())


def _is_near(weight: Tensor, base: Tensor, size: float) -> bool:
    """Tell whether a base is of use, see :func:`write_change`; none is that is not finite."""
    if not 2 * distance(weight, base) ** 2 <= size**2:  # also where it is not a number
        return False
    most = _MOST_ZEROS * weight.numel()
    if weight.numel() - int(weight.count_nonzero()) <= most:
        return True
    return int(((weight == 0) & (base != 0)).sum()) <= most


def _coded_change(
    weight: Tensor, base: Tensor, second: Tensor | None, bits: int, rate: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where changed entries are kept, a few values, and each entry's number among them."""
    change = (weight.detach().float() - base.float()).reshape(-1)
    mask = packing.changed_weights(change, second, alpha)
    worth = min(rate * _worth_of_bits(weight, change), max(rate, _DEAREST))
    return _quantised(change, mask, bits, worth)


def _write_kept(
    section: Section, weight: Tensor, kept: Tensor, book: Tensor, codes: Tensor
) -> Record:
    """Write changes by their places; returns the record."""
    places: str | int = "many"
    if MANY * len(kept) > weight.numel():  # what is left out has a code of its own
        all_codes = torch.zeros(weight.numel(), dtype=torch.uint8, device=codes.device)
        all_codes[kept] = codes + 1
        section.write("books", as_floats(book))
        section.write("codes of all", pack(all_codes.cpu().numpy(), len(book) + 1))
    else:
        places = write_gaps(section, kept)
        write_coded(section, "change", book, codes)
    return Record("change", kept=len(kept), books=(len(book),), places=places)


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
    kept = packing.positions(mask)
    if not rate:
        learned = learn(change[kept], 2**bits - 1)
        return kept, learned.values, learned.codes(change[kept])
    learned = learn(change[kept], 2**bits, rate, zeros=len(change) - len(kept))
    codes = learned.codes(change[kept])
    zero = int((learned.values == 0).nonzero())
    some = packing.positions(codes != zero)
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
        kept = packing.positions(codes > 0)
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


# ── places and codes ─────────────────────────────────────────────────────────────────────────────


MANY = 12
"""Where more than one of so many entries is kept, a code for all takes fewer bytes than gaps."""


def write_gaps(section: Section, places: Tensor, of: str = "") -> int:
    """Write positions as gaps; returns their bytes."""
    gaps = to_gaps(places.cpu().numpy())
    section.write(f"gaps{of}", gaps)
    return len(gaps)


def write_coded(section: Section, kind: str, book: Tensor, codes: Tensor) -> None:
    section.write("books", as_floats(book))
    section.write(f"codes of {kind}", pack(codes.cpu().numpy(), len(book)))


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


def as_bytes(raw: bytes) -> Bytes:
    """Return bytes as an array of them."""
    return np.frombuffer(raw, np.uint8)


def as_floats(values: Tensor) -> Bytes:
    return _bits(values.float()).view(np.uint8)


def read_floats(section: Section, count: int) -> Tensor:
    return torch.from_numpy(section.read("books", 4 * count).view(np.float32).copy())
