"""Copy a training state, write it into the streams of a checkpoint, and read it back.

The model's tensors come first and have streams of their own, so that reading a checkpoint needs
only these streams of the checkpoints it builds on.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.checkpoint import codec
from comera.checkpoint.codebook import norm
from comera.checkpoint.codec import Quality, Record
from comera.checkpoint.skeleton import check_dtype, parsed, put_together, take_apart
from comera.checkpoint.streams import DamagedError, StreamReader, Streams
from comera.params import Undisturbed

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
_SECOND_MOMENT = "exp_avg_sq"
_SMALLEST = 1e-30
"""Smallest maximum of a float64 tensor that is lossy: a millionth of it is still a float32."""
_LARGEST_INDEX = 1 << 28
_LENGTH = 8


@dataclass
class Snapshot:
    """Tensors by name, in the order of writing; the tensors of ``model`` are written as changes.

    ``skeleton`` is everything but the tensors; ``lossy`` names tensors that may change a little.
    """

    skeleton: Any = None
    model: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)
    lossy: set[str] = field(default_factory=set)

    @property
    def raw_bytes(self) -> int:
        return sum(t.nbytes for part in (self.model, self.rest) for t in part.values())


def take_snapshot(
    model: nn.Module | Mapping[str, Any],
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    treatment_of: Callable[[str, Tensor, bool], str],
    parameters: Mapping[Any, str] | None = None,
) -> Snapshot:
    """Copy the state of a model, an optimizer and the caller to the CPU.

    Arguments are those of :meth:`CheckpointChain.save`; ``treatment_of`` is the treatment by a
    :class:`~comera.checkpoint.chain.Policy`. Raises ``TypeError`` with the name of anything but
    tensors and plain values, and ``RuntimeError`` if another thread trains the model meanwhile.
    """
    if not isinstance(model, nn.Module | Mapping):
        raise TypeError(
            f"the model is a {type(model).__name__}; what is saved is (step, model, optimizer), "
            "modules and optimizers or their state_dict()"
        )
    weights = model.state_dict() if isinstance(model, nn.Module) else model
    states = optimizer.state_dict() if hasattr(optimizer, "state_dict") else optimizer
    names = parameters or _guessed_names(model, optimizer, weights, states)
    # Buffers must be exact. In a bare state parameters are those that the optimizer names, or all.
    trained = set(names.values()) or set(weights)
    if isinstance(model, nn.Module):
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    name_of_state = {
        f"optimizer.state.{key}.{entry}": f"optimizer.{names.get(key, key)}.{entry}"
        for key, found in (states or {}).get("state", {}).items()
        if isinstance(found, Mapping)
        for entry in found
    }
    snapshot = Snapshot()
    taken: dict[Any, str] = {}  # tied tensors are kept once, if they are treated alike

    def take(path: str, tensor: Tensor) -> str | None:
        part, _, inner = path.partition(".")
        name, lossy = path, part == "model" and inner in trained
        if path in name_of_state:
            name = name_of_state[path]
            lossy = name.rpartition(".")[2] in (*_FIRST_MOMENTS, _SECOND_MOMENT)
        treatment = treatment_of(name, tensor, lossy)
        if treatment == "skip":
            return None
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else f"of {tensor.layout}"
            raise TypeError(f"{name} is {kind}: checkpoints hold dense tensors")
        if tensor.is_meta:
            raise TypeError(f"{name} is on the meta device: it has no numbers that could be saved")
        check_dtype(name, tensor.dtype)
        place = (
            treatment, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(),
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
        if tensor.numel() and place in taken:
            return taken[place]
        while name in snapshot.model or name in snapshot.rest:
            name += "'"  # {"a.b": 1, "a": {"b": 2}}
        into = snapshot.model if part == "model" else snapshot.rest
        into[name], taken[place] = tensor.detach().to("cpu", copy=True).contiguous(), name
        if treatment == "lossy":
            snapshot.lossy.add(name)
        return name

    watched = Undisturbed(weights)
    parts = {"model": weights, "optimizer": states, "extra": extra or {}, "parameters": names}
    snapshot.skeleton = take_apart(parts, take)
    watched.check()
    return snapshot


def names_of_parameters(model: nn.Module, optimizer: Optimizer) -> dict[Any, str]:
    """Return the names of the model's parameters by their keys in the optimizer's state."""
    name_of = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {k: name_of[id(param)] for k, param in enumerate(params) if id(param) in name_of}


def _guessed_names(
    model: nn.Module | Mapping[str, Any],
    optimizer: Any,
    weights: Mapping[str, Any],
    states: Mapping[str, Any] | None,
) -> dict[Any, str]:
    """Return names of weights by the optimizer's keys of parameters, as far as they are known.

    For a bare state dict they are the names in it, or the weights' names in order if shapes agree.
    """
    if not states or "state" not in states:
        return {}
    if isinstance(model, nn.Module) and hasattr(optimizer, "param_groups"):
        return names_of_parameters(model, optimizer)
    groups = states.get("param_groups", [])
    keys = [key for group in groups for key in group.get("params", [])]
    names = [name for group in groups for name in group.get("param_names", [])]
    if len(names) == len(keys):
        return dict(zip(keys, names, strict=True))
    if keys and all(key in weights for key in keys):
        return {name: name for name in keys}
    floats = [n for n, w in weights.items() if isinstance(w, Tensor) and w.is_floating_point()]
    if len(floats) != len(keys):
        return {}
    guessed = dict(zip(sorted(keys), floats, strict=True))
    for key, name in guessed.items():
        moment = states["state"].get(key, {}).get("exp_avg")
        if isinstance(moment, Tensor) and moment.shape != weights[name].shape:
            return {}
    return guessed


def _find_moments(snapshot: Snapshot) -> list[tuple[str | None, str, str | None]]:
    """Return the names of lossy moments: weight (if lossy, too), first, and second moment (if any).

    Of two first moments of a weight, the first one gets the second moments.
    """
    found: list[tuple[str | None, str, str | None]] = []
    for first, tensor in snapshot.rest.items():
        parameter, _, key = first.removeprefix("optimizer.").rpartition(".")
        if first not in snapshot.lossy or key not in _FIRST_MOMENTS:
            continue
        beside: list[str | None] = []
        for name, part in (
            (f"model.{parameter}", snapshot.model),
            (f"optimizer.{parameter}.{_SECOND_MOMENT}", snapshot.rest),
        ):
            fits = name in snapshot.lossy and part[name].shape == tensor.shape
            beside.append(name if fits and all(name != second for *_, second in found) else None)
        found.append((beside[0], first, beside[1]))
    return found


def encode(
    snapshot: Snapshot, base: Mapping[str, Tensor] | None, quality: Quality
) -> tuple[Streams, dict[str, Any], dict[str, Tensor]]:
    """Return the streams of a snapshot, figures about it, and the model's tensors as read back.

    ``base`` are the tensors read back from the previous checkpoint; None for a key frame.
    """
    streams, records = Streams(), list[Record]()
    written, kept = dict[str, Tensor](), dict[str, Tensor]()
    moments = _find_moments(snapshot)
    second_of = {weight: second for weight, _, second in reversed(moments)}
    entries = {"lossy": 0, "changed": 0}
    error = change = 0.0
    for name, tensor in snapshot.model.items():
        before = _matching(base, name, tensor.shape, tensor.dtype)
        if name in snapshot.lossy and _can_be_float32(tensor):
            second = second_of.get(name)
            record, places, now = codec.write_change(
                streams, name, tensor, before, snapshot.rest[second] if second else None, quality
            )
            if name in second_of and record.codec == "change":
                kept[name] = places  # the moments of other entries are left out with them
            entries["lossy"] += tensor.numel()
            entries["changed"] += len(places)
            # A share of the change, or of the weight where all of it was written.
            error += codec.distance(tensor, now) ** 2
            if before is None or record.places == "all":
                change += norm(tensor) ** 2
            else:
                change += codec.distance(tensor, before) ** 2
        else:
            record, now = codec.write_exact(streams, name, tensor, before), tensor
        written[name] = now
        records.append(record)
    for weight, first, other in moments:
        tensors = {name: snapshot.rest[name] for name in (first, other) if name}
        negative = other is not None and bool(tensors[other].amin() < 0)
        if not negative and all(map(_can_be_float32, tensors.values())):
            weight = weight if weight in kept else None
            kept_weights = kept[weight] if weight else None
            records.append(codec.write_moments(streams, tensors, weight, kept_weights, quality))
    done = {name for record in records for name in record.names}
    records += [
        codec.write_exact(streams, name, tensor)
        for name, tensor in snapshot.rest.items()
        if name not in done
    ]
    index = {"skeleton": snapshot.skeleton, "records": [r.as_json() for r in records]}
    raw = json.dumps(index, separators=(",", ":")).encode()
    _checked(parsed(raw))  # a mistake is to be found now, not when the checkpoint is needed
    streams.write("index", np.frombuffer(len(raw).to_bytes(_LENGTH, "little") + raw, np.uint8))
    streams.finish()
    figures = {
        "entries": entries,
        "kept_moments": sum(r.kept for r in records if r.codec == "moments"),
        "error": (error / change) ** 0.5 if change else 0.0,
    }
    return streams, figures, written


def decode(
    blobs: dict[str, bytes], base: Mapping[str, Tensor] | None, model_only: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a dict of ``model``, ``optimizer``, ``extra`` and ``parameters``; the model's tensors.

    ``base`` has the model's tensors in the previous checkpoint. With ``model_only`` only the
    model's tensors are read, and the first dict is empty. Raises ``DamagedError`` if the streams
    are not from :func:`encode`, or all tensors together would take more memory than this machine
    has.
    """
    reader = StreamReader(blobs)
    skeleton, records = _read_index(reader)
    weights, kept = dict[str, Tensor](), dict[str, Tensor]()
    for record in records:
        if record.part == "model":
            name = record.names[0]
            before = _matching(base, name, torch.Size(record.shape), record.dtypes[0])
            if record.codec == "change":
                kept[name], weights[name] = codec.read_change(reader, record, before)
            else:
                weights[name] = codec.read_exact(reader, record, before)
    if model_only:
        return {}, weights
    tensors = dict(weights)
    for record in records:
        if record.codec == "moments":
            weight = record.weight
            if weight is not None and weight not in kept:
                raise DamagedError(
                    f"{record.names[0]} belongs to {weight!r}, which is no changed weight"
                )
            tensors |= codec.read_moments(reader, record, None if weight is None else kept[weight])
        elif record.part != "model":
            tensors[record.names[0]] = codec.read_exact(reader, record, None)
    reader.check_end()
    parts = put_together(skeleton, tensors)
    if not isinstance(parts, dict) or set(parts) != {"model", "optimizer", "extra", "parameters"}:
        raise DamagedError("the checkpoint does not consist of model, optimizer and extra")
    return parts, weights


