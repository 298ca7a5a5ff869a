"""Step one parameter by an optimizer that has many."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def step_param(optimizer: Optimizer, param: Tensor, position: int) -> None:
    """Step one parameter as ``optimizer.step()`` steps all, at a cost that does not grow with them.

    Hooks on the optimizer's step do not run. An optimizer that has more than parameter groups to
    go through offers ``step_param_(param, position)``.

    Args:
        optimizer: Steps each parameter by its own gradient and state.
        param: The parameter to step, with its gradient.
        position: Place of its group among the optimizer's.

    Raises:
        TypeError: If the optimizer keeps count in its groups: it would count every parameter.
    """
    own = getattr(optimizer, "step_param_", None)
    if own is not None:
        own(param, position)
        return
    groups = optimizer.param_groups
    group = groups[position]
    alone = {**group, "params": [param]}
    optimizer.param_groups = [alone]
    try:
        plain_step(type(optimizer))(optimizer)
    finally:
        optimizer.param_groups = groups
    written = [k for k, v in alone.items() if k != "params" and v is not group.get(k)]
    if written:
        raise TypeError(
            f"{type(optimizer).__name__} changes {', '.join(map(repr, written))} of its parameter "
            "groups in every step, which is a sum over all parameters and cannot be had from one: "
            "call its step() after backward"
        )


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return a class's step without what torch wraps around it: hooks and a profiler's record."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
