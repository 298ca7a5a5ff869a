"""Make layers of a trained model low-rank, with ranks chosen by data under one budget."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from comera.compress.allocate import CompressedLayers, parse_budget
from comera.compress.layer_moments import Layer, LossFn, linear_targets, own_loss, weight_OI
from comera.compress.sensitivity import LayerSensitivity, Sensitivity, look_at
from comera.nn.embedding import TTEmbedding
from comera.nn.forms import as_torch, experts_apart, form_of
from comera.nn.linear import TTLinear, TTPointwise
from comera.nn.module import check_model, linear_of
from comera.nn.swap import evaluation_mode, naming_old_optimizers, swap_layers_
from comera.nn.table import padding_to_keep
from comera.params import checksum, model_size, renew_wrappers_
from comera.planning.printing import Report, Table, show_bytes
from comera.shapes import TTShape

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("comera")

_TRIES = 7
"""Sizes that are tried for a bound on the loss: the answer is within a hundredth of the range."""


@dataclass(frozen=True, repr=False)
class Compression(Report):
    """Result of :func:`compress_`; prints itself.

    Attributes:
        layers: One entry for each targeted layer.
        dense_params: Parameters of the whole dense model, shared ones counted once.
        params: Parameters of the whole compressed model, counted in the same way.
        dense_bytes: Bytes of the parameters before compression.
        bytes: Bytes of the parameters after compression.
        seconds: Time of the call, including calibration.
        measured: Loss by ``evaluate`` at this size; None if a budget was given.
    """

    layers: CompressedLayers
    dense_params: int
    params: int
    dense_bytes: int
    bytes: int
    seconds: float
    measured: float | None = None

    @property
    def share(self) -> float:
        """Parameters of the compressed model divided by those of the dense model."""
        return self.params / self.dense_params

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each :class:`CompressedLayer`. Needs pandas."""
        return self.layers.to_pandas()

    def tables(self) -> list[Table]:
        return self.layers.tables()

    def summary(self) -> str:
        kept = sum(layer.rank is None for layer in self.layers)
        loss = "" if self.measured is None else f", measured loss {self.measured:.4g}"
        return (
            f"whole model: {self.params:,} parameters of {self.dense_params:,} ({self.share:.1%}), "
            f"{show_bytes(self.bytes)} of {show_bytes(self.dense_bytes)}, "
            f"{kept} of {len(self.layers)} layers stay dense, {self.seconds:.0f} s{loss}"
        )


