"""Plan all layers of a model: how each layer runs, and its cost compared with a dense layer."""

import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from comera.nn.convert import plans_of, tensorize_
from comera.nn.forms import expert_shares
from comera.nn.module import TensorTrainModule, check_model, tensor_trains
from comera.nn.targets import TTConfig
from comera.ops.context import machine_of
from comera.planning.machine import Machine
from comera.planning.planner import Plan
from comera.planning.printing import Report, Table, show_bytes, show_seconds
from comera.planning.ways import Layer
from comera.report.compression import CompressionReport

_HEADER = (
    "layers", "shape and ranks", "runs", "time", "time / dense", "eager / dense", "peak / dense",
    "instead",
)  # fmt: skip
_KEPT_HEADER = ("layers", "kept, each", "dense keeps", "kept, all of them", "dense keeps")


@dataclass(frozen=True)
class LayerPlan:
    """A plan, and the ``names`` of the layers for each of which it holds.

    ``suggestion`` is a change that would be faster than dense, if the layer is not; else empty.
    """

    names: tuple[str, ...]
    plan: Plan
    suggestion: str


@dataclass(frozen=True, repr=False)
class ModelPlan(Report):
    """The plans of all tensor-train layers of a model; prints itself, also in Jupyter.

    There is one of the ``layers`` for each kind of layer; ``tokens`` are the rows of the batch. The
    ``report`` has sizes and ranks of the model that a configuration would make; None without one.
    """

    layers: tuple[LayerPlan, ...]
    tokens: int
    machine: Machine
    report: CompressionReport | None = None

    @property
    def seconds(self) -> float:
        """Predicted time of all tensor-train layers, forward and backward."""
        return sum(len(layer.names) * layer.plan.chosen.seconds for layer in self.layers)

    @property
    def dense_seconds(self) -> float:
        """Predicted time if these layers were dense, forward and backward."""
        return sum(len(layer.names) * layer.plan.dense.seconds for layer in self.layers)

    @property
    def eager(self) -> tuple[float, float] | None:
        """:attr:`seconds` and :attr:`dense_seconds` in eager mode on a GPU; else None."""
        plans = [(layer, layer.plan.eager) for layer in self.layers]
        layers = tuple(replace(layer, plan=eager) for layer, eager in plans if eager is not None)
        if len(layers) < len(self.layers):
            return None
        eager = replace(self, layers=layers)
        return eager.seconds, eager.dense_seconds

    @property
    def kept_bytes(self) -> int:
        """Bytes that these layers keep for backward, without parameters; fused ones keep less."""
        return sum(len(layer.names) * layer.plan.chosen.saved_bytes for layer in self.layers)

    @property
    def dense_kept(self) -> int:
        """Bytes that the dense layers would keep for backward."""
        return sum(len(layer.names) * layer.plan.dense.saved_bytes for layer in self.layers)

    def tables(self) -> list[Table]:
        """Return a table of times, without empty columns, and a table of bytes kept.

        Kinds that read alike, as with and without a bias, share a row, which has their means.
        """
        alike: dict[tuple[str, ...], list[LayerPlan]] = {}
        for layer in self.layers:
            at = layer.plan.layer.tokens
            shape = str(layer.plan.layer) + f", {at} rows" * (at != self.tokens)
            alike.setdefault((shape, layer.plan.chosen.name, layer.suggestion), []).append(layer)
        rows, kept = [], []
        for (shape, runs, instead), kinds in alike.items():
            plans = [layer.plan for layer in kinds for _ in layer.names]
            more = f" and {len(plans) - 1} more" * (len(plans) > 1)
            name = (kinds[0].names[0] or "(model)") + more
            rows.append((
                name, shape, runs,
                show_seconds(fmean(plan.chosen.seconds for plan in plans)),
                f"{fmean(plan.time_ratio for plan in plans):.2f}x",
                f"{fmean(plan.eager_ratio or 0 for plan in plans):.2f}x" if self.eager else "",
                f"{fmean(plan.memory_ratio for plan in plans):.2f}x",
                instead,
            ))  # fmt: skip
            sizes = [(plan.chosen.saved_bytes, plan.dense.saved_bytes) for plan in plans]
            both = list(zip(*sizes, strict=True))
            kept.append((name, *(show_bytes(of(each)) for of in (fmean, sum) for each in both)))
        shown = [k for k in range(len(_HEADER)) if any(row[k] for row in rows)]
        words = ("layers", "shape and ranks", "runs", "instead")
        times = Table(
            f"plan at {self.tokens} tokens",
            [_HEADER[k] for k in shown],
            [[row[k] for k in shown] for row in rows],
            left=[number for number, k in enumerate(shown) if _HEADER[k] in words],
            names=0,
            spare=("runs", "peak / dense", "time"),
        )
        kept.append(("total", "", "", show_bytes(self.kept_bytes), show_bytes(self.dense_kept)))
        title = f"kept for the backward pass at {self.tokens} tokens"
        return [times, Table(title, _KEPT_HEADER, kept, names=0, total=True)]

    def summary(self) -> str:
        """Return lines with the total times and, for a configuration, the sizes of its model."""
        eager = self.eager
        lines = [self.report.summary()] if self.report else []
        lines.append(
            f"all tensor-train layers, forward and backward{' in a captured step' if eager else ''}"
            f": {show_seconds(self.seconds)}, dense {show_seconds(self.dense_seconds)}: "
            f"{self.seconds / self.dense_seconds:.2f}x the time ({self.machine.title})"
        )
        if eager is not None:
            ours, dense = eager
            lines.append(
                f"in eager mode: {show_seconds(ours)}, dense {show_seconds(dense)}: "
                f"{ours / dense:.2f}x the time\n"
                f"the fastest: captured {_winner(self.seconds, self.dense_seconds)}, eager "
                f"{_winner(ours, dense)}"
            )
        return "\n".join(lines)


