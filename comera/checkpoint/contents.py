"""Write all of a checkpoint's tensors into streams, and read them back.

The model's tensors come first and have streams of their own: to follow a chain, those are all that
is read of the checkpoints on the way.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.checkpoint import codec
from comera.checkpoint.codebook import norm
from comera.checkpoint.codec import Quality, Record, Section
from comera.checkpoint.snapshot import Snapshot, parsed, put_together
from comera.checkpoint.streams import Bytes, DamagedError, StreamReader, Streams

_LARGEST_INDEX = 1 << 28
_LENGTH = 8


def encode(
    snapshot: Snapshot, base: Mapping[str, Tensor] | None, quality: Quality
) -> tuple[Streams, dict[str, Any], dict[str, Tensor]]:
    """Return streams of everything, figures about it, and the model's tensors as they will be read.

    Args:
        snapshot: What to keep.
        base: The model's tensors as the checkpoint before is read; None for a key frame.
        quality: Quality of the lossy tensors.
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
            moments = wanted.get(name)
            second = snapshot.rest[moments.second] if moments and moments.second else None
            record, places, now = codec.write_change(
                section, tensor, before, second, quality.of(name)
            )
            if name in wanted and record.codec == "change":
                kept[name] = places  # the moments of other entries are left out with them
            entries["lossy"] += tensor.numel()
            entries["changed"] += len(places)
            # The error is reported as a share of the change, or of the weight where all of it
            # was written.
            error += codec.distance(tensor, now) ** 2
            if before is None or record.places == "all":
                change += norm(tensor) ** 2
            else:
                change += codec.distance(tensor, before) ** 2
        else:
            record, now = codec.write_exact(section, tensor, before), tensor
        written[name] = now
        records.append(record.of([name], [tensor]))
    for moments in snapshot.moments:
        names = [entry for entry in (moments.first, moments.second) if entry]
        tensors = [snapshot.rest[entry] for entry in names]
        negative = len(tensors) == 2 and bool(tensors[1].amin() < 0)
        if negative or not all(map(_can_be_float32, tensors)):
            continue  # written exactly, below
        weight = moments.weight if moments.weight in kept else None
        first, second = tensors[0], tensors[1] if len(tensors) == 2 else None
        kept_weights = kept[weight] if weight else None
        record = codec.write_moments(rest, first, second, kept_weights, quality)
        records.append(record.of(names, tensors, weight))
    # All other tensors are kept bit by bit.
    done = {name for record in records for name in record.names}
    for name, tensor in snapshot.rest.items():
        if name not in done:
            records.append(codec.write_exact(rest, tensor).of([name], [tensor]))
    index = {"skeleton": snapshot.skeleton, "records": [r.as_json() for r in records]}
    raw = json.dumps(index, separators=(",", ":")).encode()
    _checked(parsed(raw))  # a mistake is to be found now, not when the checkpoint is needed
    streams.write("index", as_bytes(len(raw).to_bytes(_LENGTH, "little") + raw))
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
            values = codec.read_moments(section, record, shape, dtypes, places)
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


def _matching(
    base: Mapping[str, Tensor] | None, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """Return the tensor before, if its shape is the same: after truncation there is none."""
    before = (base or {}).get(name)
    same = before is not None and before.shape == tuple(shape) and before.dtype == dtype
    return before if same else None


def _can_be_float32(tensor: Tensor) -> bool:
    """Return whether all entries are finite in float32, and the largest is no rounding error there.

    The range of float64 is larger at both ends.
    """
    narrow = tensor.float()
    if not bool(narrow.sum(dtype=torch.float64).isfinite()):
        return False
    return tensor.dtype != torch.float64 or not 0 < float(tensor.abs().amax()) < _SMALLEST


_SMALLEST = 1e-30
"""Smallest number kept of float64: a millionth of it is still a number of float32."""


# ── the index ────────────────────────────────────────────────────────────────────────────────────


def as_bytes(raw: bytes) -> Bytes:
    """Return bytes as an array."""
    return np.frombuffer(raw, np.uint8)


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
