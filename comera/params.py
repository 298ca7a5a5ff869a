"""Replace, count and check the parameters of models."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera.extras import listed


@torch.no_grad()
def set_data_(param: Tensor, new: Tensor) -> None:
    """Replace a parameter's data, of any shape, and drop its gradient.

    The dtype changes for a moment, as torch then makes a new gradient accumulator: the old one,
    which a graph may keep alive, expects the old shape.
    """
    param.grad = None
    other = torch.float64 if new.dtype != torch.float64 else torch.float32
    param.data = torch.empty(0, dtype=other, device=new.device)
    param.data = new


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, as of ``torch.distributed.fsdp.fully_shard``."""
    # By name: the class need not be imported to be asked for.
    return type(param) is not nn.Parameter and any(
        cls.__name__ == "DTensor" for cls in type(param).__mro__
    )


class Undisturbed:
    """Watch named tensors for writes, while a model is saved; writes via ``.data`` go unnoticed."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._versions = {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not tensor.is_inference()
        }

    def check(self) -> None:
        """Raise RuntimeError with the names of tensors that were written to since the start."""
        written = [name for name, (tensor, at) in self._versions.items() if tensor._version > at]
        if written:
            raise RuntimeError(
                f"written to while the model was being saved: {listed(written)}. That would save a "
                "mixture of before and after; save between two steps, or save a copy that was made "
                "between them: copy.deepcopy(model)"
            )


class ModelSize(NamedTuple):
    """Number of parameters of a model and their bytes; shared ones count once."""

    params: int
    bytes: int


def model_size(model: nn.Module) -> ModelSize:
    """Count the parameters of a model on any device, even ``meta``."""
    params = list(model.parameters())
    return ModelSize(sum(param.numel() for param in params), sum(param.nbytes for param in params))


def checksum(tensor: Tensor, start: int = 0) -> int:
    """Return a checksum of a tensor's bytes, continued from ``start``."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return zlib.crc32(data, start)
