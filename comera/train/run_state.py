"""Save and load checkpoints of a training step: everything that a resumed run depends on.

:func:`save_checkpoint` writes whole states into a chain; by :func:`save_parts` each process writes
its part of one state, in the format of ``torch.distributed.checkpoint``.
"""

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from comera.checkpoint.chain import Checkpoint, CheckpointChain
from comera.checkpoint.contents import names_of_parameters
from comera.checkpoint.skeleton import parsed, put_together, take_apart
from comera.nn.module import TensorTrainModule
from comera.ops.product import onednn_shapes
from comera.optim.state_layout import unwrap
from comera.params import is_sharded
from comera.train.data_parallel import unwrapped_model
from comera.train.host_state import random_state, set_random_state
from comera.train.sharded import shared_like, shared_optimizer_state, whole_state
from comera.train.step import TrainStep


def save_checkpoint(
    chain: CheckpointChain,
    step: TrainStep,
    extra: dict[str, Any] | None = None,
    writes: bool = True,
) -> None:
    """Add model, optimizer, schedules, rank learning and random states to a chain.

    Names and shapes are those of the model without ``DistributedDataParallel`` or ``fully_shard``,
    so any number of processes can load the checkpoint. A run resumed from a lossless chain
    continues exactly. ``extra`` are tensors and plain values of the caller. All processes call
    this, since each may hold a part of the model; ``writes`` is True in the process that writes.
    """
    model, state = unwrapped_model(step.model), _state_besides(step, extra)
    if not any(map(is_sharded, model.parameters())):
        if writes:
            chain.save(step.steps_done, model, step.optimizer, state)
        return
    optimizer = unwrap(step.optimizer)
    parts = whole_state(model.state_dict()), whole_state(optimizer.state_dict())
    if writes:
        chain.save(step.steps_done, *parts, state, names_of_parameters(model, optimizer))


def _state_besides(step: TrainStep, extra: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "layout": _layout(unwrapped_model(step.model)),
        "scheduler": None if step.scheduler is None else step.scheduler.state_dict(),
        "ranks": None if step.ranks is None else step.ranks.state_dict(),
        "random": random_state(),
        "onednn_shapes": sorted(onednn_shapes),
        "extra": extra or {},
    }


def load_checkpoint(
    chain: CheckpointChain, step: TrainStep, at: int | Literal["latest"] = "latest"
) -> dict[str, Any]:
    """Load a checkpoint into a training step; the model also gets the saved ranks.

    The training step has the same model, optimizer and rank settings; ``at`` is the step at which
    the checkpoint was saved, or ``latest`` for the last sound one. Returns its ``extra``. Raises
    ``FileNotFoundError`` if the step has no checkpoint or none is sound, and ``ValueError`` if the
    checkpoint is damaged, not from a training step, or from another model.
    """
    return restore_(step, chain.load(at), chain.folder)


def restore_(step: TrainStep, saved: Checkpoint, path: Path) -> dict[str, Any]:
    """Load a checkpoint that was read from ``path`` into a training step; return its ``extra``."""
    state, model = saved.extra, unwrapped_model(step.model)
    keys = {"layout", "scheduler", "ranks", "random", "extra"}
    if saved.optimizer is None or not keys <= state.keys():
        raise ValueError(f"{path} does not hold checkpoints of a training step")
    theirs, mine = state["layout"], _layout(model)
    if theirs != mine:
        differences = [f"it has {name}" for name in theirs.keys() - mine.keys()]
        differences += [f"it lacks {name}" for name in mine.keys() - theirs.keys()]
        differences += [
            f"{name} is {theirs[name]} there and {mine[name]} here"
            for name in theirs.keys() & mine.keys()
            if theirs[name] != mine[name]
        ]
        differences.sort()
        more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise ValueError(f"{path} belongs to another model: {'; '.join(differences[:4])}{more}")
    weights, moments = saved.model, saved.optimizer
    if any(map(is_sharded, model.parameters())):
        here = model.state_dict()
        weights = {name: shared_like(here.get(name), value) for name, value in weights.items()}
        moments = shared_optimizer_state(unwrap(step.optimizer), moments)
    model.load_state_dict(weights)
    step.optimizer.load_state_dict(moments)
    if next(model.parameters()).device.type == "cpu":  # the checkpoint may be of captured steps
        for group in unwrap(step.optimizer).param_groups:
            if group.get("capturable"):
                group |= {"capturable": False, "lr": float(group["lr"])}
    for name in ("scheduler", "ranks"):
        part, loaded = getattr(step, name), state[name]
        if (part is None) != (loaded is None):
            has, lacks = ("the checkpoint", "this run") if part is None else ("this run", path)
            raise ValueError(f"{has} has a {name} state and {lacks} has none")
        if part is not None:
            part.load_state_dict(loaded)
    step.steps_done = saved.step
    set_random_state(state["random"])
    onednn_shapes.clear()
    onednn_shapes.update(map(tuple, state.get("onednn_shapes", ())))  # older ones have none
    return state["extra"]


