"""Define an output layer that shares the cores of an embedding."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from comera.nn.dense_weight import WeightByAssignment
from comera.nn.module import dtype_name, dtype_of, linear_of
from comera.nn.table import TTTable


class TableHead(WeightByAssignment):
    """Base of output layers ``x @ table.T + bias`` on the table that the module ``embedding`` owns.

    The input is ``(*, embedding_dim)``, the output ``(*, num_embeddings)``.
    """

    _table_class: ClassVar[type]

    def __init__(self, embedding: Any, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.embedding = embedding
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The embedding's dense weight, ``(out_features, in_features)``; can be assigned."""
        return self.embedding.weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.embedding.weight = value

    def config(self) -> dict[str, Any]:
        """Return the settings from which :meth:`from_config` rebuilds the layer."""
        return {"dtype": None if self.bias is None else dtype_name(self.bias)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None) -> Self:
        """Make a layer on the table ``lead``, a bias being on ``meta``; or raise ``ValueError``."""
        if not isinstance(lead, cls._table_class):
            name = cls._table_class.__name__
            raise ValueError(
                f"it works on the parameters of a {name}, not of {type(lead).__name__}"
            )
        if config["dtype"] is None:
            return cls(lead)
        table: Any = lead
        bias = torch.empty(table.num_embeddings, dtype=dtype_of(config), device="meta")
        return cls(lead, nn.Parameter(bias))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class TiedTTLinear(TableHead):
    """Output layer on a tensor-train embedding; each forward pass forms the dense table."""

    _table_class = TTTable

    def set_weight_(self, weight: Tensor, *, tolerance: float | None = None) -> float:
        """Call ``set_weight_`` of the embedding, see :class:`~comera.TTEmbedding`."""
        return self.embedding.set_weight_(weight, tolerance=tolerance)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.embedding.dense_weight(), self.bias)

    @torch.no_grad()
    def to_dense(self, weight: nn.Parameter) -> nn.Linear:
        """Return a :class:`torch.nn.Linear` with the given ``weight`` and this layer's bias."""
        return linear_of(weight, self.bias).train(self.training)
