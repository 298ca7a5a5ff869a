"""Cut pruned ranks out of a model for good."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.unsharded import check_unsharded
from comera.ops.cores import is_open
from comera.optim.unwrap import AnyOptimizer, unwrap_separable
from comera.surgery.optimizer_state import check_state, slice_state_
from comera.surgery.replicas import renew_, wrappers_of

log = logging.getLogger("comera")


@torch.no_grad()
def truncate_(
    model: nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    min_rank: int = 1,
    absorb: bool = True,
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut pruned ranks out of the cores, in place; the function of the model does not change.

    Parameters stay the same objects. Their gradients and the optimizer's state are cut with them,
    so training goes on; averages of weights, as of ``AveragedModel``, must be made anew. A
    ``DistributedDataParallel`` is told of the new shapes; all its processes make the same cut.

    Args:
        model: Its tensor-train layers are truncated.
        optimizer: The one that holds their state, if any.
        min_rank: 1 leaves a bond whose ranks are all pruned its largest one, at zero; 0 lets such
            a layer vanish and leave its bias.
        absorb: Multiply the gates into the cores and set them to one. False keeps their values.

    Returns:
        Layer name to ranks before and after.

    Raises:
        ValueError: If ``min_rank`` is neither 0 nor 1, or the optimizer is an LBFGS that has
            stepped: its history is of all parameters together. Or its state has other shapes than
            the parameters and cannot be cut with them. Or a tensor train is sharded, as by
            ``fully_shard``. Or a layer holds what is not finite. Nothing is changed.
    """
    check_min_rank(min_rank)
    check_unsharded(model, "truncate_")
    trains = tensor_trains(model)
    check_finite(trains)
    unwrapped = check_can_be_cut(trains, optimizer)
    if unwrapped is not None:
        _name_other_optimizers(trains, unwrapped)
    changed = {}
    for name, layer in trains.items():
        before = layer.ranks
        if 0 not in before:  # else it has vanished already
            _truncate_layer(layer, unwrapped, min_rank, absorb)
        changed[name] = (before, layer.ranks)
    if any(before != after for before, after in changed.values()):
        for wrapper in wrappers_of(model):
            renew_(wrapper)
    return changed


@torch.no_grad()
def kept_ranks(layer: TensorTrainModule, min_rank: int) -> list[Tensor]:
    """Return the indices that :func:`truncate_` leaves of each bond; none once one has vanished."""
    keeps = [torch.nonzero(is_open(gate, layer.prune_below)).flatten() for gate in layer.gates]
    if all(map(len, keeps)):
        return keeps
    if min_rank == 0 or 0 in layer.ranks:
        return [keep[:0] for keep in keeps]
    pairs = zip(keeps, layer.gates, strict=True)
    return [keep if len(keep) else gate.argmax()[None] for keep, gate in pairs]


def _truncate_layer(
    layer: TensorTrainModule, optimizer: Optimizer | None, min_rank: int, absorb: bool
) -> None:
    """Cut every core along both of its bonds, and every gate, with all that belongs to them."""
    keeps = kept_ranks(layer, min_rank)
    gates = list(layer.gates)
    open_gates = [torch.where(is_open(gate, layer.prune_below), gate, 0) for gate in gates]
    bonds = [None, *keeps, None]
    for k, core in enumerate(layer.cores):
        left, right = bonds[k], bonds[k + 1]
        keep = {}
        if left is not None:
            keep[0] = left
        if right is not None:
            keep[core.dim() - 1] = right
        # A gate is behind its core: it goes into the last dimension.
        scale = open_gates[k][right].to(core.dtype) if absorb and right is not None else None
        slice_state_(core, keep, scale, optimizer)
    for gate, value, kept in zip(gates, open_gates, keeps, strict=True):
        # Divided by what its core was multiplied by: it becomes one, and its moments fit that.
        inverse = torch.where(value == 0, 1, 1 / value)[kept] if absorb else None
        slice_state_(gate, {0: kept}, inverse, optimizer)
        if absorb:
            gate.fill_(1)


def _name_other_optimizers(named: Mapping[str, TensorTrainModule], optimizer: Optimizer) -> None:
    """Warn where another optimizer than the one whose state is cut may hold some parameters."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    training = [param for param in cores_and_gates(named) if param.requires_grad]
    without = sum(id(param) not in held for param in training)
    if without:
        log.warning(
            "the optimizer holds %d of %d cores and gates: if another one has stepped with the "
            "rest, make it anew after this cut, since its state keeps the shapes of before",
            len(training) - without, len(training),
        )  # fmt: skip


def check_can_be_cut(
    named: Mapping[str, TensorTrainModule], optimizer: AnyOptimizer | None
) -> Optimizer | None:
    """Return the optimizer that holds the state, sure that its state can be cut with the ranks."""
    unwrapped = unwrap_separable(optimizer)
    check_state(cores_and_gates(named), unwrapped)
    return unwrapped


def cores_and_gates(named: Mapping[str, TensorTrainModule]) -> list[Tensor]:
    """List all parameters that a cut may change."""
    return [param for layer in named.values() for param in (*layer.cores, *layer.gates)]


def check_finite(named: Mapping[str, TensorTrainModule]) -> None:
    """Raise ``ValueError`` for layers that hold what is not finite: NaN would count as closed."""
    for name, layer in named.items():
        for what, params in (("cores", layer.cores), ("gates", layer.gates)):
            if not all(bool(param.isfinite().all()) for param in params):
                raise not_finite(name, what)


def not_finite(name: str, what: str) -> ValueError:
    """Make the error for a layer whose cores or gates hold what is not finite."""
    return ValueError(
        f"the {what} of {name or 'the layer'} hold numbers that are not finite: there is no "
        "telling its ranks apart. Go back to a checkpoint from before"
    )


def check_min_rank(min_rank: Any) -> None:
    """Raise ``ValueError`` for what is neither 0 nor 1."""
    if min_rank not in (0, 1):
        raise ValueError(f"min_rank={min_rank!r} must be 0 (layers may vanish) or 1")
