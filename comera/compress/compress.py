"""A trained model with smaller linear layers: one budget, spent where calibration data say."""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comera.compress.allocate import Choice, allocate
from comera.compress.layer_moments import LossFn, gather_moments
from comera.compress.whitened import WhitenedSVD, whitened_svd
from comera.names import listed
from comera.nn.config import TTConfig
from comera.nn.convert import swap_layers_
from comera.nn.linear import TTLinear
from comera.nn.targets import find_targets, other_holders, tied_groups
from comera.planning.printing import text_table

log = logging.getLogger("comera")


@dataclass(frozen=True)
class CompressedLayer:
    """What became of one linear layer.

    Attributes:
        name: As in ``named_modules``.
        dense_params: Entries of the weight it had.
        params: Entries of what it has now, gates included.
        rank: Of its two factors; None where it stayed dense.
        loss: By how much this is predicted to raise the loss, to second order.
    """

    name: str
    dense_params: int
    params: int
    rank: int | None
    loss: float


@dataclass(frozen=True, repr=False)
class Compression:
    """What :func:`compress_` has done; prints itself.

    Attributes:
        layers: One entry for each targeted layer.
        dense_params: Parameters of the whole model before, shared ones counted once.
        params: The same afterwards.
        seconds: What it took.
    """

    layers: tuple[CompressedLayer, ...]
    dense_params: int
    params: int
    seconds: float

    @property
    def share(self) -> float:
        """Parameters of the whole model afterwards, in units of those before."""
        return self.params / self.dense_params

    def __str__(self) -> str:
        rows = [
            (
                layer.name or "(model)",
                f"{layer.dense_params:,}",
                f"{layer.params:,}",
                "dense" if layer.rank is None else str(layer.rank),
                f"{layer.loss:.3g}",
            )
            for layer in self.layers
        ]
        header = ("layer", "dense", "now", "rank", "predicted loss")
        return f"{text_table('linear layers', header, rows)}\n{self.summary()}"

    __repr__ = __str__

    def summary(self) -> str:
        """Return a line of totals."""
        kept = sum(layer.rank is None for layer in self.layers)
        return (
            f"whole model: {self.params:,} parameters of {self.dense_params:,} ({self.share:.1%}), "
            f"{kept} of {len(self.layers)} layers stay dense, {self.seconds:.0f} s"
        )


