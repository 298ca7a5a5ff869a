"""Write the moments of one weight into streams, pruned together and quantised; read them back.

Both ways give the same reconstruction, bit by bit.
"""

import math

import numpy as np
import torch
from torch import Tensor

from comera.checkpoint import pruning, vectors
from comera.checkpoint.codebook import learn
from comera.checkpoint.codec import (
    MANY,
    Section,
    as_floats,
    read_coded,
    read_floats,
    write_coded,
    write_gaps,
)
from comera.checkpoint.packing import from_gaps
from comera.checkpoint.record import Record
from comera.checkpoint.streams import DamagedError


def write_moments(
    section: Section,
    first: Tensor,
    second: Tensor | None,
    kept_weights: Tensor | None,
    *,
    bits: int,
    rate: float,
    beta: float,
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
            looks at all.
        bits: Kept moments become one of ``2 ** bits - 1`` values.
        rate: Price of a bit, as :func:`codebook.learn` takes it.
        beta: Factor of :func:`pruning.large_moments`.
    """
    flat = first.detach().float().reshape(-1)
    mean = float(flat.abs().mean(dtype=torch.float64)) if len(flat) else 0.0
    among = flat if kept_weights is None else flat[kept_weights]
    mask = pruning.large_moments(among, mean, beta)
    places = vectors.positions(mask)
    among = among[places]
    book = learn(among, 2**bits - 1, rate)
    write_coded(section, "first", book.values, book.codes(among))
    books: tuple[int, ...] = (len(book.values),)
    at: str | int = "many"
    if MANY * len(places) > len(mask):
        section.write("places of moments", np.packbits(mask.cpu().numpy()))
    else:
        at = write_gaps(section, places, " of moments")
    if second is not None:
        kept = places if kept_weights is None else kept_weights[places]
        roots = second.detach().float().reshape(-1)[kept].sqrt()
        book = learn(roots, 2**bits - 1, rate)
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
        section.write("means", codes.to(torch.uint8).cpu().numpy())


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
    """Tell whether a mean a row and a column costs little beside the rest."""
    size = math.prod(shape)
    return len(shape) > 1 and size > 0 and shape[0] + size // shape[0] <= size // 32
