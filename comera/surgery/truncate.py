"""Pruned ranks cut out of a model for good, with the optimizer's state and the DDP wrapper.

A parameter that loses rows stays the same object, so that parameter groups, averages and wrappers
still hold it; its gradient and its state are cut in the same way.
"""

import gc
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comera.nn.module import TensorTrainModule, check_unsharded, tensor_trains
from comera.ops.cores import is_open
from comera.optim.state_layout import (
    AnyOptimizer,
    group_of,
    pack_state_,
    packs_state,
    unpack_state_,
    unwrap_separable,
)
from comera.params import set_data_

log = logging.getLogger("comera")


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Find every ``DistributedDataParallel`` that holds a tensor-train layer of a model.

    A model does not know what it is wrapped in, so all objects of this process are looked
    through: a matter of milliseconds, for what happens once or twice in a run.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    layers = {id(layer) for layer in tensor_trains(model).values()}
    gc.collect()  # one that was given up may live in a cycle
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), DistributedDataParallel)
        and "reducer" in vars(found)  # else its constructor has raised
        and any(id(module) in layers for module in found.modules())
    ]


def renew_(wrapper: DistributedDataParallel) -> None:
    """Rebuild the buffers of a ``DistributedDataParallel`` for the present shapes of parameters.

    The wrapper sorts parameters into buffers when it is made, and holds an accumulator of the old
    shape for each. Both are made again as in its own ``__setstate__``; all processes call this at
    the same step.
    """
    # The old one first: accumulators of gradients live as long as it, on their old stream.
    del wrapper.reducer, wrapper.logger
    params, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(params)
    wrapper._ddp_init_helper(params, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()  # type: ignore[union-attr]
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)


FIRST_MOMENTS = {"exp_avg", "exp_avg_update", "momentum_buffer", "grad_avg", "prev"}
"""State that says where a step goes; the other says how large it is."""

AVERAGES = {"ax"}
"""State that is an average of the parameter itself; only ASGD keeps one."""

_GOES_WITH_GRADIENT = {"exp_avg", "momentum_buffer", "grad_avg", "exp_inf"}
_GOES_WITH_SQUARE = {
    "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", "row_var", "col_var",
}  # fmt: skip


@torch.no_grad()
def slice_state_(
    param: Tensor,
    keep: Mapping[int, Tensor],
    scale: Tensor | None = None,
    optimizer: Optimizer | None = None,
) -> None:
    """Select rows of a parameter, of its gradient and of its optimizer state, in place.

    Args:
        param: Changed in place to ``param[keep] * scale``; its identity stays.
        keep: The indices that stay, by dimension, int64 on the parameter's device.
        scale: Factor applied after the cut, broadcast against it. A gradient, which is measured
            per unit of the parameter, is divided by it, a second moment by its square, and an
            average of the parameter multiplied. Where it is zero they become zero.
        optimizer: The optimizer whose state for ``param`` is cut too, if there is one.

    Raises:
        ValueError: If the optimizer holds a state tensor that cannot be matched to the parameter.
    """
    old_shape = param.shape
    inverse = None
    if scale is not None:
        inverse = torch.where(scale == 0, 0, 1 / scale)
    # Some state has the parameter's dimensions only once it is unpacked, such as factors of it as a
    # matrix, or eight-bit moments.
    unpack_state_(optimizer, param)
    state = {} if optimizer is None else optimizer.state.get(param, {})
    # All is cut before anything is assigned: what cannot be matched raises with nothing changed.
    cut_state = {
        key: _cut(_named(key, optimizer), value, old_shape, keep)
        for key, value in state.items()
        if _is_cut(value, param)
    }
    for key, value in cut_state.items():
        power = _power_of_gradient(key, state)
        if scale is not None and inverse is not None and power and _spans(value, inverse):
            value = value * (scale if power < 0 else inverse**power)
        state[key] = value.to(state[key].dtype)
    grad = param.grad
    new = _cut("the parameter", param.data, old_shape, keep)
    set_data_(param, new if scale is None else (new * scale).to(new.dtype))
    if grad is not None:
        grad = _cut("the gradient", grad, old_shape, keep)
        param.grad = grad if inverse is None else (grad * inverse).to(grad.dtype)
    pack_state_(optimizer, param)


def _power_of_gradient(key: str, state: Mapping[str, object]) -> int:
    """Return 1 for state measured like a gradient, 2 like its square, -1 like the parameter."""
    if key == "momentum_buffer" and "square_avg" in state:
        return 0  # RMSprop's momentum sums steps, already divided by the size of the gradient
    return 2 * (key in _GOES_WITH_SQUARE) + (key in _GOES_WITH_GRADIENT) - (key in AVERAGES)


def _spans(value: Tensor, scale: Tensor) -> bool:
    """Return whether the scale fits: a factored moment lacks the dimension of some scales."""
    return torch.broadcast_shapes(value.shape, scale.shape) == value.shape


def follows(tensor: Tensor, shape: torch.Size) -> bool:
    """Return whether a tensor has the dimensions of a parameter, some of them of size one."""
    return tensor.dim() == len(shape) and all(
        mine in (1, theirs) for mine, theirs in zip(tensor.shape, shape, strict=True)
    )


def check_state(params: Iterable[Tensor], optimizer: Optimizer | None) -> None:
    """Raise ``ValueError`` for parameters whose state :func:`slice_state_` could not cut.

    State that an optimizer packs in a way of its own is not looked at.
    """
    if optimizer is None or packs_state(optimizer):
        return
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if _is_cut(value, param):
                _check_follows(_named(key, optimizer), value, param.shape)


def _is_cut(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and (value.numel() > 1 or value.dim() == param.dim())


def _named(key: str, optimizer: Optimizer | None) -> str:
    return f"state {key!r} of {type(optimizer).__name__}"


def _check_follows(what: str, tensor: Tensor, shape: torch.Size) -> None:
    if not follows(tensor, shape):
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, which does not follow the parameter's "
            f"shape {tuple(shape)}: it cannot be cut along with it"
        )


def _cut(what: str, tensor: Tensor, old_shape: torch.Size, keep: Mapping[int, Tensor]) -> Tensor:
    """Select along every kept dimension in which the tensor has the parameter's size."""
    _check_follows(what, tensor, old_shape)
    for dim, indices in keep.items():
        if tensor.shape[dim] == old_shape[dim]:
            tensor = tensor.index_select(dim, indices)
    return tensor.contiguous()


@torch.no_grad()
def reset_state_(param: Tensor, optimizer: Optimizer | None = None) -> None:
    """Start a parameter anew: its gradient goes, its state becomes what it began with, in place.

    That is zero but for four of torch's optimizers; numbers of steps begin with zero too, by which
    averages are corrected.
    """
    param.grad = None
    unpack_state_(optimizer, param)
    state = {} if optimizer is None else optimizer.state.get(param, {})
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.fill_(_beginning(key, param, optimizer))
        elif key == "step":
            state[key] = 0
    pack_state_(optimizer, param)


def _beginning(key: str, param: Tensor, optimizer: Any) -> Any:
    """Return what state begins with."""
    if key not in ("step_size", "eta", "mu", "mu_product", "sum"):
        return 0
    group = group_of(optimizer, param)
    if key in ("step_size", "eta"):  # Rprop's, ASGD's
        return group["lr"]
    return group.get("initial_accumulator_value", 0) if key == "sum" else 1


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
