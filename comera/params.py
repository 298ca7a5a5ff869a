"""What a parameter is: given other contents while it stays the same object, whole or sharded."""

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


def is_sharded(param: Tensor) -> bool:
    """Tell whether a parameter is a DTensor, as ``torch.distributed.fsdp.fully_shard`` makes it."""
    if type(param) is torch.nn.Parameter:
        return False
    # By name: the class need not be imported to be asked for.
    return any(cls.__name__ == "DTensor" for cls in type(param).__mro__)
