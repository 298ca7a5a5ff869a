"""Give a parameter other contents while it stays the same object."""

import torch
from torch import Tensor


@torch.no_grad()
def set_data_(param: Tensor, new: Tensor) -> None:
    """Replace a parameter's data, of any shape, and drop its gradient.

    A graph that is still alive, such as a loss that somebody keeps, holds on to the parameter's
    gradient accumulator, which remembers the old shape; torch makes a new one only when the type
    changes. So the type is changed for a moment.
    """
    param.grad = None
    other = torch.float64 if new.dtype != torch.float64 else torch.float32
    param.data = torch.empty(0, dtype=other, device=new.device)
    param.data = new
