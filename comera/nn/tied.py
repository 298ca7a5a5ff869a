"""An output layer that works on the cores of the embedding it is tied to."""

import torch
from torch import Tensor, nn

from comera.nn.table import TTTable


class TiedTTLinear(nn.Module):
    """``x @ table.T + bias``, the table being that of a tensor-train embedding.

    The table is formed anew in each forward pass: for an output layer, which needs all of its
    rows, that is cheaper than contracting the batch with the cores.

    Args:
        embedding: The module that owns the cores.
        bias: A parameter of width ``num_embeddings``, or None.

    Shapes:
        input ``(*, embedding_dim)``, output ``(*, num_embeddings)``.
    """

    __constants__ = ("in_features", "out_features")

    def __init__(self, embedding: TTTable, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features = embedding.embedding_dim
        self.out_features = embedding.num_embeddings
        self.embedding = embedding
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The dense ``(out_features, in_features)`` weight, which is the embedding's."""
        return self.embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)

    @torch.no_grad()
    def to_dense(self, weight: nn.Parameter) -> nn.Linear:
        """The :class:`torch.nn.Linear` this layer stands for, tied to the given dense table."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        dense.weight = weight
        dense.register_parameter("bias", self.bias)
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
