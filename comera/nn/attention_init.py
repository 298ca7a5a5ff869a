"""Start attention so that every position looks first at what is like it.

With independent ones a fresh model attends to everything alike, and has to find out that a word in
one sentence and the same word in another have to do with each other. That search ends at steps that
differ by hundreds between seeds. ``docs/experiments.md`` has what it does to training.
"""

import torch
from torch import nn

_PAIRS = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"))
"""Names of the two projections in BERT, LLaMA and DistilBERT, and in all named after them."""


@torch.no_grad()
def init_keys_as_queries_(model: nn.Module) -> nn.Module:
    """Copy the projection of queries over that of keys, in every attention layer of a fresh model.

    Then a score is ``|W x|^2`` where a position looks at its own kind, and smaller elsewhere: a
    model that has to compare sentences does so from the first step. After Trockman and Kolter
    (arXiv 2305.09828), who start ``W_q^T W_k`` near a multiple of the identity. The weights stay
    two, which training moves apart. For encoders: a causal language model wants the next word and
    not the like of this one.

    Args:
        model: Attention layers are modules with children ``query`` and ``key``, ``q_proj`` and
            ``k_proj``, or ``q_lin`` and ``k_lin``, dense or in tensor-train form. Call it after
            ``tensorize_``, which may draw new cores.

    Returns:
        ``model``.

    Raises:
        ValueError: If the model has no such layers, or one with queries and keys of different
            shapes, as grouped-query attention has; nothing is changed then.
    """
    pairs = [
        (f"{name}.{key}" if name else key, module.get_submodule(query), module.get_submodule(key))
        for name, module in model.named_modules()
        for query, key in _PAIRS
        if {query, key} <= {child for child, _ in module.named_children()}
    ]
    if not pairs:
        names = ", ".join(f"{query} and {key}" for query, key in _PAIRS)
        raise ValueError(f"{type(model).__name__} has no layer with children {names}")
    for name, query, key in pairs:
        if _shapes(query) != _shapes(key):
            raise ValueError(
                f"{name} is {key} and its queries are {query}: keys can only begin as a copy of "
                "queries of one shape"
            )
    for _, query, key in pairs:
        key.load_state_dict(query.state_dict())
    return model


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in layer.state_dict().items()}
