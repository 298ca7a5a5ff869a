"""An output layer that works on the cores of the embedding it is tied to, and the names of both."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.dense_weight import WeightByAssignment
from comera.nn.module import dtype_name, dtype_of
from comera.nn.table import TTTable


class TiedTTLinear(WeightByAssignment):
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
        """The dense ``(out_features, in_features)`` weight, which is the embedding's.

        It cannot be written in place; a weight that is assigned is approximated by the embedding's
        cores at their present ranks.
        """
        return self.embedding.weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.embedding.weight = value

    def set_weight_(self, weight: Tensor, *, tolerance: float | None = None) -> float:
        """Approximate a dense weight by the embedding's cores, in place; gates become ones.

        Args:
            weight: ``(out_features, in_features)``.
            tolerance: Bound on the relative Frobenius error, which decides the ranks; parameters
                then change their shapes. The present ranks if None.

        Returns:
            The relative Frobenius error of what the embedding now holds.
        """
        return self.embedding.set_weight_(weight, tolerance=tolerance)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.embedding.dense_weight(), self.bias)

    @torch.no_grad()
    def to_dense(self, weight: nn.Parameter) -> nn.Linear:
        """Return the :class:`torch.nn.Linear` this layer stands for, tied to a dense table."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        dense.weight = weight
        dense.register_parameter("bias", self.bias)
        return dense.train(self.training)

    def config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` makes the layer of again, beside its embedding."""
        return {"dtype": None if self.bias is None else dtype_name(self.bias)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None) -> "TiedTTLinear":
        """Make a layer on an embedding, its bias on the ``meta`` device.

        Args:
            config: What :meth:`config` has returned.
            lead: The embedding.

        Raises:
            ValueError: If ``lead`` is no tensor-train table.
        """
        if not isinstance(lead, TTTable):
            raise ValueError(f"it works on the cores of a table, not of {type(lead).__name__}")
        if config["dtype"] is None:
            return cls(lead)
        bias = torch.empty(lead.num_embeddings, dtype=dtype_of(config), device="meta")
        return cls(lead, nn.Parameter(bias))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def rename_tied_weights_(model: nn.Module) -> None:
    """Correct the lists of tied weights that models of transformers keep, after layers changed.

    Where ``lm_head.weight`` was ``embed_tokens.weight``, the cores of one are those of the other.
    With that said, ``save_pretrained`` writes them once and ``tie_weights()`` ties them.
    """
    for module in model.modules():
        for kept in ("_tied_weights_keys", "all_tied_weights_keys"):
            names = getattr(module, kept, None)
            if isinstance(names, dict):
                is_gone = _gone(module)
                still = {a: b for a, b in names.items() if not (is_gone(a) or is_gone(b))}
                setattr(module, kept, {**still, **dict(_shared_parameters(module))})


_PARTS = {"cores", "gates", "hot"}


def _gone(model: nn.Module) -> Callable[[str], bool]:
    """Return what tells whether a name is of a layer that was replaced; a pattern never is."""
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))

    def is_gone(name: str) -> bool:
        owner = modules.get(name.removesuffix(".weight"))
        converted = owner is not None and "weight" not in owner._parameters
        return converted or (name not in params and not _PARTS.isdisjoint(name.split(".")))

    return is_gone


def _shared_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of one parameter: a further one, and the first."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            yield name, known
