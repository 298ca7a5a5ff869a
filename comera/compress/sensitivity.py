"""Predict how the loss depends on the ranks of each layer, before anything is changed."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from comera.compress import layer_moments
from comera.compress.allocate import (
    Choice,
    CompressedLayer,
    CompressedLayers,
    allocate,
    parse_budget,
)
from comera.compress.whitened import WhitenedSVD, whitened_svd
from comera.nn.forms import experts_apart
from comera.params import checksum, model_size
from comera.planning import printing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHARES = tuple(k / 20 for k in range(1, 21))
_DRAWN, _DARK = 1e-8, 0.02
"""The darkest: below this share of the highest value, or this share of all values."""
_COLUMNS, _NAMED = 100, 100
"""Columns of a picture, and how many layers at most are named beside it."""


@dataclass(frozen=True)
class LayerSensitivity:
    """The sensitivity of one layer, with its ``name`` as in ``named_modules``.

    ``whitened`` is the SVD of its weight, with the loss that each direction saves; ``checksum`` is
    that of the weight then.
    """

    name: str
    whitened: WhitenedSVD
    checksum: int

    @functools.cached_property
    def plain_K(self) -> Tensor:
        """Singular values of the weight alone, float64."""
        return whitened_svd(self.whitened.weight_OI, None).losses_K.sqrt()

    @property
    def whitened_K(self) -> Tensor:
        """Singular values of the weight weighted by the data's moments, float64."""
        return (2 * self.whitened.losses_K).sqrt()

    def params(self, rank: int | None) -> int:
        """Return the entries of the factors and the gate at a rank; None is the dense weight."""
        weight = self.whitened.weight_OI
        return weight.numel() if rank is None else rank * (sum(weight.shape) + 1)

    def bytes(self, rank: int | None) -> int:
        """Return the bytes of :meth:`params`; gates are float32 or wider."""
        weight = self.whitened.weight_OI
        if rank is None:
            return weight.nbytes
        return rank * (sum(weight.shape) * weight.element_size() + max(4, weight.element_size()))

    def rank_at(self, share: float) -> int:
        """Return the largest rank with at most that share of the dense weight's entries, or 1."""
        return max(1, int(share * self.params(None) / self.params(1)))


