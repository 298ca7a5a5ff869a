"""Replace, count and check the parameters of models."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera.extras import listed


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
