"""Bytes of an optimizer's state, counted before its first step.

The optimizer's own step is run on copies of the parameters that hold no memory (torch's meta
device), so the count is of the very tensors it will allocate, whichever optimizer it is.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from comera.optim.galore import GaLore
from comera.optim.state_layout import stored_bytes, whole


def state_bytes(optimizer: Optimizer) -> dict[Tensor, int]:
    """Count the bytes that are kept of every parameter from its first step on.

    Args:
        optimizer: Nothing of it is changed. Where a parameter has state already, that is counted.

    Raises:
        ValueError: If its step does not run without numbers, so that it can only be counted later.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    counted = dict(zip(params, _bytes(optimizer), strict=True))
    fresh = [param for param in params if param.requires_grad and not counted[param]]
    if fresh:
        memo = _meta_copies(optimizer)
        twin = _twin(optimizer, memo)
        for param in fresh:
            memo[id(param)].grad = torch.empty_like(memo[id(param)])
        try:
            with _EveryNumberIsOne(), torch.compiler.set_stance("force_eager"):
                twin.step()
        except Exception as problem:
            raise ValueError(
                f"the state of {type(optimizer).__name__} cannot be counted before its first "
                f"step: {problem}"
            ) from problem
        of_twin = dict(zip(params, _bytes(twin), strict=True))
        counted |= {param: of_twin[param] for param in fresh}
    return counted


def _bytes(optimizer: Optimizer) -> list[int]:
    """Return the bytes of each parameter's state, in the order of the parameters."""
    state = optimizer.state_dict()["state"]
    numbers = range(sum(len(group["params"]) for group in optimizer.param_groups))
    return [sum(map(stored_bytes, state.get(number, {}).values())) for number in numbers]


def _meta_copies(optimizer: Optimizer) -> dict[int, Any]:
    """Return the meta parameters and empty states of a copy, as a memo for ``copy.deepcopy``."""
    memo: dict[int, Any] = {}
    for part in (optimizer, optimizer.inner) if isinstance(optimizer, GaLore) else (optimizer,):
        memo[id(part.state)] = defaultdict(dict)
        for group in part.param_groups:
            for param in group["params"]:
                blank = torch.empty_like(param, device="meta")
                memo.setdefault(id(param), nn.Parameter(blank, param.requires_grad))
    return memo


def _twin(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer with all attributes, but with other parameters and no state."""
    kind = type(optimizer)
    twin = kind.__new__(kind)
    full = optimizer.__getstate__() if isinstance(optimizer, GaLore) else whole(optimizer)
    twin.__setstate__(copy.deepcopy(full, memo))
    for group in twin.param_groups:  # the plain step: the same state without fused kernels
        group |= {key: False for key in ("fused", "foreach", "capturable") if key in group}
    return twin


class _EveryNumberIsOne(TorchDispatchMode):
    """Mode that returns 1 for ``.item()`` on meta tensors, so that a step runs without data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))
