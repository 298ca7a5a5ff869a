"""Draw initial cores for a weight of given scale, and make keys equal to queries.

Orthonormal cores give equal singular values and gradients of equal size, normal cores do neither;
``docs/experiments.md`` compares both.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Init = Literal["orthogonal", "normal"]


def normal_(cores: Sequence[Tensor], std: float) -> None:
    """Fill cores with normal numbers, so that entries of their product have deviation ``std``."""
    paths = max(1, math.prod(core.shape[-1] for core in cores))
    for core in cores:
        nn.init.normal_(core, std=(std**2 / paths) ** (0.5 / len(cores)))


@torch.no_grad()
def orthogonal_(cores: Sequence[Tensor], split: int, std: float) -> None:
    """Fill cores with random orthonormal tensors, each multiplied by a scalar.

    The first ``split`` cores are orthonormal over everything but their right bond, the others over
    everything but their left bond. ``std`` is exactly the root mean square of the entries of the
    cores' product.
    """
    drawn = []
    for k, core in enumerate(cores):  # as orthonormal as they can be where a bond is too wide
        wide = core.new_empty(core.shape, dtype=torch.promote_types(core.dtype, torch.float32))
        matrix = wide.reshape((-1, core.shape[-1]) if k < split else (core.shape[0], -1))
        drawn.append(nn.init.orthogonal_(matrix).reshape(core.shape))
    gram = drawn[0].new_ones(1, 1)  # of the product so far
    for core in (each.flatten(1, -2) for each in drawn):
        gram = torch.einsum("ab,anr,bns->rs", gram, core, core)
    entries = math.prod(math.prod(core.shape[1:-1]) for core in cores)
    factor = (std / (gram.squeeze() / entries).sqrt()) ** (1 / len(drawn))
    for core, values in zip(cores, drawn, strict=True):
        core.copy_(factor * values)


_PAIRS = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"))
"""Names of the two projections in BERT, LLaMA and DistilBERT, and in all named after them."""


@torch.no_grad()
def init_keys_as_queries_(model: nn.Module) -> nn.Module:
    """Copy query projections to key projections, in every attention layer of an untrained model.

    Attention then prefers similar positions from the first step on, which suits encoders that
    compare sentences. After Trockman and Kolter (arXiv 2305.09828).

    Args:
        model: Attention layers are modules with children ``query`` and ``key``, ``q_proj`` and
            ``k_proj``, or ``q_lin`` and ``k_lin``. Call this after ``tensorize_``, which draws
            cores.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no such layers, or queries and keys of different shapes, as in
            grouped-query attention; nothing is changed then.
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
        sizes, wanted = (
            {part: value.shape for part, value in layer.state_dict().items()}
            for layer in (key, query)
        )
        if sizes != wanted:
            raise ValueError(
                f"{name} is {key} and its queries are {query}: keys can only begin as a copy of "
                "queries of one shape"
            )
    for _, query, key in pairs:
        key.load_state_dict(query.state_dict())
    return model
