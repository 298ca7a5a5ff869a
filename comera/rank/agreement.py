"""Copies of one model in several processes: which processes these are, and that copies stay alike.

Processes that average their gradients hold the same model as long as each changes it as the others
do. Were one of them to remove other ranks, what they average would not belong together.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.nn.module import tensor_trains
from comera.surgery.replicas import wrappers_of

_SAME = 1e-3
"""How far gates may differ that are one: machines of several kinds round differently."""

_WAY_OUT = (
    "Nothing has been changed. Processes that train one model start with equal weights and average "
    "their gradients, as DistributedDataParallel does; where each trains a model of its own, give "
    "TwoStage or ImportancePruning process_group=None"
)


def processes_of(model: nn.Module) -> "dist.ProcessGroup | None":
    """Find the group whose processes train copies of a model.

    That of its ``DistributedDataParallel``; where there is none, all processes that
    ``torch.distributed`` knows of. None for a process that is alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for wrapper in wrappers_of(model):
        return wrapper.process_group
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def check_alike(
    group: "dist.ProcessGroup | None", model: nn.Module, settings: Mapping[str, object]
) -> None:
    """Check that the processes of a group hold the same ranks and gates; all of them call it.

    Args:
        group: None for a process that is alone.
        model: The copy of this process.
        settings: What else must be equal, by name.

    Raises:
        ValueError: If any two differ; raised in all processes, and says in what.
    """
    layers = tensor_trains(model)
    gates = {name: [gate.detach().cpu() for gate in m.gates] for name, m in layers.items()}
    thresholds = {name: layer.prune_below for name, layer in layers.items()}
    known = {**settings, "prune_below": thresholds}
    (first, mine), *others = _gathered(group, (known, gates)).items()
    for process, theirs in others:
        what = _difference(mine, theirs)
        if what is not None:
            raise ValueError(
                f"processes {first} and {process} do not hold copies of one model: {what}. "
                f"{_WAY_OUT}"
            )


def agreed(group: "dist.ProcessGroup | None", plan: Callable[[], Any]) -> None:
    """Run a function in the processes of a group; all of them call this.

    Args:
        group: None for a process that is alone.
        plan: Returns plain values, the same in all processes.

    Raises:
        Exception: What the function raised, where it did.
        RuntimeError: If it raised in one process; raised in the others.
        ValueError: If it returned different values; raised in all processes.
    """
    mine, problem = None, None
    try:
        mine = plan()
    except Exception as error:
        problem = error
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    gathered = _gathered(group, (mine, text))
    if problem is not None:
        raise problem
    for process, (_, text) in gathered.items():
        if text is not None:
            raise RuntimeError(
                f"process {process} cannot cut its ranks, so that no other does: {text}"
            )
    (first, _), *others = gathered.items()
    for process, (theirs, _) in others:
        if theirs != gathered[first][0]:
            raise ValueError(
                f"processes {first} and {process} would cut other ranks: their gates are the "
                f"same, but their cores are not. {_WAY_OUT}"
            )


def _gathered(group: "dist.ProcessGroup | None", mine: Any) -> dict[int, Any]:
    """Gather what every process of a group says, by its number."""
    if group is None:
        return {0: mine}
    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, mine, group=group)
    return dict(zip(ranks, found, strict=True))


_Copy = tuple[dict[str, object], dict[str, list[Tensor]]]


def _difference(one: _Copy, other: _Copy) -> str | None:
    """Say in what two processes differ, in words; None if they do not."""
    (settings, gates), (other_settings, other_gates) = one, other
    for name, value in settings.items():
        if value != other_settings[name]:
            return f"{name} is {value!r} and {other_settings[name]!r}"
    if gates.keys() != other_gates.keys():
        return f"the tensor-train layers are {list(gates)} and {list(other_gates)}"
    for name, of_layer in gates.items():
        ranks, other_ranks = ([len(g) for g in gs] for gs in (of_layer, other_gates[name]))
        where = f"of {name or 'the layer'}"
        if ranks != other_ranks:
            return f"the ranks {where} are {ranks} and {other_ranks}"
        flat, other_flat = torch.cat(of_layer), torch.cat(other_gates[name])
        if not torch.allclose(flat, other_flat, rtol=0, atol=_SAME, equal_nan=True):
            return f"gates {where} differ by up to {float((flat - other_flat).abs().max()):.2g}"
    return None