def compress_(
    model: nn.Module,
    calibration: Iterable[Any] | Sensitivity,
    *,
    budget: float | str | None = None,
    max_loss: float | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    loss_fn: LossFn | None = None,
    target_modules: str | list[str] = "all-linear",
    exclude_modules: str | list[str] | None = None,
    keep: str | Path | None = None,
    progress: bool = False,
) -> Compression:
    """Replace layers of a trained model by low-rank ones that raise the loss least, in place.

    Calibration data give the second moments of each layer's inputs and of the loss gradients at
    its output. These moments weight errors of a weight by their effect on the loss, comparably for
    all layers, so one price per parameter chooses all ranks and the dense layers. The result has
    :class:`~comera.TTLinear` layers of order 1 with open gates, which can be trained and saved.

    Args:
        model: Any model with linear layers: ``nn.Linear``, those of
            :func:`~comera.register_layer`, and experts of transformers.
        calibration: Batches as ``loss_fn`` takes them, of the kind of data the model is for. Some
            ten thousand rows (tokens) are enough. Or the result of :func:`~comera.sensitivity` for
            this model or the one it is a copy of; then give that function the arguments from
            ``loss_fn`` on.
        budget: Parameters of the whole model after compression, divided by those now, in (0, 1); or
            their bytes with a unit: ``"60MB"`` (10^6 bytes), ``"60MiB"`` (2^20 bytes).
        max_loss: Largest loss that ``evaluate`` may return; replaces ``budget``. Bisection tries
            seven sizes and takes the smallest within this loss.
        evaluate: Function that puts the model into a mode of your choice and returns its loss on
            data of your choice. If None, the mean of ``loss_fn`` over the calibration batches
            without dropout, for which they are read again at each size.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss. If None, batches are mappings
            as models of Hugging Face take them, labels included, and the model returns its loss.
        target_modules: Layers to compress, as for :class:`~comera.TTConfig`. A targeted
            ``nn.Embedding`` (by name or ``"all"``) becomes a :class:`~comera.TTEmbedding` of low
            rank; its rows are weighted by how often the data read them, and rows that they never
            read by how often such rows are expected.
        exclude_modules: Layers to leave out, as for :class:`~comera.TTConfig`. Layers that share
            weights with other modules, as output layers tied to embeddings, stay as they are.
        keep: File for the moments, written every two minutes and at the end of calibration. If it
            exists, the batches that are in it are skipped: all of them, if it is complete.
        progress: Whether to show a progress bar.

    Returns:
        The chosen ranks and the predicted rise of the loss.

    Raises:
        ValueError: If the budget or the loss is out of range or out of reach, no layer matches,
            there is no batch, a loss is not finite or depends on no targeted layer, or the file
            or the sensitivity belongs to other weights. The model is then unchanged.
        TypeError: If ``model`` is no module.

    Example::

        done = comera.compress_(model, loader, budget=0.8)
        print(done)

    Source: SVD-LLM (arXiv 2403.07378), with gradients and one budget for all layers.
    """
    check_model(model)
    if (budget is None) == (max_loss is None):
        which = "one of them must be given" if budget is None else "give one of them, not both"
        raise ValueError(f"budget={budget!r} and max_loss={max_loss!r}: {which}")
    if budget is not None:
        parse_budget(budget)
        if evaluate is not None:
            raise ValueError("evaluate measures what max_loss bounds: give that instead of budget")
    elif evaluate is None and isinstance(calibration, Sensitivity | Iterator):
        raise ValueError(
            f"max_loss={max_loss} with a calibration of type {type(calibration).__name__}, which "
            "cannot be read again for each size: pass evaluate(model)"
        )

    def mean_loss(model: nn.Module) -> float:
        with evaluation_mode(model):
            losses = [float((loss_fn or own_loss)(model, batch)) for batch in calibration]  # type: ignore[union-attr]
        return sum(losses) / max(1, len(losses))

    if torch.is_inference_mode_enabled():
        raise RuntimeError("compress_ measures gradients: call it outside torch.inference_mode()")
    begun = time.monotonic()
    with experts_apart(model):
        if isinstance(calibration, Sensitivity):
            check_unused(loss_fn, target_modules, exclude_modules, keep)
            found = calibration
        else:
            targets = linear_targets(model, target_modules, exclude_modules, "compress_")
            found = look_at(model, targets, calibration, loss_fn, keep=keep, progress=progress)
        layers = {layer.name: _same(model, layer) for layer in found.layers}
        before = model_size(model)
        loss = None
        if budget is None:
            assert max_loss is not None, "one of them is given"
            budget, loss = _smallest_share(model, layers, found, evaluate or mean_loss, max_loss)
        made = found.choose(budget)
        new = {
            id(layers[one.name]): _low_rank(layers[one.name], *about.whitened.factors(one.rank))
            for one, about in zip(made, found.layers, strict=True)
            if one.rank is not None
        }
        with naming_old_optimizers(model):
            renew_wrappers_(swap_layers_(model, new).modules())
        after, seconds = model_size(model), time.monotonic() - begun
        return Compression(
            made, before.params, after.params, before.bytes, after.bytes, seconds, loss
        )


def check_unused(loss_fn: object, targets: object, exclude: object, keep: object = None) -> None:
    """Raise ValueError for calibration settings, which a given ``Sensitivity`` leaves unused."""
    given = {"loss_fn": loss_fn, "exclude_modules": exclude, "keep": keep}
    given["target_modules"] = None if targets == "all-linear" else targets
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{wrong[0]}={given[wrong[0]]!r}: with what sensitivity found there is no calibration "
            "left to do; say it to sensitivity"
        )


