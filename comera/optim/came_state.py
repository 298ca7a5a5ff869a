"""The state that CAME keeps of a parameter: laid out, stacked for a step, cut and loaded.

Shapes: b = parameters stacked, n = entries of one of them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from comera.optim import factored_moments
from comera.optim.factored_moments import matrix_view, means, product

State = dict[str, Tensor]

FACTORS = ("exp_avg_sq_factors", "exp_avg_res_factors")
_FULL = ("exp_avg_sq", "exp_avg_res")
"""Names of the same means while they are laid out in full."""

_STACKED = {"cpu": (1 << 16, 1 << 18)}
"""Equal tensors up to so many entries are updated together, up to so many in all: where copying
them next to each other costs less than calling each operation once more."""
_DEFAULT_STACKED = (1 << 20, 1 << 24)


def empty_state(param: Tensor, state_dtype: str | None) -> State:
    """Return the state before the first step, all zero and without ``step``."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    state = _empty_average(param, state_dtype)
    view = matrix_view(param.shape)
    if view is None:
        state["exp_avg_sq"] = _zeros(param, dtype)
    else:
        for key in FACTORS:
            state[key] = param.new_zeros(sum(view), dtype=dtype)
    return state


def parts(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split equal parameters into lists, each small enough for stacking it to pay."""
    size = params[0].numel()
    small, together = _STACKED.get(params[0].device.type, _DEFAULT_STACKED)
    count = max(1, together // size) if size <= small else 1
    for start in range(0, len(params), count):
        yield params[start : start + count]


def every(states: Sequence[State], key: str) -> list[Tensor]:
    return [state[key] for state in states]


def stack(tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Stack tensors of equal shape to one of ``shape``: a single one's memory, else a copy."""
    if len(tensors) == 1:
        return tensors[0].detach().reshape(shape)
    return torch.stack([tensor.detach() for tensor in tensors]).view(shape)


def write(tensors: list[Tensor], stacked: Tensor) -> None:
    """Store what :func:`stack` returned and a step has changed."""
    if len(tensors) > 1:
        torch._foreach_copy_(tensors, stacked.view(len(tensors), *tensors[0].shape).unbind())
    elif not tensors[0].is_contiguous():  # otherwise it was changed in place
        tensors[0].copy_(stacked.view(tensors[0].shape))


def read_average(states: Sequence[State], shape: Sequence[int]) -> Tensor:
    """Read the first moments as one tensor of ``shape``, out of eight bits if they are in them."""
    if "exp_avg_update_scale" not in states[0]:
        return stack(every(states, "exp_avg_update"), shape)
    codes = stack(every(states, "exp_avg_update"), (len(states), -1))
    scales = stack(every(states, "exp_avg_update_scale"), (len(states), -1))
    return factored_moments.unpack(codes, scales).view(shape)


def write_average(states: Sequence[State], average: Tensor) -> None:
    """Store what :func:`read_average` returned and a step has changed."""
    held = every(states, "exp_avg_update")
    if "exp_avg_update_scale" not in states[0]:
        write(held, average)
        return
    codes, scales = factored_moments.pack(average.reshape(len(states), -1))
    torch._foreach_copy_(held, codes.reshape(len(states), *held[0].shape).unbind())
    torch._foreach_copy_(every(states, "exp_avg_update_scale"), scales.unbind())


def loaded(state: State, param: Tensor) -> State:
    """Copy a saved state on the parameter's device, in the types in which it was saved."""
    full = state.get("exp_avg_update")
    if full is None or full.shape != param.shape:
        found = (
            f"keys {sorted(state)}" if full is None else f"a moment of shape {tuple(full.shape)}"
        )
        raise ValueError(
            f"the state to load for a parameter of shape {tuple(param.shape)} has {found}: it "
            "comes from another optimizer, or from a model of other ranks"
        )
    return {
        key: value.to(param.device, copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def unpack(state: State, param: Tensor) -> None:
    """Lay the state out in tensors of the parameter's shape; factors become what they stand for."""
    if "exp_avg_update_scale" in state:
        state["exp_avg_update"] = read_average([state], (1, param.numel())).view(param.shape)
        del state["exp_avg_update_scale"]
    view = matrix_view(param.shape)
    if view is not None:
        for key, full in zip(FACTORS, _FULL, strict=True):
            state[full] = product(state.pop(key).unsqueeze(0), view[0]).view(param.shape)


def pack(state: State, param: Tensor, state_dtype: str | None) -> None:
    """Undo :func:`unpack` for the shape that the parameter has now."""
    average = state["exp_avg_update"]
    state |= _empty_average(param, state_dtype)
    if "exp_avg_update_scale" in state:
        write_average([state], average.view(1, -1))
    else:
        state["exp_avg_update"] = average
    view = matrix_view(param.shape)
    if view is None:
        state.pop("exp_avg_res", None)
        return
    for key, full in zip(FACTORS, _FULL, strict=True):
        state[key] = means(state.pop(full).view(1, *view))[0]


def _empty_average(param: Tensor, state_dtype: str | None) -> State:
    if (
        state_dtype is None
        or param.numel() < factored_moments.SMALLEST
        or param.dtype == torch.float64
    ):
        return {"exp_avg_update": _zeros(param, torch.promote_types(param.dtype, torch.float32))}
    blocks = -(-param.numel() // factored_moments.BLOCK)
    return {
        "exp_avg_update": _zeros(param, torch.int8),
        "exp_avg_update_scale": param.new_zeros(blocks, dtype=torch.float32),
    }


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
