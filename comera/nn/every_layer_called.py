"""Have transformer layers of torch's call the layers inside them for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
