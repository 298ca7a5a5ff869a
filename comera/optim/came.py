"""CAME: Adam-like training with half of Adam's state, or an eighth in eight bits.

Confidence-guided Adaptive Memory Efficient Optimization, Luo et al., ACL 2023, arXiv 2307.02047,
after the authors' package came-pytorch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.optim import came_state
from comera.optim.came_state import every, stack, write
from comera.optim.exact_state import loading_exactly
from comera.optim.factored_moments import (
    Corrections,
    Settings,
    factored_step_,
    matrix_view,
    plain_step_,
)
from comera.optim.group_keys import COMMON_KEYS, made_for
from comera.optim.state_layout import group_of


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
                state.update(came_state.empty_state(param, group["state_dtype"]))
            held = "step" in state, "exp_avg_update_scale" in state
            kind = (*held, param.shape, param.dtype, param.device, param.grad.dtype)
            kinds.setdefault(kind, []).append(param)
        return [part for params in kinds.values() for part in came_state.parts(params)]

    def _update(self, params: list[Tensor], settings: Settings, corrected: bool) -> None:
        """Take one step for parameters of equal shape, in the same calls."""
        states = [self.state[param] for param in params]
        view = matrix_view(params[0].shape)
        shape = (len(params), *(view or (params[0].numel(),)))
        param = stack(params, shape)
        grad = stack([p.grad for p in params if p.grad is not None], shape)
        average = came_state.read_average(states, shape)
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
            square, residual = (stack(every(states, key), flat) for key in came_state.FACTORS)
            factored_step_(param, grad, average, square, residual, settings, corrections)
            means = dict(zip(came_state.FACTORS, (square, residual), strict=True))
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
        came_state.write_average(states, average)
        write(params, param)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, bit for bit; the settings of the groups come with it.

        Raises:
            ValueError: If the groups differ in number or size, or a moment does not have the
                shape of its parameter. Nothing has been loaded then.
        """
        with loading_exactly(self, came_state.loaded):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def unpack_state_(self, param: Tensor) -> None:
        """Lay a parameter's state out in tensors of its shape, for who cuts them with it.

        Until :meth:`pack_state_` the optimizer cannot step. Factors become the matrix they stand
        for: ``exp_avg_sq``, and ``exp_avg_res``.
        """
        state = self.state.get(param)
        if state:
            came_state.unpack(state, param)

    @torch.no_grad()
    def pack_state_(self, param: Tensor) -> None:
        """Undo :meth:`unpack_state_` for the shape that the parameter has now.

        Second moments are the same as before for all entries that are left, as long as the tensor
        is split between the same dimensions, and the nearest in row and column means otherwise.
        """
        state = self.state.get(param)
        if state:
            came_state.pack(state, param, group_of(self, param)["state_dtype"])


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
