"""Operate on any optimizer: unwrap it, step one parameter, pack and load its state.

An optimizer may have two class attributes, which end an error text that begins with its name:
``needs_whole_matrices`` says why it cannot step shards of a parameter, and ``not_capturable`` why a
CUDA graph cannot hold its step.
"""

import contextlib
import difflib
import reprlib
from collections.abc import Callable, Collection, Container, Iterator, Set
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.params import check_fused_state, is_sharded


class Wrapper(Protocol):
    """An object around an ``optimizer``, such as ``OptimizerInBackward``."""

    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


AnyOptimizer = Optimizer | Wrapper


def unwrap(optimizer: AnyOptimizer) -> Optimizer:
    """Return the innermost wrapped optimizer; raise ``TypeError`` if ``optimizer`` is none."""
    # A wrapper may be of torch's class itself, as that of accelerate.
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return unwrap(inner)
    if not isinstance(optimizer, Optimizer):
        shown = optimizer if isinstance(optimizer, type) else reprlib.repr(optimizer)
        raise TypeError(f"{shown} is given where an optimizer is wanted, or what wraps one")
    return optimizer


def unwrap_separable(optimizer: AnyOptimizer | None) -> Optimizer | None:
    """Return :func:`unwrap`; raise ``ValueError`` for LBFGS and ZeroRedundancyOptimizer."""
    if optimizer is None:
        return None
    unwrapped = unwrap(optimizer)
    if isinstance(unwrapped, torch.optim.LBFGS) and any(unwrapped.state.values()):
        raise ValueError(
            "LBFGS has one history of all parameters together, which cannot be changed along with "
            "some of them: leave the optimizer out, and make a new one afterwards"
        )
    if type(unwrapped).__name__ == "ZeroRedundancyOptimizer":
        raise ValueError(
            "ZeroRedundancyOptimizer steps each parameter in one process, at its first size: use "
            "the optimizer that it was given by itself, or leave it out and make a new one then"
        )
    return unwrapped


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return a class's ``step`` without the hooks and profiling that torch wraps around it."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def step_param(optimizer: Optimizer, param: Tensor, position: int) -> None:
    """Step one parameter, of group number ``position``, as ``optimizer.step()`` steps all.

    Hooks on the optimizer's step do not run. An optimizer may define its own
    ``step_param_(param, position)``. Raises ``TypeError`` if the optimizer keeps counts in its
    groups, as it would count every parameter.
    """
    own = getattr(optimizer, "step_param_", None)
    if own is not None:
        own(param, position)
        return
    check_fused_state(optimizer)
    groups = optimizer.param_groups
    group = groups[position]
    alone = {**group, "params": [param]}
    optimizer.param_groups = [alone]
    try:
        plain_step(type(optimizer))(optimizer)
    finally:
        optimizer.param_groups = groups
    check_keeps_no_count(optimizer, group, alone, "call its step() after backward")


def check_keeps_no_count(
    optimizer: Optimizer,
    before: dict[str, Any],
    after: dict[str, Any],
    instead: str,
    but: Container[str] = (),
) -> None:
    """Raise ``TypeError`` if a step changed group settings not in ``but``; advise ``instead``."""
    written = [
        key
        for key, value in after.items()
        if key != "params" and key not in but and value is not before.get(key)
    ]
    if written:
        raise TypeError(
            f"{type(optimizer).__name__} changes {', '.join(map(repr, written))} of its parameter "
            "groups in every step, which is a sum over all parameters and cannot be had from "
            f"one, nor from a subspace: {instead}"
        )


def group_of(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """Return the optimizer's group that contains a parameter."""
    return next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))


def check_whole(param: Tensor, who: str, instead: str = "torch.optim.AdamW") -> None:
    """Raise ``ValueError`` if a parameter is a part of one; ``who`` begins the error's text."""
    if is_sharded(param):
        raise ValueError(
            f"{who} whole matrices, and a parameter of shape {tuple(param.shape)} is sharded (as "
            f"by fully_shard or FullyShardedDataParallel): use {instead}, or leave the model "
            "whole in DistributedDataParallel"
        )


