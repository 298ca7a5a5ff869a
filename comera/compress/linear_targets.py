"""The linear layers of a model that can be compressed, and the loss where none is given."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from comera.names import listed
from comera.nn.config import TTConfig
from comera.nn.targets import find_targets, other_holders, tied_groups

log = logging.getLogger("comera")


def linear_targets(
    model: nn.Module, targets: str | list[str], exclude: str | list[str] | None
) -> dict[str, nn.Linear]:
    """Find the layers to compress; those that share their weight are named and left out.

    Raises:
        ValueError: If none is left, or the model is itself one.
    """
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


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of Hugging Face gives by itself.

    Raises:
        ValueError: If the batch is no mapping, or the model gives none.
    """
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
