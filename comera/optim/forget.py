"""Let an optimizer forget what it has gathered about a parameter."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.optim.layout import pack_state_, unpack_state_


@torch.no_grad()
def forget_(param: Tensor, optimizer: Optimizer | None = None) -> None:
    """Start a parameter anew: its gradient goes, its state becomes zero where it lies.

    All of the optimizers here and nearly all of torch's begin with zeros; numbers of steps begin
    with zero too, by which averages are corrected.
    """
    param.grad = None
    unpack_state_(optimizer, param)
    state = {} if optimizer is None else optimizer.state.get(param, {})
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.zero_()
        elif key == "step":
            state[key] = 0
    pack_state_(optimizer, param)
