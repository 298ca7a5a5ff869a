"""The optimizer that holds the state of parameters, to change it along with them."""

import torch
from torch.optim import Optimizer

from comera.optim.in_backward import OptimizerInBackward


def inner_optimizer(
    optimizer: Optimizer | OptimizerInBackward | None,
) -> Optimizer | None:
    """The optimizer inside of per-layer updates, once it is sure that each parameter has its state.

    Raises:
        ValueError: If it keeps one history of all parameters together.
    """
    if isinstance(optimizer, OptimizerInBackward):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, torch.optim.LBFGS) and any(optimizer.state.values()):
        raise ValueError(
            "LBFGS has one history of all parameters together, which cannot be changed along with "
            "some of them: leave the optimizer out, and make a new one afterwards"
        )
    return optimizer
