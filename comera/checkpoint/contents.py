"""Write all of a checkpoint's tensors into streams, and read them back.

The model's tensors come first and have streams of their own: to follow a chain, those are all that
is read of the checkpoints on the way.

Write the moments of one weight into streams, pruned together and quantised; read them back.

Both ways give the same reconstruction, bit by bit.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.checkpoint import codec, packing
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
from comera.checkpoint.snapshot import MomentNames, Snapshot
from comera.checkpoint.streams import DamagedError, StreamReader, Streams
from comera.checkpoint.tree import Record, parsed, put_together


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
    mask = packing.large_moments(among, mean, beta)
    places = packing.positions(mask)
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


_LARGEST_INDEX = 1 << 28
_LENGTH = 8


@dataclass(frozen=True)
class Quality:
    """What is left out; see :class:`comera.checkpoint.chain.CheckpointChain`."""

    bits: int = 4
    rate: float = 0.055
    alpha: float = 0.0
    beta: float = 4.0
    key_bits: int = 6

    def of(self, name: str) -> "Quality":
        """Return what a tensor of this name is kept with: cores of tensor trains are kept finer.

        The errors of all cores of a layer add up in its weight, and a loss feels those. As coarse
        as dense weights, tensor trains were read with a loss up to 3.8 percent too high after their
        ranks were cut, so with less than one (docs/experiments.md).
        """
        if not _CORE.search(name):
            return self
        return replace(self, rate=self.rate / _FINER, key_bits=min(8, self.key_bits + 2))


_CORE = re.compile(r"(^|\.)cores\.\d+$")
_FINER = 5.5


def encode(
    snapshot: Snapshot, base: Mapping[str, Tensor] | None, quality: Quality
) -> tuple[Streams, dict[str, Any], dict[str, Tensor]]:
    """Return streams of everything, figures about it, and the model's tensors as they will be read.

    Args:
        snapshot: What to keep.
        base: The model's tensors as the checkpoint before is read; None for a key frame.
        quality: Quality of what is lossy.
    """
    streams = Streams()
    section, rest = Section("model", streams), Section("rest", streams)
    records: list[Record] = []
    written: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    # Of two first moments of a weight the first one has the second moments.
    wanted = {moments.weight: moments for moments in reversed(snapshot.moments)}
    entries = {"lossy": 0, "changed": 0}
    error = change = 0.0
    for name, tensor in snapshot.model.items():
        before = _matching(base, name, tensor.shape, tensor.dtype)
        if name in snapshot.lossy and _can_be_float32(tensor):
            own, second = quality.of(name), _second_of(snapshot, wanted.get(name))
            record, places, now = codec.write_change(
                section, tensor, before, second, bits=own.bits, key_bits=own.key_bits,
                rate=own.rate, alpha=own.alpha,
            )  # fmt: skip
            if name in wanted and record.codec == "change":
                kept[name] = places  # the moments of other entries are left out with them
            entries["lossy"] += tensor.numel()
            entries["changed"] += len(places)
            # The error is reported as a share of what is described: the change, or all of the
            # weight where that is what was written.
            error += codec.distance(tensor, now) ** 2
            if before is None or record.places == "all":
                change += packing.norm(tensor) ** 2
            else:
                change += codec.distance(tensor, before) ** 2
        else:
            record, now = codec.write_exact(section, tensor, before), tensor
        written[name] = now
        records.append(record.of([name], [tensor]))
    for moments in snapshot.moments:
        records.append(_write_moments(rest, snapshot, moments, kept, quality))
    # What is neither of the model nor a pair of moments has no slack: it is kept bit by bit.
    done = {name for record in records for name in record.names}
    for name, tensor in snapshot.rest.items():
        if name not in done:
            records.append(codec.write_exact(rest, tensor).of([name], [tensor]))
    _write_index(
        streams, {"skeleton": snapshot.skeleton, "records": [r.as_json() for r in records]}
    )
    streams.finish()
    figures = {
        "entries": entries,
        "kept_moments": sum(r.kept for r in records if r.codec == "moments"),
        "error": (error / change) ** 0.5 if change else 0.0,
    }
    return streams, figures, written


def decode_model(
    blobs: dict[str, bytes], base: Mapping[str, Tensor] | None, max_bytes: int
) -> dict[str, Tensor]:
    """Return the model's tensors; ``base`` are those of the checkpoint before, None at a key frame.

    Raises:
        DamagedError: If the streams are not ones of :func:`encode`, or say that they are larger
            than ``max_bytes``.
    """
    reader = StreamReader(blobs)
    _, records = _read_index(reader, max_bytes)
    return _read_model(reader, records, base)[0]


def decode(
    blobs: dict[str, bytes], base: Mapping[str, Tensor] | None, max_bytes: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return ``model``, ``optimizer``, ``extra`` and ``parameters``, and the model's tensors.

    Raises:
        DamagedError: For the reasons for which :func:`decode_model` raises it.
    """
    reader = StreamReader(blobs)
    skeleton, records = _read_index(reader, max_bytes)
    weights, kept = _read_model(reader, records, base)
    tensors = dict(weights)
    section = Section("rest", reader)
    for record in records:
        names, shape, dtypes = record.names, list(record.shape), list(record.dtypes)
        if record.codec == "moments":
            weight = record.weight
            if weight is not None and weight not in kept:
                raise DamagedError(f"{names[0]} belongs to {weight!r}, which is no changed weight")
            places = None if weight is None else kept[weight]
            values = read_moments(section, record, shape, dtypes, places)
            tensors |= dict(zip(names, values, strict=True))
        elif not record.is_of_model:
            tensors[names[0]] = codec.read_exact(section, record, shape, dtypes[0], None)
    reader.check_end()
    parts = put_together(skeleton, tensors)
    if not isinstance(parts, dict) or set(parts) != {"model", "optimizer", "extra", "parameters"}:
        raise DamagedError("the checkpoint does not consist of model, optimizer and extra")
    return parts, weights


