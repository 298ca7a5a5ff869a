"""The parts of an optimizer that torch's own code does not reach: packed state, all attributes."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_OF_A_PLACE = ("step", "zero_grad")
"""Methods that a scheduler or a profiler may have wrapped for one object: not for its copies."""


def whole(optimizer: Optimizer) -> dict[str, Any]:
    """Return all attributes but the hooks; torch's ``__getstate__`` lacks those of subclasses."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if not key.startswith("_optimizer_") and key not in _OF_A_PLACE
    }


def group_of(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """Return the group that a parameter is in, which torch finds by no name."""
    return next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))


def packs_state(optimizer: Optimizer) -> bool:
    """Tell whether :func:`unpack_state_` changes the state of an optimizer."""
    return hasattr(optimizer, "unpack_state_") or hasattr(optimizer, "_new_buffer")


def unpack_state_(optimizer: Optimizer | None, param: Tensor) -> None:
    """Lay a parameter's state out in plain tensors that can be cut along with it.

    By the optimizer's own ``unpack_state_`` where it has one; torchao's eight-bit and four-bit
    moments become float32.
    """
    if optimizer is None:
        return
    own = getattr(optimizer, "unpack_state_", None)
    if own is not None:
        own(param)
    elif hasattr(optimizer, "_new_buffer"):
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if hasattr(value, "__tensor_flatten__") and hasattr(value, "dequantize"):
                state[key] = value.dequantize()


def pack_state_(optimizer: Optimizer | None, param: Tensor) -> None:
    """Undo :func:`unpack_state_` for the shape that the parameter has now."""
    if optimizer is None:
        return
    own, new_buffer = (getattr(optimizer, name, None) for name in ("pack_state_", "_new_buffer"))
    if own is not None:
        own(param)
    elif new_buffer is not None:
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():  # all but the number of steps
                state[key] = new_buffer(param.detach(), key == "exp_avg").copy_(value)


def stored_bytes(value: Any) -> int:
    """Count the bytes that a tensor keeps, those inside of a packed one; 0 for no tensor."""
    if not isinstance(value, Tensor):
        return 0
    if type(value) not in (Tensor, torch.nn.Parameter) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return sum(stored_bytes(getattr(value, name)) for name in names)
    return value.numel() * value.element_size()
