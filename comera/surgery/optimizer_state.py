"""Keep an optimizer going when a parameter loses some of its rows, in any dimension.

The parameter stays the same object, so that parameter groups, averages and wrappers still hold
it; its gradient and its state are cut the same way and go on where they were.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.optim.state_layout import group_of, pack_state_, packs_state, unpack_state_
from comera.params import set_data_

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
    """Keep some rows of a parameter, of its gradient and of its optimizer state, in place.

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
    """Tell whether the scale fits: a factored moment lacks the dimension of some scales."""
    return torch.broadcast_shapes(value.shape, scale.shape) == value.shape


def follows(tensor: Tensor, shape: torch.Size) -> bool:
    """Tell whether a tensor has the dimensions of a parameter, some of them of size one."""
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
