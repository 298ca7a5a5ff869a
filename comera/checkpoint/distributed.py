"""Gather on rank 0 the state of a model that several processes train, and load it again."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from comera.checkpoint.chain import Checkpoint
from comera.nn.module import check_unsharded, tensor_trains


def gathered(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any] | None:
    """Gather the whole state of model and optimizer on the CPU of rank 0; every rank must call it.

    The model may use ``fully_shard`` or ``DistributedDataParallel``. Names are those of the model
    without these wrappers, for any number of processes to load. Returns None on the other ranks.
    """
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    parts: dict[str, Any] = {"model": state_dict.get_model_state_dict(model, options=options)}
    if optimizer is not None:
        parts["optimizer"] = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    return parts if _is_first() else None


def scatter_(
    model: nn.Module, optimizer: Optimizer | None = None, saved: Checkpoint | None = None
) -> None:
    """Load a checkpoint of :func:`gathered` into every process; every rank must call it.

    Tensor trains get the saved ranks. ``saved`` is the result of ``chain.load`` on rank 0, and
    ignored on other ranks; rank 0 raises ``ValueError`` without it.
    """
    if _is_first() and saved is None:
        raise ValueError("rank 0 needs the checkpoint: scatter_(model, optimizer, chain.load())")
    if saved is not None and optimizer is not None and saved.optimizer is None:
        raise ValueError("the checkpoint holds no state of an optimizer: leave optimizer out")
    several = dist.is_initialized()
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    # Copies of the dicts, which torch changes; tensors stay the same.
    parts = (saved.model, saved.optimizer or {}) if saved is not None else ({}, {})
    weights, moments = tree_map(lambda leaf: leaf, parts)
    # torch loads no buffer that is None here, such as the ``row_order`` of a table whose rows were
    # moved after the model was made.
    shapes: list[Any] = [
        {name: (x.shape, x.dtype) for name, x in weights.items() if isinstance(x, torch.Tensor)}
    ]
    if several:
        dist.broadcast_object_list(shapes)
    device = next(model.parameters()).device
    inner = getattr(model, "module", model)
    for name, layer in tensor_trains(inner).items():
        for k, core in enumerate(layer.cores):
            if shapes[0].get(f"{name}.cores.{k}".lstrip("."), [core.shape])[0] != core.shape:
                check_unsharded(layer, "scatter_ of other ranks")
    for prefix, module in inner.named_modules():
        for key, buffer in module._buffers.items():
            shape, dtype = shapes[0].get(f"{prefix}.{key}".lstrip("."), (None, None))
            if buffer is None and shape is not None:
                setattr(module, key, torch.zeros(shape, dtype=dtype, device=device))
    # One after the other: set_state_dict takes an empty dict of weights for none to be loaded.
    state_dict.set_model_state_dict(model, weights, options=options)
    if optimizer is not None:
        state_dict.set_optimizer_state_dict(model, optimizer, moments, options=options)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
