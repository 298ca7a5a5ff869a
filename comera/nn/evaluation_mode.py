"""Run a model, for a while, in evaluation mode or with every layer called as a module."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards each of its modules is as it was."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Switch off the fast path of ``nn.TransformerEncoder``; afterwards it is as it was.

    In evaluation mode without gradients it reads the weights of the layers and calls none of them,
    and where padding is masked it hands on nested tensors, whose rows hooks cannot read, and gives
    zeros for the padding.
    """
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
