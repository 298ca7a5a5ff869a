"""How large a model is."""

from typing import NamedTuple

from torch import nn


class ModelSize(NamedTuple):
    """Parameters of a model, shared ones counted once, and their bytes."""

    params: int
    bytes: int


def model_size(model: nn.Module) -> ModelSize:
    """Count the parameters of a model, on any device, ``meta`` too."""
    params = list(model.parameters())
    return ModelSize(sum(param.numel() for param in params), sum(param.nbytes for param in params))
