"""Cut pruned ranks out of a model for good, with the optimizer's state and DDP wrappers."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.nn.module import TensorTrainModule, check_unsharded, is_open, tensor_trains
from comera.optim import state_layout
from comera.params import renew_wrappers_, set_data_
from comera.shapes import check_min_rank

log = logging.getLogger("comera")

FIRST_MOMENTS = {"exp_avg", "exp_avg_update", "momentum_buffer", "grad_avg", "prev"}
"""State that gives the direction of a step; all other state gives its length."""

AVERAGES = {"ax", "z"}
"""State in the units of the parameter itself (ASGD, schedule-free optimizers)."""

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

    The parameter becomes ``param[keep] * scale``, and stays the same object; ``keep`` are indices
    by dimension, int64 on its device. A gradient is divided by the scale, a second moment by its
    square, and an average of the parameter multiplied; where the scale is zero they become zero.
    Raises ``ValueError`` if a state tensor cannot be matched to the parameter.
    """
    old_shape = param.shape
    factors: dict[int, Tensor] = {}  # by the power of the gradient in a tensor
    if scale is not None:
        inverse = torch.where(scale == 0, 0, 1 / scale)
        factors = {-1: scale, 1: inverse, 2: inverse**2}
    # Some state has the parameter's dimensions only once it is unpacked, such as eight-bit moments.
    state_layout.unpack_state_(optimizer, param)
    state = {} if optimizer is None else optimizer.state.get(param, {})
    # All is cut before anything is assigned: what cannot be matched raises with nothing changed.
    cut_state = {
        key: _cut(_named(key, optimizer), value, old_shape, keep)
        for key, value in state.items()
        if _is_cut(value, param)
    }
    for key, value in cut_state.items():
        factor = factors.get(_power_of_gradient(key, state))
        # A factored moment lacks the dimension of some scales.
        if factor is not None and torch.broadcast_shapes(value.shape, factor.shape) == value.shape:
            value = value * factor
        state[key] = value.to(state[key].dtype)
    grad = param.grad
    new = _cut("the parameter", param.data, old_shape, keep)
    set_data_(param, new if scale is None else (new * scale).to(new.dtype))
    if grad is not None:
        grad = _cut("the gradient", grad, old_shape, keep)
        param.grad = (grad * factors[1]).to(grad.dtype) if factors else grad
    state_layout.pack_state_(optimizer, param)


def _power_of_gradient(key: str, state: Mapping[str, object]) -> int:
    """Return the power of the gradient that state scales with, 0 to 2; -1 for averaged weights."""
    if key == "momentum_buffer" and "square_avg" in state:
        return 0  # RMSprop's momentum sums steps, already divided by the size of the gradient
    return 2 * (key in _GOES_WITH_SQUARE) + (key in _GOES_WITH_GRADIENT) - (key in AVERAGES)


def follows(tensor: Tensor, shape: torch.Size) -> bool:
    """Return whether a tensor has the shape of a parameter, up to dimensions of size one."""
    return tensor.dim() == len(shape) and all(
        mine in (1, theirs) for mine, theirs in zip(tensor.shape, shape, strict=True)
    )


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
    """Cut a tensor to the indices in ``keep``, in dimensions of the parameter's old size."""
    _check_follows(what, tensor, old_shape)
    for dim, indices in keep.items():
        if tensor.shape[dim] == old_shape[dim]:
            tensor = tensor.index_select(dim, indices)
    return tensor.contiguous()


@torch.no_grad()
def reset_state_(param: Tensor, optimizer: Optimizer | None = None) -> None:
    """Drop a parameter's gradient, and set its optimizer state to initial values, in place."""
    param.grad = None
    if optimizer is None:
        return
    state_layout.unpack_state_(optimizer, param)
    state = optimizer.state.get(param, {})
    for key, value in state.items():
        if key == "step" and not isinstance(value, Tensor):
            state[key] = 0
        elif key in AVERAGES:
            value.copy_(param)
        elif isinstance(value, Tensor):
            first = 0
            if key in ("step_size", "eta"):  # Rprop's, ASGD's
                first = state_layout.group_of(optimizer, param)["lr"]
            elif key in ("mu", "mu_product"):
                first = 1
            elif key == "sum":  # Adagrad's
                first = state_layout.group_of(optimizer, param).get("initial_accumulator_value", 0)
            value.fill_(first)
    state_layout.pack_state_(optimizer, param)


