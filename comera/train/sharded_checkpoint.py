"""Checkpoints of which each process writes its part, by ``torch.distributed.checkpoint``."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils._pytree import tree_map

from comera.checkpoint.chain import Checkpoint
from comera.checkpoint.tree import parsed, put_together, take_apart
from comera.optim.unwrap import unwrap
from comera.params import is_sharded
from comera.train.data_parallel import unwrapped_model
from comera.train.run_state import restore_, state_besides
from comera.train.step import TrainStep

_SKELETON = "skeleton"
_METADATA = ".metadata"


def save_parts(folder: Path, step: TrainStep, extra: dict[str, Any] | None = None) -> None:
    """Write model, optimizer, schedules and rank learning, each process its part of them.

    Nothing is brought together in one process, as :class:`~comera.CheckpointChain` needs it: for
    models of which no process can hold the whole. Every process calls this. The format is torch's;
    any number of processes can load it, one included, sharded or not.

    Args:
        folder: A folder for this checkpoint alone, which all processes see.
        step: The training step whose state is saved.
        extra: Tensors and plain values of the caller; those of the first process are saved.

    Raises:
        ValueError: If the folder holds a checkpoint already.
    """
    if (folder / _METADATA).exists():
        raise ValueError(f"{folder} holds a checkpoint: give each a folder of its own")
    alone = not dist.is_initialized()
    model, optimizer = unwrapped_model(step.model), unwrap(step.optimizer)
    tensors: dict[str, Tensor] = {}
    shared: dict[int, tuple[Tensor, Tensor]] = {}

    def plain(leaf: Any) -> Any:
        """Stand in for a tensor that is shared out, which cannot be taken apart."""
        if not isinstance(leaf, Tensor) or not is_sharded(leaf):
            return leaf
        like = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        shared[id(like)] = like, leaf
        return like

    def take(name: str, tensor: Tensor) -> str:
        _, tensors[name] = shared.get(id(tensor), (tensor, tensor.detach()))
        return name

    parts = {
        "step": step.steps_done,
        "model": tree_map(plain, model.state_dict()),
        "optimizer": tree_map(plain, optimizer.state_dict()),
        "extra": state_besides(step, extra),
    }
    skeleton = json.dumps(take_apart(parts, take)).encode()
    if alone or dist.get_rank() == 0:
        tensors[_SKELETON] = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
    else:  # plain values and random states are those of the first process
        tensors = {name: value for name, value in tensors.items() if not name.startswith("extra.")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        dcp.save(tensors, checkpoint_id=folder, no_dist=alone)


def load_parts(folder: Path, step: TrainStep) -> dict[str, Any]:
    """Load what :func:`save_parts` has written, each process its part; returns the ``extra``.

    Torch reads the list of what there is by pickle, which can run code: load only what you trust.

    Args:
        folder: The folder of the checkpoint, which all processes see.
        step: A training step over the same model, optimizer and rank settings, with any ranks, in
            any number of processes.

    Raises:
        FileNotFoundError: If there is no whole checkpoint.
        ValueError: If it is not one of :func:`save_parts`, or one of another model.
    """
    if not (folder / _METADATA).is_file():
        raise FileNotFoundError(f"{folder} holds no checkpoint that was written to its end")
    alone = not dist.is_initialized()
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if _SKELETON not in found:
        raise ValueError(f"{folder} does not hold a checkpoint of save_parts")
    likes = _shared_tensors(step)
    tensors = {name: _room(entry, likes.get(name)) for name, entry in found.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=folder, no_dist=alone)
    parts = put_together(parsed(tensors[_SKELETON].numpy().tobytes()), tensors)
    saved = Checkpoint(parts["step"], parts["model"], parts["optimizer"], parts["extra"], {})
    return restore_(step, saved, folder)


def _shared_tensors(step: TrainStep) -> dict[str, Tensor]:
    """Return the parameters that are shared out, by the names of what is saved of them."""
    model, optimizer = unwrapped_model(step.model), unwrap(step.optimizer)
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        for key in _KEYS_OF_MOMENTS:
            found[f"optimizer.state.{number}.{key}"] = param
    return {name: value for name, value in found.items() if is_sharded(value)}


_KEYS_OF_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State of the shape of its parameter in the optimizers that step parts of matrices."""


def _room(entry: Any, like: Any) -> Tensor:
    """Make a tensor to read into, shared out as one of its shape is."""
    from torch.distributed import tensor

    size, dtype = entry.size, entry.properties.dtype
    if like is None or like.shape != size:
        return torch.empty(size, dtype=dtype)
    placed = {"device_mesh": like.device_mesh, "placements": like.placements}
    return tensor.zeros(*size, dtype=dtype, **placed)
