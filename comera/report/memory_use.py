"""Count the memory of a model and its optimizer before training.

To do so, the optimizer's own step runs on copies of the parameters on torch's meta device.
"""

import copy
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from comera.nn.module import check_model
from comera.optim.galore import GaLore
from comera.optim.state_layout import AnyOptimizer, stored_bytes, unwrap, whole
from comera.planning.printing import Report, Table, show_bytes

log = logging.getLogger("comera")


def state_bytes(optimizer: Optimizer) -> dict[Tensor, int]:
    """Count the bytes of every parameter's optimizer state, now or after the first step.

    Raises ``ValueError`` if the step does not run without numbers; then count after a real step.
    """
    counted = _bytes(optimizer)
    fresh = [param for param, size in counted.items() if param.requires_grad and not size]
    if not fresh:
        return counted
    memo: dict[int, Any] = {}  # for copy.deepcopy: meta parameters and empty states
    for part in (optimizer, optimizer.inner) if isinstance(optimizer, GaLore) else (optimizer,):
        memo[id(part.state)] = defaultdict(dict)
        for group in part.param_groups:
            for param in group["params"]:
                blank = torch.empty_like(param, device="meta")
                memo.setdefault(id(param), nn.Parameter(blank, param.requires_grad))
    kind = type(optimizer)
    twin = kind.__new__(kind)
    full = optimizer.__getstate__() if isinstance(optimizer, GaLore) else whole(optimizer)
    twin.__setstate__(copy.deepcopy(full, memo))
    for group in twin.param_groups:  # the plain step: the same state without fused kernels
        group |= {key: False for key in ("fused", "foreach", "capturable") if key in group}
    kinds = {
        param: (number, param.shape, param.dtype, getattr(param, "placements", None))
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    first = {kinds[param]: memo[id(param)] for param in fresh}  # one steps for all of its kind
    for blank in first.values():
        blank.grad = torch.empty_like(blank)
    try:
        with _EveryNumberIsOne(), torch.compiler.set_stance("force_eager"):
            twin.step()
    except Exception as problem:
        raise ValueError(
            f"the state of {kind.__name__} cannot be counted before its first step: {problem}"
        ) from problem
    of_twin = _bytes(twin)
    return counted | {param: of_twin[first[kinds[param]]] for param in fresh}


def _bytes(optimizer: Optimizer) -> dict[Tensor, int]:
    state = optimizer.state_dict()["state"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        param: sum(map(stored_bytes, state.get(number, {}).values()))
        for number, param in enumerate(params)
    }


class _EveryNumberIsOne(TorchDispatchMode):
    """Mode in which ``.item()`` of meta tensors returns 1, so that a step runs without data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class GroupMemory:
    """Memory of the parameters in a group of the optimizer, such as ``cores``, in bytes.

    ``not trained`` are frozen parameters and buffers. ``gradients`` are held between the backward
    pass and the step, ``state`` from the first step on; ``entries`` are numbers, not bytes.
    """

    name: str
    entries: int
    weights: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.gradients + self.state


@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """Memory of a model and its optimizer before training; prints itself, also in Jupyter.

    ``optimizer`` is its class name, and the ``groups`` are in its order.
    """

    optimizer: str
    groups: tuple[GroupMemory, ...]
    title: str = "memory at the start"

    @property
    def total(self) -> GroupMemory:
        """The sum of all groups."""
        sums = (
            sum(getattr(group, key) for group in self.groups)
            for key in ("entries", "weights", "gradients", "state")
        )
        return GroupMemory("total", *sums)

    def tables(self) -> list[Table]:
        header = ("parameters", "entries", "weights", "gradients", "optimizer state", "together")
        rows = [
            (one.name, *(f"{n:,}" for n in (one.entries, one.weights, one.gradients, one.state)),
             f"{one.total:,}")
            for one in (*self.groups, self.total)
        ]  # fmt: skip
        return [Table(f"{self.title}, bytes", header, rows, total=True)]

    def summary(self) -> str:
        total = self.total
        share = f", {total.state / total.weights:.2f}x the weights" if total.weights else ""
        return (
            f"{show_bytes(total.total)} before activations and work space; "
            f"{self.optimizer} keeps {show_bytes(total.state)}{share}"
        )


def memory_report(
    model: nn.Module, optimizer: AnyOptimizer, title: str = "memory at the start"
) -> MemoryReport:
    """Count the bytes of weights, gradients and optimizer state exactly, without allocating.

    Activations, temporary tensors of a step and unused memory of the allocator are not counted.

    Args:
        model: The model, on any device, even ``meta``.
        optimizer: The optimizer of its parameters, counted too, and warned of, if they are not the
            model's; state that exists already is counted. Groups of one name share a line. With
            updates in backward, gradients never exist all at once.
        title: Title of the table.

    Raises:
        ValueError: If the optimizer's step does not run on ``meta`` and has not run for real.
        TypeError: If ``model`` is no module, or ``optimizer`` no optimizer.

    Example::

        optimizer = comera.CAME(comera.param_groups(model, lr=3e-4))
        print(comera.memory_report(model, optimizer))
    """
    check_model(model)
    optimizer = unwrap(optimizer)
    states = state_bytes(optimizer)
    if foreign := len(states.keys() - set(model.parameters())):
        log.warning(
            "memory_report counts %d parameters of the optimizer that are none of the model's: "
            "make the optimizer of this model, after tensorize_",
            foreign,
        )
    members: dict[str, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        name = group.get("name", f"group {number}" if len(optimizer.param_groups) > 1 else "all")
        members.setdefault(str(name), []).extend(group["params"])
    rest = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in states]
    if rest:
        members.setdefault("not trained", []).extend(dict.fromkeys(rest))
    groups = tuple(
        GroupMemory(
            name,
            entries=sum(tensor.numel() for tensor in tensors),
            weights=sum(map(stored_bytes, tensors)),
            gradients=sum(stored_bytes(tensor) for tensor in tensors if tensor.requires_grad),
            state=sum(states.get(tensor, 0) for tensor in tensors),
        )
        for name, tensors in members.items()
    )
    kind = type(optimizer).__name__
    if type(optimizer) is GaLore:
        kind += f" around {type(optimizer.inner).__name__}"
    return MemoryReport(kind, groups, title)