def _read_model(
    reader: StreamReader, records: list[Record], base: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    section = Section("model", reader)
    tensors: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for record in records:
        if not record.is_of_model:
            continue
        name, shape, dtype = record.names[0], list(record.shape), record.dtypes[0]
        before = _matching(base, name, shape, dtype)
        if record.codec == "change":
            kept[name], tensors[name] = codec.read_change(section, record, shape, dtype, before)
        else:
            tensors[name] = codec.read_exact(section, record, shape, dtype, before)
    return tensors, kept


def _write_moments(
    section: Section,
    snapshot: Snapshot,
    moments: MomentNames,
    kept: Mapping[str, Tensor],
    quality: Quality,
) -> Record:
    names = [name for name in (moments.first, moments.second) if name]
    tensors = [snapshot.rest[name] for name in names]
    negative = len(tensors) == 2 and bool(tensors[1].amin() < 0)
    if negative or not all(_can_be_float32(tensor) for tensor in tensors):
        return codec.write_exact(section, tensors[0]).of(names[:1], tensors[:1])
    weight = moments.weight if moments.weight in kept else None
    record = write_moments(
        section, tensors[0], tensors[1] if len(tensors) == 2 else None,
        kept[weight] if weight else None,
        bits=quality.bits, rate=quality.rate, beta=quality.beta,
    )  # fmt: skip
    return record.of(names, tensors, weight)


def _second_of(snapshot: Snapshot, moments: MomentNames | None) -> Tensor | None:
    return snapshot.rest[moments.second] if moments and moments.second else None


def _matching(
    base: Mapping[str, Tensor] | None, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """Return what was there before, if of one shape: after truncation a tensor starts anew."""
    before = (base or {}).get(name)
    same = before is not None and before.shape == tuple(shape) and before.dtype == dtype
    return before if same else None


def _can_be_float32(tensor: Tensor) -> bool:
    """Tell whether all entries are finite in float32, and the largest is no rounding error there.

    The range of float64 is larger at both ends.
    """
    narrow = tensor.float()
    if not bool(narrow.sum(dtype=torch.float64).isfinite()):
        return False
    return tensor.dtype != torch.float64 or not 0 < float(tensor.abs().amax()) < _SMALLEST


_SMALLEST = 1e-30
"""Smallest number kept of float64: a millionth of it is still a number of float32."""


# ── the index ────────────────────────────────────────────────────────────────────────────────────


def _write_index(streams: Streams, index: dict[str, Any]) -> None:
    _checked(index)  # a mistake is to be found now, not when the checkpoint is needed
    raw = json.dumps(index, separators=(",", ":")).encode()
    streams.write("index", codec.as_bytes(len(raw).to_bytes(_LENGTH, "little") + raw))


def _read_index(reader: StreamReader, max_bytes: int) -> tuple[Any, list[Record]]:
    """Read the skeleton and the records, checked: what they ask for is bounded."""
    length = int.from_bytes(reader.read("index", _LENGTH).tobytes(), "little")
    if length > min(_LARGEST_INDEX, max_bytes):
        raise DamagedError(f"the index says that it is {length} bytes long")
    try:
        index = parsed(reader.read("index", length).tobytes())
    except (ValueError, RecursionError) as problem:
        raise DamagedError(f"the index is not readable: {problem}") from problem
    skeleton, checked = _checked(index)
    size = sum(record.bytes for record in checked)
    if size > max_bytes:
        raise DamagedError(
            f"the tensors would take {size} bytes of memory, more than max_bytes={max_bytes}"
        )
    return skeleton, checked


def _checked(index: Any) -> tuple[Any, list[Record]]:
    """Return the skeleton and the records of an index; ``DamagedError`` if it is none."""
    match index:
        case {"skeleton": skeleton, "records": list(records)}:
            checked = [Record.of_json(record) for record in records]
        case _:
            raise DamagedError("the index has no skeleton and records")
    names = [name for record in checked for name in record.names]
    if len(names) != len(set(names)):
        raise DamagedError("the index names a tensor twice")
    return skeleton, checked
