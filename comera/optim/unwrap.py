"""The optimizer that holds the state of parameters, whatever wraps it, and what it needs.

An optimizer says what is particular about it in class attributes, so that nothing has to import it
to find out:

``needs_whole_matrices``
    Why it cannot step shards of a parameter, as the rest of a sentence that begins with its name.
``not_capturable``
    Why a CUDA graph cannot hold its step, in the same way.
"""

import reprlib
from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class Wrapper(Protocol):
    """What steps parameters by another optimizer, as :class:`~comera.OptimizerInBackward` does."""

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer that holds the state."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of that optimizer."""
        ...

    def step(self) -> Any:
        """Step once, as :meth:`torch.optim.Optimizer.step`."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as :meth:`torch.optim.Optimizer.zero_grad`."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as :meth:`torch.optim.Optimizer.load_state_dict`."""
        ...


AnyOptimizer = Optimizer | Wrapper
"""What steps a model: an optimizer, or a wrapper around one."""


def unwrap(optimizer: AnyOptimizer) -> Optimizer:
    """Return the optimizer that holds the state of parameters.

    Some that wrap another one are themselves of torch's class, as that of accelerate.

    Raises:
        TypeError: If there is none.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return unwrap(inner)
    if not isinstance(optimizer, Optimizer):
        shown = optimizer if isinstance(optimizer, type) else reprlib.repr(optimizer)
        raise TypeError(f"{shown} is given where an optimizer is wanted, or what wraps one")
    return optimizer


def unwrap_separable(optimizer: AnyOptimizer | None) -> Optimizer | None:
    """Return the optimizer that holds the state, sure that each parameter has its own.

    Raises:
        ValueError: If it keeps one history of all parameters together.
    """
    if optimizer is None:
        return None
    unwrapped = unwrap(optimizer)
    if isinstance(unwrapped, torch.optim.LBFGS) and any(unwrapped.state.values()):
        raise ValueError(
            "LBFGS has one history of all parameters together, which cannot be changed along with "
            "some of them: leave the optimizer out, and make a new one afterwards"
        )
    return unwrapped
