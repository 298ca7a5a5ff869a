"""Replace, count and check parameters."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera.extras import listed


class Undisturbed:
    """Check that tensors by name are not written to; writes through ``.data`` go unnoticed."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._versions = {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not tensor.is_inference()
        }

    def check(self) -> None:
        """Raise RuntimeError with the names of tensors that were written to meanwhile."""
        written = [name for name, (tensor, at) in self._versions.items() if tensor._version > at]
        if written:
            raise RuntimeError(
                f"written to while the model was being saved: {listed(written)}. That would save a "
                "mixture of before and after; save between two steps, or save a copy that was made "
                "between them: copy.deepcopy(model)"
            )


class ModelSize(NamedTuple):
    """Parameters of a model, shared ones counted once, and their bytes."""

    params: int
    bytes: int


def model_size(model: nn.Module) -> ModelSize:
    """Count the parameters of a model, on any device, ``meta`` too."""
    params = list(model.parameters())
    return ModelSize(sum(param.numel() for param in params), sum(param.nbytes for param in params))


def checksum(tensor: Tensor, start: int = 0) -> int:
    """Return a checksum of a tensor's bytes, continued from ``start``."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return zlib.crc32(data, start)
