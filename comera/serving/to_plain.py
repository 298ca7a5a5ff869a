"""Turn a compressed model into one of torch's layers alone, which runs where comera is not."""

import logging
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from comera.extras import listed
from comera.nn.block_linear import BTTLinear
from comera.nn.forms import from_torch, split_names
from comera.nn.module import TensorTrainModule, check_model
from comera.nn.swap import swap_layers_
from comera.nn.tied import TiedTTLinear
from comera.serving.freeze import contracted
from comera.serving.frozen_layers import (
    Frozen,
    FrozenEmbeddingBag,
    FrozenHead,
    FrozenLinear,
    FrozenTable,
)

log = logging.getLogger("comera")


def to_plain_(model: nn.Module) -> nn.Module:
    """Replace every tensor-train layer by layers of torch alone, in place.

    Cores are contracted once. A linear layer becomes ``nn.Sequential`` of two thin ``nn.Linear``,
    or one where two would hold more numbers, and a 1 x 1 convolution two such. A table becomes a
    ``torch.fx.GraphModule`` that multiplies rows of two small ``nn.Embedding``, or ``nn.Embedding``
    and ``nn.EmbeddingBag`` themselves where those would hold more. A :class:`~comera.BTTLinear`
    stays one, of operations of torch's, and is named in the log. What is tied stays tied. The
    model computes the same, to rounding, and can be trained further. ``torch.export``, ONNX,
    ``torch.jit.trace`` and AOTInductor take it, and a process without this package can run what
    they make.

    Args:
        model: One that was frozen is taken too; its weights stay frozen.

    Returns:
        The model; if it is itself a tensor-train layer, what replaces it.

    Raises:
        ValueError: If a layer is sharded.
        TypeError: If ``model`` is no module.

    Example::

        comera.to_plain_(model)
        torch.export.save(torch.export.export(model.eval(), (tokens,)), "model.pt2")
    """
    check_model(model)
    apart = split_names(model)
    if apart:
        log.warning(
            "to_plain_: the layers of %s are torch's now, and what calls them is still of comera: "
            "a program exported from the model runs without it, the module itself does not",
            listed(apart),
        )
    blocks = [name or "the model" for name, m in model.named_modules() if isinstance(m, BTTLinear)]
    if blocks:
        log.warning(
            "to_plain_ leaves %s as block tensor trains, which torch has no layer for: a program "
            "exported from the model runs without comera, the module itself does not",
            listed(blocks),
        )
    trained = {
        id(layer): any(param.requires_grad for param in layer.parameters())
        for layer in model.modules()
        if isinstance(layer, (TensorTrainModule, TiedTTLinear))
    }
    frozen = contracted(model, None)
    frozen |= {id(layer): layer for layer in model.modules() if isinstance(layer, Frozen)}
    plain = {key: _plain(layer) for key, layer in frozen.items()}
    for key, layer in plain.items():
        layer.requires_grad_(trained.get(key, False))
    _leave_the_fast_path_(model, plain)
    return swap_layers_(model, plain, biases=False)


def _plain(layer: Any) -> nn.Module:
    """Return torch's layers for a frozen one, on the same parameters."""
    if isinstance(layer, FrozenLinear):
        form = layer.dense_form
        thin = [dense if form is None else from_torch(dense, form) for dense in layer]
        new: Any = thin[0] if layer.rank is None else nn.Sequential(*thin)
    elif isinstance(layer, FrozenHead):
        new = _plain_head(layer) if layer.embedding.is_dense else _traced(layer)
    else:
        new = _plain_table(layer) if layer.is_dense else _traced(layer)
    for name in ("in_features", "out_features", "num_embeddings", "embedding_dim"):
        if not hasattr(new, name) and hasattr(layer, name):
            setattr(new, name, getattr(layer, name))
    return new.train(layer.training)


def _plain_table(table: FrozenTable) -> nn.Module:
    more: dict[str, Any] = {"padding_idx": table.padding_idx, "device": "meta"}
    new_class: Callable[..., nn.Module] = nn.Embedding
    if isinstance(table, FrozenEmbeddingBag):
        new_class = nn.EmbeddingBag
        more |= {"mode": table.mode, "include_last_offset": table.include_last_offset}
    new: Any = new_class(table.num_embeddings, table.embedding_dim, **more)
    new.weight = table.left.weight
    return new


def _plain_head(head: FrozenHead) -> nn.Linear:
    new = nn.Linear(head.in_features, head.out_features, head.bias is not None, "meta")
    new.weight = head.embedding.left.weight  # type: ignore[assignment]
    if head.bias is not None:
        new.bias = head.bias
    return new


def _traced(layer: Frozen) -> fx.GraphModule:
    """Return the operations of a layer as a module of torch's own, on the same parameters."""
    mode, layer.training = layer.training, False  # a frozen layer refuses to train, this one not
    operations = fx.Tracer().trace(layer)
    layer.training = mode
    name = type(layer).__name__.replace("Frozen", "Factored")
    return fx.GraphModule(layer, operations, name)


def _leave_the_fast_path_(model: nn.Module, plain: dict[int, nn.Module]) -> None:
    """Have encoder layers of torch call their linear layers, whose weights they would read."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = module.linear1, module.linear2
            if any(isinstance(plain.get(id(layer)), nn.Sequential) for layer in inside):
                module.activation_relu_or_gelu = 0
