"""Checkpoints of a training step: everything that a resumed run depends on.

:func:`save_checkpoint` writes into a chain of whole states; :func:`save_parts` writes one state of
which each process writes its part, by ``torch.distributed.checkpoint``.
"""

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from comera.checkpoint.chain import Checkpoint, CheckpointChain
from comera.checkpoint.skeleton import parsed, put_together, take_apart
from comera.nn.module import tensor_trains
from comera.optim.state_layout import unwrap
from comera.params import is_sharded
from comera.train.data_parallel import unwrapped_model
from comera.train.host_state import random_state, set_random_state
from comera.train.sharded import (
    has_shared_parts,
    shared_model_state,
    shared_optimizer_state,
    whole_state,
)
from comera.train.step import TrainStep

_PLACES = ("row_order", "_extra_state")
"""Keys of a table's state dict that say at which rows indices are kept."""


def save_checkpoint(
    chain: CheckpointChain,
    step: TrainStep,
    extra: dict[str, Any] | None = None,
    writes: bool = True,
) -> None:
    """Add model, optimizer, schedules, rank learning and random states to a chain.

    Names and shapes are those of the model without ``DistributedDataParallel`` or ``fully_shard``:
    what one process saves can be loaded by any number of them, and the other way round.

    Args:
        chain: Whether it is lossless decides whether the run is resumed exactly.
        step: The training step whose state is saved.
        extra: Tensors and plain values of the caller.
        writes: Whether this is the process that writes; of several all call this, since each may
            hold a part of the model.
    """
    model, state = unwrapped_model(step.model), state_besides(step, extra)
    if not has_shared_parts(model):
        if writes:
            chain.save(step.steps_done, model, step.optimizer, state)
        return
    optimizer = unwrap(step.optimizer)
    parts = whole_state(model.state_dict()), whole_state(optimizer.state_dict())
    if writes:
        chain.save(step.steps_done, *parts, state, _names(model, optimizer))


def state_besides(step: TrainStep, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of a training step besides that of its model and optimizer."""
    return {
        "layout": _layout(unwrapped_model(step.model)),
        "scheduler": None if step.scheduler is None else step.scheduler.state_dict(),
        "ranks": None if step.ranks is None else step.ranks.state_dict(),
        "random": random_state(),
        "extra": extra or {},
    }


def _names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Return names of weights by the keys of the optimizer's state, which numbers them."""
    of = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {number: of[id(param)] for number, param in enumerate(params)}


def load_checkpoint(
    chain: CheckpointChain, step: TrainStep, at: int | Literal["latest"] = "latest"
) -> dict[str, Any]:
    """Load a checkpoint into a training step, whose model takes its truncated ranks too.

    Args:
        chain: The chain that it was saved to.
        step: A training step over the same model, optimizer and rank settings.
        at: Number of steps after which it was saved; ``latest`` is the last checkpoint that is
            sound.

    Returns:
        The ``extra`` of the checkpoint.

    Raises:
        FileNotFoundError: If there is no such checkpoint, or none that is sound.
        ValueError: If it is damaged, not one of a training step, or one of another model.
    """
    return restore_(step, chain.load(at), chain.folder)


def restore_(step: TrainStep, saved: Checkpoint, path: Path) -> dict[str, Any]:
    """Put a training step into the state of a checkpoint that has been read; returns its ``extra``.

    Args:
        step: A training step over the same model, optimizer and rank settings.
        saved: What the chain returned.
        path: Where it was read, for errors.

    Raises:
        ValueError: If it is not one of a training step, or one of another model.
    """
    state, model = saved.extra, unwrapped_model(step.model)
    keys = {"layout", "scheduler", "ranks", "random", "extra"}
    if saved.optimizer is None or state.keys() != keys:
        raise ValueError(f"{path} does not hold checkpoints of a training step")
    _check_layout(path, state["layout"], _layout(model))
    weights, moments = saved.model, saved.optimizer
    if has_shared_parts(model):
        weights = shared_model_state(model, weights)
        moments = shared_optimizer_state(unwrap(step.optimizer), moments)
    model.load_state_dict(weights)
    step.optimizer.load_state_dict(moments)
    for name in ("scheduler", "ranks"):
        mine, theirs = getattr(step, name), state[name]
        if (mine is None) != (theirs is None):
            has, lacks = ("the checkpoint", "this run") if mine is None else ("this run", path)
            raise ValueError(f"{has} has a {name} state and {lacks} has none")
        if mine is not None:
            mine.load_state_dict(theirs)
    step.steps_done = saved.step
    set_random_state(state["random"])
    return state["extra"]


def _layout(model: nn.Module) -> dict[str, list[int]]:
    """Return every tensor's shape, but for what training may change: bonds, places of rows."""
    layers = tensor_trains(model)
    bonds = {
        f"{layer}.{part}.{k}".lstrip(".")
        for layer, module in layers.items()
        for part in ("cores", "gates")
        for k in range(len(getattr(module, part)))
    }
    places = {f"{layer}.{key}".lstrip(".") for layer in layers for key in _PLACES}
    return {
        name: list(tensor.shape[1:-1]) if name in bonds else list(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in places
    }


def _check_layout(path: Path, saved: dict[str, list[int]], mine: dict[str, list[int]]) -> None:
    if saved == mine:
        return
    differences = [
        *(f"it has {name}" for name in saved.keys() - mine.keys()),
        *(f"it lacks {name}" for name in mine.keys() - saved.keys()),
        *(
            f"{name} is {saved[name]} there and {mine[name]} here"
            for name in saved.keys() & mine.keys()
            if saved[name] != mine[name]
        ),
    ]
    shown = "; ".join(sorted(differences)[:4])
    more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
    raise ValueError(f"{path} belongs to another model: {shown}{more}")


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
