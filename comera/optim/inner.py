"""What code outside of this folder may know of an optimizer: where its state is, what it needs.

An optimizer says what is particular about it in class attributes, so that nothing has to import it
to find out:

``needs_whole_matrices``
    Why it cannot step shards of a parameter, as the rest of a sentence that begins with its name.
``not_capturable``
    Why a CUDA graph cannot hold its step, in the same way.
"""

from typing import Protocol

import torch
from torch.optim import Optimizer


class Wrapper(Protocol):
    """What steps parameters by another optimizer, as :class:`~comera.OptimizerInBackward` does."""

    @property
    def optimizer(self) -> Optimizer:
        """The one that holds the state."""
        ...


AnyOptimizer = Optimizer | Wrapper


def unwrap(optimizer: AnyOptimizer) -> Optimizer:
    """Return the optimizer that holds the state of parameters."""
    return optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer


def inner_optimizer(optimizer: AnyOptimizer | None) -> Optimizer | None:
    """Return the optimizer that holds the state, sure that each parameter has its own.

    Raises:
        ValueError: If it keeps one history of all parameters together.
    """
    if optimizer is None:
        return None
    inner = unwrap(optimizer)
    if isinstance(inner, torch.optim.LBFGS) and any(inner.state.values()):
        raise ValueError(
            "LBFGS has one history of all parameters together, which cannot be changed along with "
            "some of them: leave the optimizer out, and make a new one afterwards"
        )
    return inner
