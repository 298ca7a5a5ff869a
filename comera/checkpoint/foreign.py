"""Checkpoints of other programs: series of torch or safetensors files, and files for them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comera.files import replacing

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.pt")
"""Names of the weights in a folder of one checkpoint, as transformers and others write them."""


def find_series(path: Path) -> list[Path]:
    """List files or folders of one checkpoint each, by the last number in their names.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If two have the same number, or one has none.
    """
    found: dict[int, Path] = {}
    entries = sorted(path.iterdir()) if path.is_dir() else []
    for entry in entries:
        if not (entry.suffix in _SUFFIXES or any((entry / name).is_file() for name in _WEIGHTS)):
            continue
        step = step_of(entry)
        if step in found:
            raise ValueError(f"{found[step].name} and {entry.name} are both of step {step}")
        found[step] = entry
    if not found:
        raise FileNotFoundError(
            f"there are no checkpoints in {path}: files that end in {', '.join(_SUFFIXES)}, or "
            f"folders with {' or '.join(_WEIGHTS)}"
        )
    return [found[step] for step in sorted(found)]


def step_of(path: Path) -> int:
    """Return the last number in the name of a checkpoint."""
    numbers = re.findall(r"\d+", path.stem if path.suffix in _SUFFIXES else path.name)
    if not numbers:
        raise ValueError(f"{path} has no number in its name, which would be its step")
    return int(numbers[-1])


def read_foreign(path: Path) -> dict[str, Any]:
    """Read model, optimizer and extra, as :meth:`CheckpointChain.save` takes them; runs no code.

    Raises:
        ValueError: If it is not readable, or holds nothing that looks like a model.
    """
    if path.is_dir():
        weights = next(path / name for name in _WEIGHTS if (path / name).is_file())
        model, optimizer = _read(weights), path / "optimizer.pt"
        states = _read(optimizer) if optimizer.is_file() else None
        return {"model": model, "optimizer": states}
    state = _read(path)
    if all(isinstance(value, Tensor) for value in state.values()):
        return {"model": state}
    model_key = next((k for k in _MODEL_KEYS if isinstance(state.get(k), Mapping)), None)
    if model_key is None:
        raise ValueError(
            f"{path} has the keys {', '.join(map(str, state))}; the model is expected in one of "
            f"{', '.join(_MODEL_KEYS)}"
        )
    optimizer_key = next((k for k in _OPTIMIZER_KEYS if isinstance(state.get(k), Mapping)), None)
    extra = {k: v for k, v in state.items() if k not in (model_key, optimizer_key)}
    states = state[optimizer_key] if optimizer_key else None
    return {"model": state[model_key], "optimizer": states, "extra": extra}


def write_weights(path: Path, model: Mapping[str, Any]) -> Path:
    """Write weights as ``path``, a safetensors file, or as ``path/model.safetensors``.

    Tied tensors are written under each of their names. Returns what was written.
    """
    tensors = {
        name: value.clone().contiguous()
        for name, value in model.items()
        if isinstance(value, Tensor)
    }
    file = path if path.suffix == ".safetensors" else path / _WEIGHTS[0]
    with replacing(file) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    return file


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:
        raise ValueError(f"{path} is not readable: {str(problem)[:300]}") from problem
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a dict")
    return dict(state)