def _layout(model: nn.Module) -> dict[str, list[int]]:
    modules = model.named_modules(remove_duplicate=False)  # layers may share their cores
    layers = {name: module for name, module in modules if isinstance(module, TensorTrainModule)}
    bonds = {
        f"{layer}.{part}.{k}".lstrip(".")
        for layer, module in layers.items()
        for part in ("cores", "gates")
        for k in range(len(getattr(module, part)))
    }
    order = "row_order", "rows_scattered", "rows_in_order"  # of a table's rows
    places = {f"{layer}.{key}".lstrip(".") for layer in layers for key in order}
    return {
        name: list(tensor.shape[1:-1]) if name in bonds else list(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in places
    }


_SKELETON = "skeleton"
_METADATA = ".metadata"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State of the shape of its parameter in the optimizers that step parts of matrices."""


def save_parts(folder: Path, step: TrainStep, extra: dict[str, Any] | None = None) -> None:
    """Write model, optimizer, schedules and rank learning; each process writes its part.

    This is for models that no process can hold whole. Every process calls it, with a shared folder
    for this checkpoint alone. The format is torch's; any number of processes can load it, sharded
    or not. The first process' ``extra``, tensors and plain values, is saved. Raises ``ValueError``
    if the folder holds a checkpoint already.
    """
    if (folder / _METADATA).exists():
        raise ValueError(f"{folder} holds a checkpoint: give each a folder of its own")
    alone = not dist.is_initialized()
    model, optimizer = unwrapped_model(step.model), unwrap(step.optimizer)
    tensors: dict[str, Tensor] = {}
    shared: dict[int, tuple[Tensor, Tensor]] = {}

    def plain(leaf: Any) -> Any:
        """Replace a sharded tensor, which ``take_apart`` refuses, by an empty one."""
        if not is_sharded(leaf):
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
        "extra": _state_besides(step, extra),
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
    """Load a checkpoint of :func:`save_parts`, of which each process reads its part.

    All processes share the folder; ``step`` has the same model, optimizer and rank settings, with
    any ranks, in any number of processes. Returns the saved ``extra``. Torch reads the metadata by
    pickle, which can run code: load only what you trust. Raises ``FileNotFoundError`` if there is
    no whole checkpoint, and ``ValueError`` if it is not from :func:`save_parts` or this model.
    """
    if not (folder / _METADATA).is_file():
        raise FileNotFoundError(f"{folder} holds no checkpoint that was written to its end")
    alone = not dist.is_initialized()
    found: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if _SKELETON not in found:
        raise ValueError(f"{folder} does not hold a checkpoint of save_parts")
    model, optimizer = unwrapped_model(step.model), unwrap(step.optimizer)
    likes = {f"model.{name}": value for name, value in model.state_dict().items()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        likes |= {f"optimizer.state.{number}.{key}": param for key in _MOMENTS}
    tensors: dict[str, Tensor] = {}
    for name, entry in found.items():  # room to read into, sharded as a parameter of its shape is
        size, dtype = entry.size, entry.properties.dtype
        like: Any = likes.get(name)
        fits = like is not None and is_sharded(like) and like.shape == size
        tensors[name] = (
            torch.zeros_like(like, dtype=dtype) if fits else torch.empty(size, dtype=dtype)
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=folder, no_dist=alone)
    parts = put_together(parsed(tensors[_SKELETON].numpy().tobytes()), tensors)
    saved = Checkpoint(parts["step"], parts["model"], parts["optimizer"], parts["extra"], {})
    return restore_(step, saved, folder)
