"""Make processes that train copies of one model cut the same ranks.

Settings, ranks, gates and plans of the processes are compared before anything is changed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.nn.module import TensorTrainModule, tensor_trains
from comera.params import wrappers_of

_WAY_OUT = (
    "Nothing has been changed. Processes that train one model start with equal weights and average "
    "their gradients, as DistributedDataParallel does; where each trains a model of its own, give "
    "TwoStage or ImportancePruning process_group=None"
)


def processes_of(model: nn.Module) -> "dist.ProcessGroup | None":
    """Return the group of processes that train a model: its DDP's or the default; None if alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for wrapper in wrappers_of(tensor_trains(model).values()):
        return wrapper.process_group
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def check_copies(
    group: "dist.ProcessGroup | None",
    settings: dict[str, Any],
    layers: Mapping[str, TensorTrainModule],
) -> None:
    """Raise ``ValueError`` in all processes if their settings, ranks or gates differ."""
    gates = {name: [gate.detach().cpu() for gate in m.gates] for name, m in layers.items()}
    (first, mine), *others = from_all(group, (settings, gates)).items()
    for process, theirs in others:
        what = _difference(mine, theirs)
        if what is not None:
            raise ValueError(
                f"processes {first} and {process} do not hold copies of one model: {what}. "
                f"{_WAY_OUT}"
            )


def agreed(group: "dist.ProcessGroup | None", plan: Callable[[], Any]) -> None:
    """Check that a function, which returns plain values, returns the same in all processes.

    ``group`` is None for a single process. Raises the error of ``plan`` in this process,
    ``RuntimeError`` if it failed in another one, and ``ValueError`` in all if values differ.
    """
    mine, problem, text = None, None, None
    try:
        mine = plan()
    except Exception as error:
        problem, text = error, f"{type(error).__name__}: {error}"
    outcomes = from_all(group, (mine, text))
    if problem is not None:
        raise problem
    for process, (_, text) in outcomes.items():
        if text is not None:
            raise RuntimeError(
                f"process {process} cannot cut its ranks, so that no other does: {text}"
            )
    (first, _), *others = outcomes.items()
    for process, (theirs, _) in others:
        if theirs != outcomes[first][0]:
            raise ValueError(
                f"processes {first} and {process} would cut other ranks: their gates are the "
                f"same, but their cores are not. {_WAY_OUT}"
            )


def from_all(group: "dist.ProcessGroup | None", mine: Any) -> dict[int, Any]:
    """Return the objects of all processes of a group by rank; only its own one without a group."""
    if group is None:
        return {0: mine}
    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, mine, group=group)
    return dict(zip(ranks, found, strict=True))


def mean_over(group: "dist.ProcessGroup | None", value: Tensor) -> Tensor:
    """Average a tensor over the processes of a group; without a group return it as it is."""
    if group is None:
        return value
    mean = value / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    return mean


def _difference(one: tuple[Any, Any], other: tuple[Any, Any]) -> str | None:
    """Return the first difference between the settings and gates of two processes, or None."""
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
        # Machines of several kinds round differently.
        if not torch.allclose(flat, other_flat, rtol=0, atol=1e-3, equal_nan=True):
            return f"gates {where} differ by up to {float((flat - other_flat).abs().max()):.2g}"
    return None
