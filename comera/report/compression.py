"""Size and predicted cost of a tensorised model, layer by layer."""

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from comera.nn.linear import CompressedLinear, TTLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.table import HotRows, TTTable
from comera.params import model_size
from comera.planning.candidate import Candidate
from comera.planning.lookup_ways import Lookup
from comera.planning.planner import plan_embedding, plan_linear
from comera.planning.printing import Report, Table, data_frame, show_bytes, show_count

if TYPE_CHECKING:
    import pandas as pd

_HEADER = (
    "layer", "type", "modes", "ranks (start -> live)", "dense", "stored", "live cores", "smaller",
    "bytes", "operations, {} tokens", "operations / dense", "saved for backward", "saved / dense",
)  # fmt: skip
_SPARE = (
    "bytes", "type", "saved for backward", "operations, {} tokens", "modes", "live cores",
    "operations / dense", "saved / dense",
)  # fmt: skip
"""Columns to leave out where they do not fit, the first of them first."""


@dataclass(frozen=True)
class LayerReport:
    """One tensor-train layer.

    Attributes:
        name: Name of the layer, as in ``named_modules``.
        kind: Class name.
        modes: Modes of the cores.
        start_ranks: Bonds when the layer was made.
        ranks: Bonds whose gates are live now.
        dense_params: Entries of the weight it stands for; the bias is not counted.
        params: Entries of cores, gates and dense rows as they are stored.
        live_params: Entries of the cores that would remain if it were truncated now.
        frozen_params: Entries of what :func:`comera.freeze_` makes of it: two factors at the live
            ranks, or a dense weight where that has fewer; dense rows included.
        bytes: Stored bytes of the above but these.
        operations: Predicted multiply-adds of a forward and backward pass at the live ranks.
        dense_operations: The same for the dense layer.
        saved_bytes: Predicted bytes kept from the forward to the backward pass.
        dense_saved_bytes: The same for the dense layer.
    """

    name: str
    kind: str
    modes: str
    start_ranks: tuple[int, ...]
    ranks: tuple[int, ...]
    dense_params: int
    params: int
    live_params: int
    frozen_params: int
    bytes: int
    operations: int
    dense_operations: int
    saved_bytes: int
    dense_saved_bytes: int


class CompressionReport(Report):
    """A table of layers and totals; prints itself, also in Jupyter.

    The table is as wide as the terminal at most, and names the columns for which there is no room;
    :meth:`to_pandas` has them all.

    Attributes:
        layers: One :class:`LayerReport` a tensor-train layer.
        tokens: Rows of the batch that operations and activations are predicted for.
        params: Parameters of the whole model, shared ones counted once.
        bytes: Bytes of these parameters.
        frozen_bytes: The same once :func:`comera.freeze_` has contracted its layers, to be run;
            those that it finds faster dense are not counted as dense.
        dense_bytes: The same with all its layers dense.
        dense_params: Parameters of the model with all its layers dense.
        tt_params: Stored parameters of the tensor-train layers: cores, gates and dense rows.
        live_params: Entries their cores would keep if they were truncated now; what
            rank learning counts.
        tt_dense_params: Entries of the dense weights they stand for.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.tokens = tokens
        self.layers = [_layer(n, m, tokens) for n, m in tensor_trains(model).items()]
        self.params, self.bytes = model_size(model)
        others = self.bytes - sum(layer.bytes for layer in self.layers)
        widths = [train.cores[0].element_size() for train in tensor_trains(model).values()]
        frozen = [layer.frozen_params for layer in self.layers]
        dense = [layer.dense_params for layer in self.layers]
        self.frozen_bytes = others + sum(map(operator.mul, frozen, widths))
        self.dense_bytes = others + sum(map(operator.mul, dense, widths))
        self.tt_params = sum(layer.params for layer in self.layers)
        self.live_params = sum(layer.live_params for layer in self.layers)
        self.tt_dense_params = sum(layer.dense_params for layer in self.layers)
        self.dense_params = self.params - self.tt_params + self.tt_dense_params

    @property
    def compression(self) -> float:
        """Return how many times fewer parameters than the dense model there are, all in all."""
        return self.dense_params / max(1, self.params)

    @property
    def layer_compression(self) -> float:
        """Return how many times fewer parameters than dense the tensor-train layers have."""
        return self.tt_dense_params / max(1, self.tt_params) if self.layers else 1.0

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row a layer, columns as in :class:`LayerReport`. Needs pandas."""
        return data_frame(self.layers)

    def summary(self) -> str:
        """Return lines of totals."""
        layers = f"{len(self.layers)} tensor-train layer{'s' * (len(self.layers) != 1)}"
        return (
            f"whole model: {self.params:,} parameters ({show_bytes(self.bytes)}), "
            f"dense {self.dense_params:,}: {self.compression:.1f}x smaller\n"
            f"{layers}: {self.tt_params:,} parameters, "
            f"dense {self.tt_dense_params:,}: {self.layer_compression:.1f}x smaller\n"
            f"weights to be run: {show_bytes(self.bytes)} as it is, "
            f"{show_bytes(self.frozen_bytes)} or more frozen, "
            f"{show_bytes(self.dense_bytes)} dense"
        )

    def tables(self) -> list[Table]:
        """Return one row a layer."""
        rows = [
            [
                layer.name or "(model)",
                layer.kind,
                layer.modes,
                _ranks(layer),
                f"{layer.dense_params:,}",
                f"{layer.params:,}",
                f"{layer.live_params:,}",
                f"{layer.dense_params / max(1, layer.params):.1f}x",
                show_bytes(layer.bytes),
                show_count(layer.operations),
                _share(layer.operations, layer.dense_operations),
                show_bytes(layer.saved_bytes),
                _share(layer.saved_bytes, layer.dense_saved_bytes),
            ]
            for layer in self.layers
        ]
        header, spare = (
            [name.format(self.tokens) for name in names] for names in (_HEADER, _SPARE)
        )
        return [Table("tensor-train layers", header, rows, left=range(4), names=0, spare=spare)]


