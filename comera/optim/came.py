"""CAME: Adam-like training with half of Adam's state, or an eighth in eight bits.

Confidence-guided Adaptive Memory Efficient Optimization, Luo et al., ACL 2023, arXiv 2307.02047,
after the authors' package came-pytorch.

The state that CAME keeps of a parameter: laid out, stacked for a step, cut and loaded.

Shapes: b = parameters stacked, n = entries of one of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.optim import factored_moments
from comera.optim.factored_moments import (
    Corrections,
    Settings,
    factored_step_,
    matrix_view,
    means,
    plain_step_,
    product,
)
from comera.optim.state_layout import COMMON_KEYS, group_of, loading_exactly, made_for

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


class CAME(Optimizer):
    """Adam-like steps from a first moment in full and second moments as row and column means.

    With g the gradient, one step is ``u = g / sqrt(mean of g^2)``, clipped to a root mean square
    of ``clip_threshold``; ``m = mean of u``; ``p -= lr * m / sqrt(mean of (u - m)^2)``, where the
    two means under roots are factored. As in came-pytorch no mean is corrected for its start at
    zero: the first steps are up to 11 times ``lr`` in size and shrink as ``(u - m)^2`` fills up,
    over ten thousand steps; for shorter runs see ``bias_correction``.
    Tensors that are not factored step by ``lr * m``. Learning rates of 0.5 to 0.9 times AdamW's
    are recommended by the authors.

    Deliberately unlike came-pytorch: tensors of three and more dimensions, such as cores and
    convolution kernels, are factored as the most balanced matrix instead of over their last two
    dimensions, whose factors can be as large as the tensor; matrices too small or narrow to gain by
    factors are not factored; a first gradient that is all zero leaves the state empty, as
    ``torch.distributed.checkpoint`` needs; moments of low-precision parameters survive loading.

    State of a parameter, all tensors: ``step`` float32 ``()``; ``exp_avg_update`` (m), shaped like
    the parameter; and either ``exp_avg_sq``, shaped like it, or ``exp_avg_sq_factors`` and
    ``exp_avg_res_factors``, the row means followed by the column means. It is float32, or float64
    for float64 parameters. In eight bits ``exp_avg_update`` is int8 and ``exp_avg_update_scale``
    has one float32 for each 256 entries.

    bfloat16 and float16 parameters are updated in float32 and rounded once, to nearest: a change
    below half of the last bit of an entry, 1/512 of it in bfloat16, is lost.

    Nothing is read back from the device, so a step can be captured in a CUDA graph; parameters
    of equal shape are updated in the same calls.

    Args:
        params: Parameters, named parameters, or groups of them as for any torch optimizer.
        lr: Learning rate, a float or a tensor of one entry.
        betas: Decay rates of the means of u, of g^2 and of (u - m)^2, each in [0, 1).
        eps: Added to g^2 and to (u - m)^2.
        clip_threshold: Largest root mean square of u over one parameter.
        weight_decay: Decoupled: the parameter shrinks by ``lr * weight_decay`` of itself.
        state_dtype: ``"8bit"`` keeps m in int8 for tensors of at least 4096 entries, and unpacks
            one tensor, or a few small ones, at a time; None keeps it in full.
        bias_correction: Correct all three means for their start at zero, as Adam does, so that a
            step has the size of ``lr`` from the first to the last.
        maximize: Climb instead of descending.
        capturable: Accepted for likeness with torch's optimizers; every step can be captured.
            For a graph that follows a schedule, give ``lr`` as a tensor on the device.

    Raises:
        ValueError: If a setting is out of range.
        TypeError: If a group has a key that does not exist.
    """

    needs_whole_matrices = "stacks whole matrices of equal shape"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        state_dtype: Literal["8bit"] | None = None,
        bias_correction: bool = False,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
            "state_dtype": state_dtype,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "capturable": capturable,
        }
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; see :class:`torch.optim.Optimizer`.

        Raises:
            TypeError: If the group has a key that does not exist.
            ValueError: If a setting is out of range.
        """
        unknown = sorted(set(param_group) - set(self.defaults) - COMMON_KEYS)
        if unknown:
            raise TypeError(
                f"CAME has no setting {', '.join(map(repr, unknown))}; a parameter group can have "
                f"{', '.join(self.defaults)}{made_for(unknown)}"
            )
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: If a gradient is sparse or complex. No parameter of its group has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = Settings(
                lr=lr.reshape(()) if isinstance(lr := group["lr"], Tensor) else lr,
                betas=tuple(group["betas"]),
                eps=tuple(group["eps"]),
                clip_threshold=group["clip_threshold"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
            )
            for alike in self._alike(group):
                self._update(alike, settings, group["bias_correction"])
        return loss

    def _alike(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Group parameters with a gradient that can be updated together; make their state."""
        kinds: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            _check_gradient(param)
            if param.numel() == 0:
                continue
            state = self.state[param]
            if not state:
                state.update(empty_state(param, group["state_dtype"]))
            held = "step" in state, "exp_avg_update_scale" in state
            kind = (*held, param.shape, param.dtype, param.device, param.grad.dtype)
            kinds.setdefault(kind, []).append(param)
        return [part for params in kinds.values() for part in parts(params)]

    def _update(self, params: list[Tensor], settings: Settings, corrected: bool) -> None:
        """Take one step for parameters of equal shape, in the same calls."""
        states = [self.state[param] for param in params]
        view = matrix_view(params[0].shape)
        shape = (len(params), *(view or (params[0].numel(),)))
        param = stack(params, shape)
        grad = stack([p.grad for p in params if p.grad is not None], shape)
        average = read_average(states, shape)
        corrections = None
        if corrected:
            # The number of this step: a parameter has no count before its first one.
            steps = torch.stack([state.get("step", param.new_zeros(())) for state in states]) + 1
            corrections = Corrections.at(steps.to(average.dtype), settings.betas)
        if view is None:
            square = stack(every(states, "exp_avg_sq"), shape)
            plain_step_(param, grad, average, square, settings, corrections)
            means = {"exp_avg_sq": square}
        else:
            flat = (len(params), sum(view))
            square, residual = (stack(every(states, key), flat) for key in FACTORS)
            factored_step_(param, grad, average, square, residual, settings, corrections)
            means = dict(zip(FACTORS, (square, residual), strict=True))
        if "step" in states[0]:
            torch._foreach_add_(every(states, "step"), 1.0)
        else:
            # A parameter whose first gradient is all zero stays without state: that is how
            # torch.distributed.checkpoint asks for it to be laid out before it loads.
            live = grad.flatten(1).any(1).to(torch.float32)
            for mean in means.values():
                mean.mul_(live.to(mean.dtype).unsqueeze(1))
            for state, count in zip(states, live.unbind(), strict=True):
                state["step"] = count.clone()
        for key, mean in means.items():
            write(every(states, key), mean)
        write_average(states, average)
        write(params, param)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, bit for bit; the settings of the groups come with it.

        Raises:
            ValueError: If the groups differ in number or size, or a moment does not have the
                shape of its parameter. Nothing has been loaded then.
        """
        with loading_exactly(self, loaded):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def unpack_state_(self, param: Tensor) -> None:
        """Lay a parameter's state out in tensors of its shape, for who cuts them with it.

        Until :meth:`pack_state_` the optimizer cannot step. Factors become the matrix they stand
        for: ``exp_avg_sq``, and ``exp_avg_res``.
        """
        state = self.state.get(param)
        if state:
            unpack(state, param)

    @torch.no_grad()
    def pack_state_(self, param: Tensor) -> None:
        """Undo :meth:`unpack_state_` for the shape that the parameter has now.

        Second moments are the same as before for all entries that are left, as long as the tensor
        is split between the same dimensions, and the nearest in row and column means otherwise.
        """
        state = self.state.get(param)
        if state:
            pack(state, param, group_of(self, param)["state_dtype"])


def _check(group: dict[str, Any]) -> None:
    """Raise for a setting out of range, in the words of the user."""
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}; a tensor lr must have one entry")
    elif not lr >= 0:
        raise ValueError(f"lr={lr} must be at least 0")
    if not _all(betas, 3, lambda beta: 0 <= beta < 1):
        raise ValueError(
            f"betas={betas} must be three decay rates in [0, 1): of the updates, of the squared "
            "gradients and of the confidence"
        )
    if not _all(eps, 2, lambda value: value > 0):
        raise ValueError(
            f"eps={eps} must be two numbers above 0: for squared gradients and for the confidence"
        )
    if not group["clip_threshold"] > 0:
        raise ValueError(f"clip_threshold={group['clip_threshold']} must be above 0")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay={group['weight_decay']} must be at least 0")
    if group["state_dtype"] not in (None, "8bit"):
        raise ValueError(f'state_dtype={group["state_dtype"]!r} must be None or "8bit"')


def _all(values: Any, count: int, fits: Callable[[float], bool]) -> bool:
    return isinstance(values, Sequence) and len(values) == count and all(map(fits, values))


def _check_gradient(param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    kind = "sparse" if grad.layout != torch.strided else "complex" if grad.is_complex() else ""
    if kind:
        remedy = {
            "sparse": "make the embedding with sparse=False",
            "complex": "train its real and imaginary parts (torch.view_as_real)",
        }
        raise RuntimeError(
            f"CAME cannot use the {kind} gradient of a parameter of shape {tuple(param.shape)}: "
            f"{remedy[kind]}, or give it to another optimizer"
        )
