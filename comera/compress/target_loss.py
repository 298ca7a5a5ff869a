"""The smallest size at which a model's measured loss stays below a bound."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from comera.compress.compressed_layers import CompressedLayer
from comera.compress.linear_targets import Layer
from comera.compress.sensitivity import Sensitivity

log = logging.getLogger("comera")

_TRIES = 7
"""Sizes that are tried: the answer is within a hundredth of the range."""


def smallest_share(
    model: nn.Module,
    layers: Mapping[str, Layer],
    found: Sensitivity,
    evaluate: Callable[[nn.Module], float],
    max_loss: float,
) -> tuple[float, float]:
    """Find by bisection the smallest share of parameters with a loss of at most ``max_loss``.

    The loss is measured with the truncated weights in the place of the dense ones, which come back
    afterwards.

    Args:
        model: The dense model.
        layers: Those of it that would be replaced, by name.
        found: What is known of them.
        evaluate: The loss of a model.
        max_loss: What it may be.

    Returns:
        The share, and the loss there.

    Raises:
        ValueError: If the dense model's loss is higher, or no smaller size has been found.
    """
    best = measured(evaluate, model)
    if not best <= max_loss:
        raise ValueError(
            f"max_loss={max_loss}: the dense model itself has a loss of {best:.6g} in evaluate"
        )
    low, high = found.least() / found.model_params, 1.0
    loss = best
    for _ in range(_TRIES):
        share = (low + high) / 2
        with _truncated(layers, found, found.choose(share)):
            loss = measured(evaluate, model)
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


def measured(evaluate: Callable[[nn.Module], float], model: nn.Module) -> float:
    """Return the loss that ``evaluate`` gives, without gradients.

    Raises:
        ValueError: If it is no finite number.
    """
    with torch.no_grad():
        loss = float(evaluate(model))
    if not math.isfinite(loss):
        raise ValueError(f"evaluate gave {loss}; it must be a finite number, lower for better")
    return loss


@contextmanager
def _truncated(
    layers: Mapping[str, Layer], found: Sensitivity, made: Sequence[CompressedLayer]
) -> Iterator[None]:
    """Put products of factors into weights for a while."""
    before = {name: layer.weight.data for name, layer in layers.items()}
    try:
        for one, layer in zip(made, found.layers, strict=True):
            if one.rank is not None:
                left, right = layer.whitened.factors(one.rank)
                product, weight = left @ right, layers[one.name].weight
                is_table = isinstance(layers[one.name], nn.Embedding)
                weight.data = (product.T if is_table else product).to(weight.dtype)
        yield
    finally:
        for name, data in before.items():
            layers[name].weight.data = data
