"""Step one parameter by an optimizer that has many, if its groups are settings and no more."""

from collections.abc import Callable, Container
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
    check_keeps_no_count(optimizer, group, alone, "call its step() after backward")


def check_keeps_no_count(
    optimizer: Optimizer,
    before: dict[str, Any],
    after: dict[str, Any],
    instead: str,
    but: Container[str] = (),
) -> None:
    """Raise ``TypeError`` if a step has changed settings of a group: it keeps count there.

    Args:
        optimizer: Whose step it was.
        before: The group before the step.
        after: The group after it.
        instead: The advice that ends the error: what the user can do instead.
        but: Settings that others may change.
    """
    written = [
        key
        for key, value in after.items()
        if key != "params" and key not in but and value is not before.get(key)
    ]
    if written:
        raise TypeError(
            f"{type(optimizer).__name__} changes {', '.join(map(repr, written))} of its parameter "
            "groups in every step, which is a sum over all parameters and cannot be had from "
            f"one, nor from a subspace: {instead}"
        )


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return a class's step without what torch wraps around it: hooks and a profiler's record."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