@torch.no_grad()
def truncate_(
    model: nn.Module,
    optimizer: state_layout.AnyOptimizer | None = None,
    *,
    min_rank: int = 1,
    absorb: bool = True,
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut pruned ranks out of the cores, in place; the function of the model does not change.

    Parameters stay the same objects. Their gradients and the optimizer's state are cut with them,
    so training goes on; averages of weights, as of ``AveragedModel``, must be made again. A
    ``DistributedDataParallel`` is renewed for the new shapes; all its processes make the same cut.

    Args:
        model: The model with the tensor-train layers.
        optimizer: The optimizer whose state is cut too.
        min_rank: If all ranks of a bond are pruned, 1 keeps the largest, at zero; 0 cuts all ranks
            of the layer, of which only the bias is left.
        absorb: Multiply the gates into the cores and set the gates to one. False keeps the gates.

    Returns:
        Ranks before and after, by name of the layer.

    Raises:
        ValueError: If ``min_rank`` is neither 0 nor 1, the optimizer is an LBFGS that has stepped,
            its state has other shapes than the parameters, a tensor train is sharded, as by
            ``fully_shard``, or a layer is not finite. Nothing is changed.
    """
    check_min_rank(min_rank)
    check_unsharded(model, "truncate_", written=True)
    trains = tensor_trains(model)
    check_finite(trains)
    unwrapped = check_can_be_cut(trains, optimizer)
    if unwrapped is not None:
        held = {id(param) for group in unwrapped.param_groups for param in group["params"]}
        training = [param for param in _cores_and_gates(trains) if param.requires_grad]
        if without := sum(id(param) not in held for param in training):
            log.warning(
                "the optimizer holds %d of %d cores and gates: if another one has stepped with the "
                "rest, make it anew after this cut, since its state keeps the shapes of before",
                len(training) - without, len(training),
            )  # fmt: skip
    changed = {}
    for name, layer in trains.items():
        before = layer.ranks
        if 0 not in before:  # else it has vanished already
            _truncate_layer(layer, unwrapped, min_rank, absorb)
        changed[name] = (before, layer.ranks)
    if any(before != after for before, after in changed.values()):
        renew_wrappers_(trains.values())
    return changed


@torch.no_grad()
def kept_ranks(layer: TensorTrainModule, min_rank: int) -> list[Tensor]:
    """Return the ranks that :func:`truncate_` keeps of each bond; none if the layer vanishes."""
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
    keeps = kept_ranks(layer, min_rank)
    gates = list(layer.gates)
    open_gates = [torch.where(is_open(gate, layer.prune_below), gate, 0) for gate in gates]
    for k, core in enumerate(layer.cores):
        keep = {0: keeps[k - 1]} if k else {}
        scale = None
        if k < len(keeps):  # a gate is behind its core: it goes into the last dimension
            keep[core.dim() - 1] = keeps[k]
            scale = open_gates[k][keeps[k]].to(core.dtype) if absorb else None
        slice_state_(core, keep, scale, optimizer)
    for gate, value, kept in zip(gates, open_gates, keeps, strict=True):
        # Divided by what its core was multiplied by: it becomes one, and its moments fit that.
        inverse = torch.where(value == 0, 1, 1 / value)[kept] if absorb else None
        slice_state_(gate, {0: kept}, inverse, optimizer)
        if absorb:
            gate.fill_(1)


def check_can_be_cut(
    named: Mapping[str, TensorTrainModule], optimizer: state_layout.AnyOptimizer | None
) -> Optimizer | None:
    """Return the optimizer that holds the state of layers.

    Raises ``ValueError`` if the state cannot be cut with the ranks. State that an optimizer packs
    in its own way is not checked.
    """
    unwrapped = state_layout.unwrap_separable(optimizer)
    if unwrapped is None:
        return None
    inner = getattr(unwrapped, "inner", unwrapped)  # GaLore's, in whose way it keeps the state
    packs = hasattr(inner, "unpack_state_") or hasattr(inner, "_new_buffer")
    for param in _cores_and_gates(named):
        if param in getattr(unwrapped, "stand_ins", ()):
            raise ValueError(
                f"{type(unwrapped).__name__} projects a core of shape {tuple(param.shape)}. It "
                "cannot be cut: give cores in a group without rank, by comera.galore_param_groups"
            )
        for key, value in unwrapped.state.get(param, {}).items():
            if _is_cut(value, param) and not packs:
                _check_follows(_named(key, unwrapped), value, param.shape)
    return unwrapped


def _cores_and_gates(named: Mapping[str, TensorTrainModule]) -> list[Tensor]:
    return [param for layer in named.values() for param in (*layer.cores, *layer.gates)]


def check_finite(named: Mapping[str, TensorTrainModule]) -> None:
    """Raise ``ValueError`` for layers with non-finite values: a NaN gate would seem pruned."""
    for name, layer in named.items():
        for what, params in (("cores", layer.cores), ("gates", layer.gates)):
            if not all(bool(param.isfinite().all()) for param in params):
                raise not_finite(name, what)


def not_finite(name: str, what: str) -> ValueError:
    return ValueError(
        f"the {what} of {name or 'the layer'} hold numbers that are not finite: there is no "
        "telling its ranks apart. Go back to a checkpoint from before"
    )