@dataclass(frozen=True, repr=False)
class Sensitivity(printing.Report):
    """Result of :func:`sensitivity`; prints itself, also in Jupyter.

    :func:`compress_` accepts it instead of calibration data, for this model or its copies.

    Attributes:
        layers: One entry for each targeted layer.
        model_params: Parameters of the whole model, shared ones counted once.
        model_bytes: Bytes of these parameters.
        batch_rows: Rows of a batch of calibration: the most that a layer gets of one, on average.
    """

    layers: tuple[LayerSensitivity, ...]
    model_params: int
    model_bytes: int
    batch_rows: int | None = None

    def least(self, *, in_bytes: bool = False) -> int:
        """Return the whole model's least size: each target at rank one, or dense if smaller."""
        total = self.model_bytes if in_bytes else self.model_params
        size = LayerSensitivity.bytes if in_bytes else LayerSensitivity.params
        return total - sum(max(0, size(layer, None) - size(layer, 1)) for layer in self.layers)

    def choose(self, budget: float | str) -> CompressedLayers:
        """Return the ranks that :func:`compress_` would choose; they print as a table.

        Raises ``ValueError`` if the budget is out of range or out of reach.
        """
        share = parse_budget(budget)
        in_bytes = isinstance(share, int)
        total = self.model_bytes if in_bytes else self.model_params
        size = LayerSensitivity.bytes if in_bytes else LayerSensitivity.params
        if in_bytes and share >= total:
            raise ValueError(
                f"budget={budget!r} is no less than the {printing.show_bytes(total)} of all "
                "parameters"
            )
        whole = int(share) if in_bytes else math.floor(share * total)
        other = total - sum(size(layer, None) for layer in self.layers)
        least = self.least(in_bytes=in_bytes)
        if whole < least:
            unit = "bytes" if in_bytes else "parameters"
            rounded = f'"{math.ceil(least / 100) / 10:.1f}kB"' if in_bytes else None
            raise ValueError(
                f"budget={budget!r}: {other:,} of {total:,} {unit} are in layers that are no "
                "target (compressed ones, others, tables that are not named), and the targets hold "
                f"{least - other:,} at their smallest; budget="
                f"{rounded or math.ceil(1e4 * least / total) / 1e4} is the smallest that is "
                "possible"
            )
        choices = [
            Choice(layer.whitened.losses_K.cpu(), size(layer, None), size(layer, 1))
            for layer in self.layers
        ]
        return CompressedLayers(
            CompressedLayer(
                layer.name,
                layer.params(None),
                layer.params(rank),
                rank,
                0.0 if rank is None else layer.whitened.loss(rank),
            )
            for layer, rank in zip(self.layers, allocate(choices, whole - other), strict=True)
        )

    def to_pandas(self, shares: Sequence[float] = _SHARES) -> "pd.DataFrame":
        """Return a frame with layer, share, rank, loss, params and bytes in a row. Needs pandas.

        Each layer has a row for each share of its dense weight, rounded down to a rank of at least
        one; equal ranks are listed once.
        """
        return printing.data_frame(
            {
                "layer": layer.name,
                "share": layer.params(rank) / layer.params(None),
                "rank": rank,
                "loss": layer.whitened.loss(rank),
                "params": layer.params(rank),
                "bytes": layer.bytes(rank),
            }
            for layer in self.layers
            for rank in sorted(
                {min(len(layer.whitened.losses_K), layer.rank_at(share)) for share in shares}
            )
        )

    def spectra(self) -> "pd.DataFrame":
        """Return a frame with layer, index, plain and whitened value in a row. Needs pandas."""
        rows = (
            {"layer": layer.name, "index": index, "plain": plain, "whitened": whitened}
            for layer in self.layers
            for index, (plain, whitened) in enumerate(
                zip(layer.plain_K.tolist(), layer.whitened_K.tolist(), strict=True), 1
            )
        )
        return printing.data_frame(rows, "spectra()")

    def plot(self) -> "Figure":
        """Draw the rise of the loss by layer and share of its dense weight. Needs matplotlib.

        It is blank where one rank has more entries than the share; layers of one kind are together.
        """
        kinds = [re.sub(r"\d+", "", layer.name) for layer in self.layers]
        order = sorted(range(len(kinds)), key=lambda k: kinds.index(kinds[k]))
        names = [self.layers[k].name for k in order]
        height = max(2.8, 1.5 + 0.15 * min(len(names), _NAMED))  # or the bar's label has no room
        figure, (ax,) = printing.empty_figure(1, height, max(map(len, names)) / 16)
        from matplotlib.colors import LogNorm

        def losses(layer: LayerSensitivity) -> list[float]:
            least = layer.params(1) / layer.params(None)
            shares = [(k + 0.5) / _COLUMNS for k in range(_COLUMNS)]
            losses = [layer.whitened.loss(layer.rank_at(share)) for share in shares]
            return [math.nan if s < least else loss for s, loss in zip(shares, losses, strict=True)]

        image = torch.tensor([losses(self.layers[k]) for k in order], device="cpu")
        positive = torch.cat([image.new_tensor([1e-30]), image[image > 0]])
        top = float(positive.max())
        low = float(positive.quantile(_DARK).clamp(_DRAWN * top, 0.1 * top))
        drawn = ax.imshow(
            image.clamp_min(low).numpy(), norm=LogNorm(low, top), extent=(0, 1, len(names), 0),
            aspect="auto", interpolation="nearest",
        )  # fmt: skip
        every = -(-len(names) // _NAMED)
        at = [k + 0.5 for k in range(0, len(names), every)]
        ax.set_yticks(at, names[::every], fontsize=7)
        ax.set(xlabel="share of the dense weight")
        for k in range(1, len(names)):
            if kinds[order[k]] != kinds[order[k - 1]]:
                ax.axhline(k, color="white", lw=0.8)
        figure.colorbar(drawn, ax=ax, label="predicted rise of the loss", extend="min")
        return figure

    def tables(self) -> list[printing.Table]:
        """Return a table of the predicted rise of the loss at shares of each dense weight."""
        at = (0.75, 0.5, 0.25, 0.1)
        losses = (
            printing.show_column(
                [layer.whitened.loss(layer.rank_at(share)) for layer in self.layers]
            )
            for share in at
        )
        rows = [
            (layer.name, " to ".join(map(str, reversed(layer.whitened.weight_OI.shape))), *shown)
            for layer, *shown in zip(self.layers, *losses, strict=True)
        ]
        header = ("layer", "weight", *(f"loss at {share:.0%}" for share in at))
        title = "predicted rise of the loss, by share of the weight kept"
        return [printing.Table(title, header, rows, names=0)]

    def summary(self) -> str:
        """Return a line with the totals of the model."""
        ours = sum(layer.params(None) for layer in self.layers)
        return (
            f"{len(self.layers)} layers with {ours:,} of {self.model_params:,} parameters "
            f"({ours / self.model_params:.1%})"
        )


def sensitivity(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    loss_fn: layer_moments.LossFn | None = None,
    target_modules: str | list[str] = "all-linear",
    exclude_modules: str | list[str] | None = None,
    keep: str | Path | None = None,
    progress: bool = False,
) -> Sensitivity:
    """Predict the loss of a trained model at every rank of each layer; nothing is changed.

    Arguments and errors are those of :func:`compress_`, without the budget.

    Returns:
        For each layer the loss by rank, with tables, plots, and the ranks for any budget.

    Example::

        found = comera.sensitivity(model, loader)
        found.to_pandas()
        small = copy.deepcopy(model)
        comera.compress_(small, found, budget=0.8)
    """
    with experts_apart(model):
        layers = layer_moments.linear_targets(model, target_modules, exclude_modules, "sensitivity")
        return look_at(model, layers, calibration, loss_fn, keep=keep, progress=progress)


def look_at(
    model: nn.Module,
    layers: Mapping[str, layer_moments.Layer],
    calibration: Iterable[Any],
    loss_fn: layer_moments.LossFn | None,
    *,
    keep: str | Path | None = None,
    progress: bool = False,
) -> Sensitivity:
    moments = layer_moments.gather_moments(
        model, layers, calibration, loss_fn or layer_moments.own_loss, keep, progress
    )
    rows = max(round(each.rows / each.batches) for each in moments.values())
    made = []
    for name in list(moments):
        weight = layer_moments.weight_OI(layers[name])
        # Moments are freed as the decompositions come, which are no larger.
        whitened = whitened_svd(weight, moments.pop(name))
        made.append(LayerSensitivity(name, whitened, checksum(weight)))
    rise = sum(layer.whitened.loss(0) for layer in made)
    if rise < 1e-10:  # gradients are rounding errors
        layer_moments.log.warning(
            "gradients of this loss say that without all %d layers it would rise by %.1g only: it "
            "is at a minimum, as a distance from the model's own answers is, and tells no layers "
            "apart. Take labels, or labels drawn from the model's answers, or "
            "(outputs * torch.randn_like(outputs)).sum(-1).mean(); multiply a loss in small units",
            len(made), rise,
        )  # fmt: skip
    return Sensitivity(tuple(made), *model_size(model), rows)
