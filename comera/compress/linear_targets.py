"""The layers of a model that can be compressed, and the loss where none is given."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from comera.extras import listed
from comera.nn.targets import TTConfig, find_targets, other_holders, tied_groups

log = logging.getLogger("comera")

Layer = nn.Linear | nn.Embedding


def weight_OI(layer: Layer) -> Tensor:
    """Return what a layer multiplies inputs with; those of a table have a single one in them."""
    return layer.weight.detach().T if isinstance(layer, nn.Embedding) else layer.weight


def linear_targets(
    model: nn.Module,
    targets: str | list[str],
    exclude: str | list[str] | None,
    caller: str | None,
) -> dict[str, Layer]:
    """Find the layers to compress; those that cannot be are left out.

    These are named in the log, as left dense by ``caller``, the function that the user called;
    nothing is said without one.

    Raises:
        ValueError: If none is left, or the model is itself one.
    """
    config = TTConfig(target_modules=targets, exclude_modules=exclude, init="svd")
    found: dict[str, Layer] = {}
    dense: dict[str, list[str]] = {}
    for names, modules in tied_groups(find_targets(model, config, None, caller)):
        layer, why = modules[0], ""
        if len(modules) > 1 or other_holders(model, modules):
            why = "another module holds the weight"
        elif not isinstance(layer, nn.Linear | nn.Embedding):
            why = f"{type(layer).__name__} is not among what it compresses"
        elif isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq):
            why = "rows that share a basis cannot be scaled one by one (max_norm, ...)"
        else:
            found[names[0]] = layer
        if why:
            dense.setdefault(why, []).extend(names)
    for why, names in dense.items():
        if caller:
            log.warning("%s leaves %s dense: %s", caller, listed(names), why)
    if "" in found:
        raise ValueError(
            "the model is itself a linear layer or a table: put it into a module to replace it"
        )
    if not found:
        reasons = "; ".join(f"{listed(names)}: {why}" for why, names in dense.items())
        raise ValueError(f"none of the targeted layers can be compressed ({reasons})")
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