def _winner(ours: float, dense: float) -> str:
    return "tensor trains" if ours < dense else "dense"


def plan(
    model: nn.Module, config: TTConfig | None = None, *, tokens: int = 4096
) -> Plan | ModelPlan:
    """Predict how each tensor-train layer runs at a batch, and its cost compared with dense.

    Args:
        model: One tensor-train layer, for a table of every contraction, or a model, for one line
            for each kind of layer. With ``config`` a dense model, which is not changed.
        config: How :func:`~comera.tensorize_` would convert the model. Nothing is allocated; the
            ``comera`` logger names layers that would stay dense.
        tokens: Rows of the batch: all dimensions of the input but the last, multiplied. For
            embeddings the number of indices; an expert of a mixture gets its share of the rows.

    Returns:
        A :class:`~comera.planning.planner.Plan` of the layer, or a :class:`ModelPlan`. Times are
        predicted for the device of the parameters, from speeds that ``comera calibrate`` measured
        or from rough defaults.

    Raises:
        ValueError: If ``tokens`` is below one, ``model`` holds no tensor-train layer, or ``config``
            does not fit it.
        TypeError: If ``model`` is no module, or ``config`` no :class:`~comera.TTConfig`.

    Example::

        print(comera.plan(dense, comera.TTConfig(compression=10), tokens=4096))
    """
    report = None
    setting: dict[str, Any] = {}
    if config is not None:
        if not isinstance(config, TTConfig):
            raise TypeError(
                f"config={config!r} must be a comera.TTConfig; rows are said as tokens=..."
            )
        check_model(model)
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        setting["machine"] = machine_of(device)
        model = tensorize_(_without_values(model), replace(config, tokens=tokens))
        report = CompressionReport(model, tokens) if tensor_trains(model) else None
    layers = tensor_trains(model)
    if not layers:
        raise ValueError(
            f"{config} would leave every layer dense"
            if config is not None
            else f"{type(model).__name__} has no tensor-train layer: call comera.tensorize_ first"
        )
    made = []
    for names, layer_plan in plans_of(layers, expert_shares(model), tokens, **setting):
        if isinstance(model, TensorTrainModule):
            return layer_plan
        instead = ""
        if layer_plan.time_ratio > 1 and isinstance(layer_plan.layer, Layer):
            better = layer_plan.suggestion
            instead = "dense" if better is None else f"{better.change}: {better.time_ratio:.2f}x"
        made.append(LayerPlan(names, layer_plan, instead))
    return ModelPlan(tuple(made), tokens, made[0].plan.machine, report)


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the ``meta`` device, with its tied weights."""
    held: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for param in model.parameters():
        empty = torch.empty_like(param, device="meta")
        held[id(param)] = nn.Parameter(empty, param.requires_grad)
    return copy.deepcopy(model, held)