def check_gradient(grad: Tensor, who: str) -> None:
    """Raise ``RuntimeError``, naming ``who`` cannot use it, if a gradient is sparse or complex."""
    is_sparse = grad.layout != torch.strided
    if is_sparse or grad.is_complex():
        remedy = "train its real and imaginary parts (torch.view_as_real)"
        raise RuntimeError(
            f"{who} cannot use the {'sparse' if is_sparse else 'complex'} gradient of a parameter "
            f"of shape {tuple(grad.shape)}: "
            f"{'make the embedding with sparse=False' if is_sparse else remedy}, or give it to "
            "another optimizer"
        )


def unpack_state_(optimizer: Optimizer | None, param: Tensor) -> None:
    """Unpack a parameter's state to plain tensors that can be cut along with the parameter.

    Calls the optimizer's ``unpack_state_`` if it has one; torchao's moments become float32.
    """
    own = getattr(optimizer, "unpack_state_", None)
    if own is not None:
        own(param)
    elif optimizer is not None and hasattr(optimizer, "_new_buffer"):
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if hasattr(value, "__tensor_flatten__") and hasattr(value, "dequantize"):
                state[key] = value.dequantize()


def pack_state_(optimizer: Optimizer | None, param: Tensor) -> None:
    """Pack a parameter's state after :func:`unpack_state_`, in the parameter's present shape."""
    own, new_buffer = (getattr(optimizer, name, None) for name in ("pack_state_", "_new_buffer"))
    if own is not None:
        own(param)
    elif optimizer is not None and new_buffer is not None:
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():  # all but the number of steps
                state[key] = new_buffer(param.detach(), key == "exp_avg").copy_(value)


def stored_bytes(value: Any) -> int:
    """Return the bytes that a tensor, packed or not, stores; 0 for anything but a tensor."""
    if not isinstance(value, Tensor):
        return 0
    if type(value) not in (Tensor, torch.nn.Parameter) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return sum(stored_bytes(getattr(value, name)) for name in names)
    return value.numel() * value.element_size()


def whole(optimizer: Optimizer) -> dict[str, Any]:
    """Return all attributes of an optimizer but hooks, to pickle more than torch would."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        # A scheduler or a profiler may have wrapped methods of this one object.
        if not key.startswith("_optimizer_") and key not in ("step", "zero_grad")
    }


_MADE_FOR = {"muon": "comera.MuonAdamW", "rank": "comera.GaLore"}


def check_keys(group: Collection[str], known: Set[str], name: str) -> None:
    """Raise ``TypeError`` for a key of a parameter group that is nearly a setting, not quite.

    Others are kept for whom they belong to, as torch does: those of SAM, ``lr_scale`` of timm.
    """
    for key in group:
        if key in known or key == "params":
            continue
        near = [each for each in known if key in each.split("_")]  # "gap" of "update_proj_gap"
        if not any(f"_{each}_" in f"_{key}_" for each in known):  # "lr_scale" belongs to others
            near += difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        if not near and key not in _MADE_FOR:
            continue
        hint = f": did you mean {near[0]}?" if near else ""
        if key in _MADE_FOR:
            hint = f": groups with {key!r} are made for {_MADE_FOR[key]}"
        raise TypeError(f"{name} has no setting {key!r}{hint}")


@contextlib.contextmanager
def load_hooks(
    optimizer: Optimizer,
    before: Callable[[Optimizer, dict[str, Any]], dict[str, Any] | None],
    after: Callable[[Optimizer], None],
) -> Iterator[None]:
    """Hook ``load_state_dict`` inside: after others' pre-hooks, before others' post-hooks."""
    with (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ):
        yield
