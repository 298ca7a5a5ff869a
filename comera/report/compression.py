"""Report size and predicted cost of a tensorised model, layer by layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from comera.nn.forms import expert_shares, rows_at
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.table import TTTable
from comera.params import model_size
from comera.planning.planner import plan_layer
from comera.planning.printing import Report, Table, data_frame, show_bytes, show_count, table_of
from comera.shapes import check_whole_numbers

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LayerReport:
    """One tensor-train layer.

    Attributes:
        name: Name as in ``named_modules``.
        kind: Class name.
        start_ranks: Ranks when the layer was made.
        ranks: Ranks now, without pruned ones.
        dense_params: Entries of the dense weight, without the bias.
        params: Entries of cores, gates and dense rows as they are stored.
        live_params: Entries of the cores that would remain after truncation now.
        frozen_params: Entries after :func:`comera.freeze_`: of two factors without pruned ranks, or
            of a dense weight if that has fewer; with dense rows.
        bytes: Bytes of ``params``.
        operations: Predicted multiply-adds of a forward and backward pass at ``ranks``;
            ``dense_operations`` are those of the dense layer.
        saved_bytes: Predicted bytes kept from the forward to the backward pass;
            ``dense_saved_bytes`` are those of the dense layer.
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

    The table fits the terminal and names hidden columns; :meth:`to_pandas` has them all.

    Attributes:
        layers: A :class:`LayerReport` for each tensor-train layer.
        tokens: Rows of the batch for which operations and activations are predicted; an expert of
            a mixture gets its share of them.
        params: Parameters of the whole model, shared ones counted once.
        bytes: Bytes of these parameters.
        frozen_bytes: Bytes after :func:`comera.freeze_`, if it makes no layer dense for speed.
        dense_bytes: Bytes of the parameters if all layers were dense.
        dense_params: Parameters of the model if all layers were dense.
        tt_params: Stored parameters of the tensor-train layers: cores, gates and dense rows.
        live_params: Entries of the cores after truncation now: the size that rank learning counts.
        tt_dense_params: Entries of the tensor-train layers' dense weights.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        trains = tensor_trains(model)
        self.tokens = tokens
        shares = expert_shares(model)
        self.layers = [
            _layer(name, layer, rows_at(tokens, name, shares)) for name, layer in trains.items()
        ]
        self.params, self.bytes = model_size(model)
        self.frozen_bytes = self.dense_bytes = self.bytes
        for layer, train in zip(self.layers, trains.values(), strict=True):
            item = train.cores[0].element_size()
            self.frozen_bytes += layer.frozen_params * item - layer.bytes
            self.dense_bytes += layer.dense_params * item - layer.bytes
        self.tt_params = sum(layer.params for layer in self.layers)
        self.live_params = sum(layer.live_params for layer in self.layers)
        self.tt_dense_params = sum(layer.dense_params for layer in self.layers)
        self.dense_params = self.params - self.tt_params + self.tt_dense_params

    @property
    def compression(self) -> float:
        """Parameters of the dense model divided by those of this model."""
        return self.dense_params / max(1, self.params)

    @property
    def layer_compression(self) -> float:
        """Parameters of the dense weights divided by those of the tensor-train layers alone."""
        return self.tt_dense_params / max(1, self.tt_params) if self.layers else 1.0

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each :class:`LayerReport`. Needs pandas."""
        return data_frame(map(vars, self.layers))

    def summary(self) -> str:
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
        operations = f"operations, {self.tokens} tokens"
        columns: dict[str, Callable[[LayerReport], str]] = {
            "layer": lambda each: each.name or "(model)",
            "type": lambda each: each.kind,
            "modes": lambda each: each.modes,
            "ranks (start -> live)": lambda each: " -> ".join(
                dict.fromkeys(" ".join(map(str, ranks)) for ranks in (each.start_ranks, each.ranks))
            ),
            "dense": lambda each: f"{each.dense_params:,}",
            "stored": lambda each: f"{each.params:,}",
            "live cores": lambda each: f"{each.live_params:,}",
            "smaller": lambda each: f"{each.dense_params / max(1, each.params):.1f}x",
            "bytes": lambda each: show_bytes(each.bytes),
            operations: lambda each: show_count(each.operations),
            "operations / dense": lambda each: _share(each.operations, each.dense_operations),
            "saved for backward": lambda each: show_bytes(each.saved_bytes),
            "saved / dense": lambda each: _share(each.saved_bytes, each.dense_saved_bytes),
        }
        spare = (
            "bytes", "type", "saved for backward", operations, "modes", "live cores",
            "operations / dense", "saved / dense",
        )  # fmt: skip
        how: Any = {"left": range(4), "names": 0, "spare": spare}
        return [table_of("tensor-train layers", columns, self.layers, **how)]


def compression_report(model: nn.Module, tokens: int = 4096) -> CompressionReport:
    """Report parameters, bytes, ranks and predicted cost of every tensor-train layer, and totals.

    Args:
        model: Any model; without tensor-train layers only the totals are filled.
        tokens: Rows of the batch for which operations and activation memory are predicted.

    Raises:
        ValueError: If ``tokens`` is below one.
    """
    check_whole_numbers(1, tokens=tokens)
    return CompressionReport(model, tokens)


def _layer(name: str, layer: TensorTrainModule, tokens: int) -> LayerReport:
    ranks = layer.ranks if layer.cores[0].device.type == "meta" else layer.live_ranks
    shape = layer.shape
    hot = [layer.hot] if isinstance(layer, TTTable) and isinstance(layer.hot, Tensor) else []
    stored, hot_params = [*layer.cores, *layer.gates, *hot], sum(rows.numel() for rows in hot)
    work: Any = layer.at(tokens)
    costs = (0, 0, 0, 0)  # every index is counted as one of the train's, none as a hot row
    if work is not None:
        work = replace(work, shape=shape.of_ranks(ranks))  # type: ignore[arg-type]
        made = plan_layer(work, **layer.planner_setting())
        ours, dense = made.chosen, made.dense
        costs = (ours.operations, dense.operations, ours.saved_bytes, dense.saved_bytes)
    return LayerReport(
        name,
        type(layer).__name__,
        shape.describe_modes(),
        layer.start_ranks,
        ranks,
        layer.num_dense + hot_params,
        sum(param.numel() for param in stored),
        shape.size_at(ranks),
        _frozen_params(layer, ranks) + hot_params,
        sum(param.nbytes for param in stored),
        *costs,
    )


def _frozen_params(layer: TensorTrainModule, ranks: tuple[int, ...]) -> int:
    shape: Any = layer.shape
    if not layer.has_plain_form:  # it stays as it is
        return layer.num_stored
    rank = max(1, ranks[shape.split - 1])
    if isinstance(layer, TTTable):
        sizes = shape.slice_sizes
        halves = math.prod(sizes[: shape.split]) + math.prod(sizes[shape.split :])
        return min(rank * halves, layer.num_dense)
    thin = rank * sum(layer._weight_size())
    return min(thin, layer.num_dense) if isinstance(layer, TTLinear) else thin


def _share(mine: int, dense: int) -> str:
    return f"{mine / dense:.2f}x" if dense else ""