def compress_(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    budget: float,
    loss_fn: LossFn | None = None,
    target_modules: str | list[str] = "all-linear",
    exclude_modules: str | list[str] | None = None,
) -> Compression:
    """Replace linear layers of a trained model in place by low-rank ones that cost least loss.

    Of each layer the second moments of inputs and of the loss' gradients are gathered over the
    calibration data; they weigh errors of its weight by what these do to the loss, and make the
    directions of all layers comparable. One price for a parameter then chooses the ranks, and which
    layers stay dense. The result has :class:`~comera.TTLinear` layers of order 1 with open gates,
    which can be trained on, and saved as any other.

    Args:
        model: Any model with ``nn.Linear`` layers.
        calibration: Batches as ``loss_fn`` takes them, of the kind of data the model is for. Some
            ten thousand rows (tokens) are enough; they are read once.
        budget: Parameters of the whole model afterwards, in units of those now; in (0, 1).
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss. If None, batches are mappings
            as models of Hugging Face take them, labels included, and the model gives its loss.
        target_modules: Which layers, as :class:`~comera.TTConfig` has it.
        exclude_modules: Which not, likewise. Layers whose weight another module holds too, as an
            output layer tied to its embedding, are left alone.

    Returns:
        The ranks chosen and what they are predicted to cost.

    Raises:
        ValueError: If the budget is out of range or out of reach, no layer matches, there is no
            batch, a loss is not finite, or a targeted layer is never called. The model is then
            unchanged.

    Example::

        done = comera.compress_(model, loader, budget=0.8)
        print(done)

    Source: SVD-LLM (arXiv 2403.07378), with gradients and one budget for all layers.
    """
    if isinstance(budget, bool) or not 0 < budget < 1:
        raise ValueError(f"budget={budget!r} must be between 0 and 1: the share of parameters kept")
    begun = time.monotonic()
    layers = _layers(model, target_modules, exclude_modules)
    moments = gather_moments(model, layers, calibration, loss_fn or _own_loss)
    dense_params = sum(param.numel() for param in model.parameters())
    other = dense_params - sum(layer.weight.numel() for layer in layers.values())
    room = math.floor(budget * dense_params) - other
    if room <= 0:
        raise ValueError(
            f"budget={budget}: {other:,} of {dense_params:,} parameters are in layers that are no "
            "target; nothing is left for the targets"
        )
    # Each layer's moments go as its decomposition comes, which is no larger.
    found = {n: whitened_svd(layer.weight, moments.pop(n)) for n, layer in layers.items()}
    choices = [_choice(layer, found[name]) for name, layer in layers.items()]
    ranks = allocate(choices, room)
    replacements = {
        name: _low_rank(layer, found[name], rank)
        for (name, layer), rank in zip(layers.items(), ranks, strict=True)
        if rank is not None
    }
    swap_layers_(model, {id(layers[name]): new for name, new in replacements.items()})
    made = tuple(
        CompressedLayer(
            name, choice.dense, choice.size(rank), rank,
            0.0 if rank is None else found[name].loss(rank),
        )
        for name, choice, rank in zip(layers, choices, ranks, strict=True)
    )  # fmt: skip
    params = sum(param.numel() for param in model.parameters())
    return Compression(made, dense_params, params, time.monotonic() - begun)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch of type {type(batch).__name__} needs a loss_fn(model, batch); without one, "
            "batches are mappings with labels, as models of Hugging Face take them"
        )
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ValueError(
            f"the model gives no loss for a batch with {listed(sorted(map(str, batch)))}: add "
            "labels, or pass loss_fn(model, batch)"
        )
    return loss


def _layers(
    model: nn.Module, targets: str | list[str], exclude: str | list[str] | None
) -> dict[str, nn.Linear]:
    """Find the layers to compress; those that share their weight are named and left out."""
    config = TTConfig(target_modules=targets, exclude_modules=exclude, init="svd")
    found: dict[str, nn.Linear] = {}
    shared: list[str] = []
    linear = find_targets(model, config, lambda module, _: isinstance(module, nn.Linear))
    for names, modules in tied_groups(linear):
        if len(modules) > 1 or other_holders(model, modules):
            shared += names
        else:
            found[names[0]] = modules[0]  # type: ignore[assignment]
    if shared:
        log.warning("compress_ leaves %s dense: another module holds the weight", listed(shared))
    if "" in found:
        raise ValueError("the model is itself a linear layer: put it into a module to replace it")
    if not found:
        raise ValueError("every targeted layer shares its weight with another module")
    return found


def _choice(layer: nn.Linear, found: WhitenedSVD) -> Choice:
    out_features, in_features = layer.weight.shape
    each = in_features + out_features + 1  # and a gate
    return Choice(found.losses_K.cpu(), layer.weight.numel(), each)


@torch.no_grad()
def _low_rank(layer: nn.Linear, found: WhitenedSVD, rank: int) -> TTLinear:
    out_features, in_features = layer.weight.shape
    left, right = found.factors(rank)
    made = TTLinear(
        in_features, out_features, layer.bias is not None, "meta", layer.weight.dtype,
        rank=rank, order=1,
    ).to_empty(device=layer.weight.device)  # fmt: skip
    made.set_cores_([right.T[None].contiguous(), left.T[:, :, None].contiguous()])
    if layer.bias is not None:
        made.bias.copy_(layer.bias)  # type: ignore[union-attr]
    made.freeze_like_(layer)
    return made.train(layer.training)