def compression_report(model: nn.Module, tokens: int = 4096) -> CompressionReport:
    """Report parameters, bytes, ranks and predicted cost of every tensor-train layer, and totals.

    Args:
        model: Any model; without tensor-train layers only the totals are filled.
        tokens: Rows of the batch to predict operations and activation memory for.

    Raises:
        ValueError: If ``tokens`` is below one.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    return CompressionReport(model, tokens)


def _layer(name: str, layer: TensorTrainModule, tokens: int) -> LayerReport:
    meta = layer.cores[0].device.type == "meta"
    ranks = layer.ranks if meta else layer.live_ranks
    shape = layer.shape
    dense_params = layer.num_dense
    stored = [*layer.cores, *layer.gates]
    if isinstance(layer, TTTable) and isinstance(layer.hot, Tensor):
        stored.append(layer.hot)
        dense_params += layer.hot.numel()
    mine, dense = _ways(layer, ranks, tokens)
    return LayerReport(
        name=name,
        kind=type(layer).__name__,
        modes=shape.describe_modes(),
        start_ranks=layer.start_ranks,
        ranks=ranks,
        dense_params=dense_params,
        params=sum(param.numel() for param in stored),
        live_params=shape.size_at(ranks),
        frozen_params=_frozen_params(layer, ranks),
        bytes=sum(param.numel() * param.element_size() for param in stored),
        operations=mine.operations if mine else 0,
        dense_operations=dense.operations if dense else 0,
        saved_bytes=mine.saved_bytes if mine else 0,
        dense_saved_bytes=dense.saved_bytes if dense else 0,
    )


def _frozen_params(layer: TensorTrainModule, ranks: tuple[int, ...]) -> int:
    shape: Any = layer.shape
    if not layer.is_chain:  # freezing leaves it as it is
        return shape.size_at(layer.ranks)
    rank = max(1, ranks[shape.split - 1])
    if isinstance(layer, TTTable):
        pairs = list(zip(shape.row_modes, shape.col_modes, strict=True))
        parts = pairs[: shape.split], pairs[shape.split :]
        thin = rank * sum(math.prod(v * p for v, p in part) for part in parts)
        hot = layer.hot.numel() if isinstance(layer.hot, Tensor) else 0
        return min(thin, layer.num_dense) + hot
    thin = rank * sum(layer._weight_size())
    return min(thin, layer.num_dense) if isinstance(layer, TTLinear) else thin


def _ways(
    layer: TensorTrainModule, ranks: tuple[int, ...], tokens: int
) -> tuple[Candidate | None, Candidate | None]:
    """Return how a layer runs at the given ranks, and the dense one; None for parts of a table."""
    setting = layer.planner_setting()
    machine, dtype = setting["machine"], setting["dtype"]
    shape: Any = layer.shape.of_ranks(ranks)
    if isinstance(layer, CompressedLinear):
        made = plan_linear(replace(layer.at(tokens), shape=shape), dtype=dtype, machine=machine)
        return made.chosen, made.dense
    if isinstance(layer, TTTable):
        rows = layer.num_embeddings - layer.hot_rows
        lookup = Lookup(shape, tokens, num_embeddings=rows, embedding_dim=layer.embedding_dim)
        made = plan_embedding(lookup, dtype=dtype, machine=machine)
        return made.chosen, made.dense
    assert isinstance(layer, HotRows), "there are no other layers"
    return None, None  # every index is counted as one of the train's


def _ranks(layer: LayerReport) -> str:
    start, live = (" ".join(map(str, ranks)) for ranks in (layer.start_ranks, layer.ranks))
    return start if start == live else f"{start} -> {live}"


def _share(mine: int, dense: int) -> str:
    return f"{mine / dense:.2f}x" if dense else ""