def measured(evaluate: Callable[[nn.Module], float], model: nn.Module) -> float:
    """Return the loss by ``evaluate``, without gradients; raise ValueError if not finite."""
    with torch.no_grad():
        loss = float(evaluate(model))
    if not math.isfinite(loss):
        raise ValueError(f"evaluate gave {loss}; it must be a finite number, lower for better")
    return loss


def _same(model: nn.Module, found: LayerSensitivity) -> Layer:
    """Return a layer of the model; ``ValueError`` if its weight changed since ``sensitivity``."""
    layer: Any
    layer, weight = None, found.whitened.weight_OI
    with suppress(AttributeError):
        layer = model.get_submodule(found.name)
    known = layer is not None and type(as_torch(layer)) in (nn.Linear, nn.Embedding)
    if not known or weight_OI(layer).shape != weight.shape:
        raise ValueError(
            f"{found.name} is no linear layer or table with a weight of {tuple(weight.shape)} in "
            "this model, and was one when sensitivity looked"
        )
    is_same = torch.equal(weight_OI(layer), weight.to(layer.weight))
    if checksum(weight) != found.checksum or not is_same:
        raise ValueError(f"the weight of {found.name} has changed since sensitivity looked")
    return layer


def _smallest_share(
    model: nn.Module,
    layers: Mapping[str, Layer],
    found: Sensitivity,
    evaluate: Callable[[nn.Module], float],
    max_loss: float,
) -> tuple[float, float]:
    """Return the smallest share of parameters with a loss within ``max_loss``, and that loss."""
    best = loss = measured(evaluate, model)
    if not best <= max_loss:
        raise ValueError(
            f"max_loss={max_loss}: the dense model itself has a loss of {best:.6g} in evaluate"
        )
    low, high = found.least() / found.model_params, 1.0
    dense = {name: layer.weight.data for name, layer in layers.items()}
    for _ in range(_TRIES):
        share = (low + high) / 2
        try:
            for one, about in zip(found.choose(share), found.layers, strict=True):
                if one.rank is not None:
                    left, right = about.whitened.factors(one.rank)
                    product, layer = left @ right, layers[one.name]
                    layer.weight.data = _as_stored(layer, product.to(layer.weight.dtype))
            loss = measured(evaluate, model)
        finally:
            for name, data in dense.items():
                layers[name].weight.data = data
        log.info("compress_: at %.1f %% of the parameters the loss is %.6g", 100 * share, loss)
        if loss <= max_loss:
            high, best = share, loss
        else:
            low = share
    if high == 1.0:
        raise ValueError(
            f"max_loss={max_loss}: at {low:.1%} of the parameters the loss is {loss:.6g} already"
        )
    return high, best


def _as_stored(layer: Layer, weight_OI: Tensor) -> Tensor:
    """Return a weight as the layer's class has it, such as transposed."""
    if isinstance(layer, nn.Embedding):
        return weight_OI.T
    if (form := form_of(layer)) is None:
        return weight_OI
    return form.from_torch(linear_of(nn.Parameter(weight_OI), None)).weight.data  # type: ignore[return-value]


@torch.no_grad()
def _low_rank(layer: Layer, left_OR: Tensor, right_RI: Tensor) -> TTLinear | TTEmbedding:
    rank = len(right_RI)
    if isinstance(layer, nn.Embedding):
        rows, width = layer.weight.shape
        table = TTEmbedding(
            rows, width, padding_to_keep(layer), device="meta", dtype=layer.weight.dtype,
            shape=((rows, 1), (1, width)), rank=rank, scatter_rows=False,
        ).to_empty(device=layer.weight.device)  # fmt: skip
        table.set_cores_([right_RI.T[None, :, None], left_OR.T[:, None, :, None]])
        table.freeze_like_(layer)
        return table.train(layer.training)
    shape = TTShape((right_RI.shape[1],), (len(left_OR),), (rank,))
    cores = [right_RI.T[None], left_OR.T[:, :, None]]
    if (form := form_of(layer)) is None:
        return TTLinear.from_cores(layer, shape, cores)
    kind = TTLinear if form.feature_dim == -1 else TTPointwise
    made = kind.from_cores(as_torch(layer), shape, cores)
    made.dense_form = form.name
    if isinstance(made, TTPointwise):
        made.feature_dim = form.feature_dim
    return made