def _matching(
    base: Mapping[str, Tensor] | None, name: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """Return the previous checkpoint's tensor; None if there is none of this shape and dtype."""
    before = (base or {}).get(name)
    same = before is not None and before.shape == shape and before.dtype == dtype
    return before if same else None


def _can_be_float32(tensor: Tensor) -> bool:
    """Return whether all entries are finite in float32, and the largest is not subnormal."""
    if not bool(tensor.float().sum(dtype=torch.float64).isfinite()):
        return False
    return tensor.dtype != torch.float64 or not 0 < float(tensor.abs().amax()) < _SMALLEST


def _read_index(reader: StreamReader) -> tuple[Any, list[Record]]:
    """Return the skeleton and the records, after checks that also bound the memory they need."""
    length = int.from_bytes(reader.read("index", _LENGTH).tobytes(), "little")
    if length > _LARGEST_INDEX:
        raise DamagedError(f"the index says that it is {length} bytes long")
    try:
        index = parsed(reader.read("index", length).tobytes())
    except (ValueError, RecursionError) as problem:
        raise DamagedError(f"the index is not readable: {problem}") from problem
    skeleton, records = _checked(index)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        memory = 1 << 36
    if (size := sum(record.bytes for record in records)) > memory:
        raise DamagedError(
            f"the tensors would take {size} bytes of memory, more than the {memory} there are"
        )
    return skeleton, records


def _checked(index: Any) -> tuple[Any, list[Record]]:
    match index:
        case {"skeleton": skeleton, "records": list(records)}:
            checked = [Record.of_json(record) for record in records]
        case _:
            raise DamagedError("the index has no skeleton and records")
    names = [name for record in checked for name in record.names]
    if len(names) != len(set(names)):
        raise DamagedError("the index names a tensor twice")
    return skeleton, checked
