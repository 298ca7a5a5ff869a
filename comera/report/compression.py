"""How much smaller a tensorised model is, layer by layer, and what its layers cost."""

import io
from dataclasses import dataclass

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from comera.nn.hot import HotRows
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.table import TTTable
from comera.planning.cost import (
    Cost,
    dense_embedding_cost,
    dense_linear_cost,
    tt_embedding_cost,
    tt_linear_cost,
)
from comera.planning.table import table_html


@dataclass(frozen=True)
class LayerReport:
    """One tensor-train layer.

    Attributes:
        name: As in ``named_modules``.
        kind: Class name.
        modes: Modes of the cores.
        start_ranks: Bonds when the layer was made.
        ranks: Bonds whose gates are live now.
        dense_params: Entries of the weight it stands for; the bias is not counted.
        params: Entries of cores, gates and dense rows as they are stored.
        live_params: Entries of the cores that would remain if it were truncated now.
        bytes: Stored bytes of the above.
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
    bytes: int
    operations: int
    dense_operations: int
    saved_bytes: int
    dense_saved_bytes: int


class CompressionReport:
    """A table of layers and totals; prints itself, also in Jupyter.

    Attributes:
        layers: One :class:`LayerReport` a tensor-train layer.
        tokens: Rows of the batch that operations and activations are predicted for.
        params: Parameters of the whole model, shared ones counted once.
        bytes: Their bytes.
        dense_params: Parameters of the model with all its layers dense.
        tt_params: Stored parameters of the tensor-train layers: cores, gates and dense rows.
        live_params: Entries their cores would keep if they were truncated now; what
            ``TwoStage`` counts.
        tt_dense_params: Entries of the dense weights they stand for.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.tokens = tokens
        self.layers = [_layer(n, m, tokens) for n, m in tensor_trains(model).items()]
        params = list(model.parameters())
        self.params = sum(param.numel() for param in params)
        self.bytes = sum(param.numel() * param.element_size() for param in params)
        self.tt_params = sum(layer.params for layer in self.layers)
        self.live_params = sum(layer.live_params for layer in self.layers)
        self.tt_dense_params = sum(layer.dense_params for layer in self.layers)
        self.dense_params = self.params - self.tt_params + self.tt_dense_params

    @property
    def compression(self) -> float:
        """How many times fewer parameters than the dense model, all in all."""
        return self.dense_params / max(1, self.params)

    @property
    def layer_compression(self) -> float:
        """How many times fewer parameters than dense, over the tensor-train layers."""
        return self.tt_dense_params / max(1, self.tt_params) if self.layers else 1.0

    def to_pandas(self) -> pd.DataFrame:
        """One row a layer; columns are the attributes of :class:`LayerReport`."""
        return pd.DataFrame([vars(layer) for layer in self.layers])

    def summary(self) -> str:
        """Two lines of totals."""
        return (
            f"whole model: {self.params:,} parameters ({_bytes(self.bytes)}), "
            f"dense {self.dense_params:,}: {self.compression:.1f}x smaller\n"
            f"{len(self.layers)} tensor-train layers: {self.tt_params:,} parameters, "
            f"dense {self.tt_dense_params:,}: {self.layer_compression:.1f}x smaller"
        )

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells as text."""
        header = [
            "layer", "type", "modes", "ranks (start -> live)", "dense", "stored", "live cores",
            "smaller", "bytes", f"operations, {self.tokens} tokens", "saved for backward",
        ]  # fmt: skip
        return header, [
            [
                layer.name or "(model)",
                layer.kind,
                layer.modes,
                _ranks(layer),
                f"{layer.dense_params:,}",
                f"{layer.params:,}",
                f"{layer.live_params:,}",
                f"{layer.dense_params / max(1, layer.params):.1f}x",
                _bytes(layer.bytes),
                _against(layer.operations, layer.dense_operations, _count),
                _against(layer.saved_bytes, layer.dense_saved_bytes, _bytes),
            ]
            for layer in self.layers
        ]

    def __str__(self) -> str:
        header, rows = self.rows()
        table = Table(title="tensor-train layers", show_lines=False)
        for k, name in enumerate(header):
            table.add_column(name, justify="left" if k < 4 else "right", no_wrap=k in (0, 1))
        for row in rows:
            table.add_row(*row)
        out = io.StringIO()
        Console(file=out, width=200, color_system=None).print(table)
        return f"{out.getvalue().rstrip()}\n{self.summary()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, rows = self.rows()
        return table_html(header, rows, note=self.summary())


def compression_report(model: nn.Module, tokens: int = 4096) -> CompressionReport:
    """Parameters, bytes, ranks and predicted cost of every tensor-train layer, and totals.

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
    if isinstance(layer, TTLinear):
        cost = tt_linear_cost(layer.shape, tokens, ranks)
        dense = dense_linear_cost(layer.in_features, layer.out_features, tokens)
    elif isinstance(layer, TTTable):
        cost, dense = tt_embedding_cost(layer.shape, tokens, ranks), dense_embedding_cost(tokens)
        if isinstance(layer.hot, Tensor):
            stored.append(layer.hot)
            dense_params += layer.hot.numel()
    else:
        assert isinstance(layer, HotRows), "there are three formats"
        cost = dense = Cost(0, 0, 0)  # every index is counted as one of the train's
    width = torch.empty((), dtype=layer.cores[0].dtype).element_size()
    return LayerReport(
        name=name,
        kind=type(layer).__name__,
        modes=shape.describe_modes(),
        start_ranks=layer.start_ranks,
        ranks=ranks,
        dense_params=dense_params,
        params=sum(param.numel() for param in stored),
        live_params=shape.size_at(ranks),
        bytes=sum(param.numel() * param.element_size() for param in stored),
        operations=cost.total,
        dense_operations=dense.total,
        saved_bytes=cost.saved * width,
        dense_saved_bytes=dense.saved * width,
    )


def _ranks(layer: LayerReport) -> str:
    start, live = (" ".join(map(str, ranks)) for ranks in (layer.start_ranks, layer.ranks))
    return start if start == live else f"{start} -> {live}"


def _against(mine: int, dense: int, show) -> str:
    ratio = f" ({mine / dense:.2f} of dense)" if dense else ""
    return f"{show(mine)}{ratio}"


def _count(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.3g}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.3g} {unit}"
        number /= 1024
    raise AssertionError("unreachable")
