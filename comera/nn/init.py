"""Initial cores with the right scale of the weight they stand for, and queries equal to keys.

Independent normal cores give entries of the right variance but a lopsided matrix: a product of
normal factors has few large singular values, and its gradients differ tenfold between cores. Cores
that are orthonormal from both ends towards the middle bond have equal singular values there, and
gradients of one size. ``docs/experiments.md`` compares both in training.

Attention whose keys begin as copies of its queries looks at similar positions from the first step
on; with independent projections it has to learn this, and runs differ by hundreds of steps.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Init = Literal["orthogonal", "normal"]


@torch.no_grad()
def init_(cores: Sequence[Tensor], split: int, std: float, init: Init) -> None:
    """Fill cores by the method that ``init`` names.

    Raises:
        ValueError: If there is none.
    """
    if init == "orthogonal":
        orthogonal_(cores, split, std)
    elif init == "normal":
        normal_(cores, std)
    else:
        raise ValueError(f"init={init!r} must be 'orthogonal' or 'normal'")


@torch.no_grad()
def normal_(cores: Sequence[Tensor], std: float) -> None:
    """Fill cores with independent normal numbers of one spread.

    An entry of the product is a sum over ``prod(ranks)`` paths of products of one entry a core, so
    its variance is ``prod(ranks) * var ** num_cores``.

    Args:
        cores: ``(left bond, mode(s), right bond)`` each.
        std: Expected root mean square entry of their product.
    """
    paths = max(1, math.prod(core.shape[-1] for core in cores))
    for core in cores:
        nn.init.normal_(core, std=(std**2 / paths) ** (0.5 / len(cores)))


@torch.no_grad()
def orthogonal_(cores: Sequence[Tensor], split: int, std: float) -> None:
    """Fill cores with random orthonormal ones, times one factor each.

    Args:
        cores: ``(left bond, mode(s), right bond)`` each.
        split: Cores before it are orthonormal over everything but their right bond, the others
            over everything but their left bond.
        std: Root of the mean square entry of their product, met exactly.
    """
    drawn = [_orthonormal(core, k < split) for k, core in enumerate(cores)]
    entries = math.prod(math.prod(core.shape[1:-1]) for core in cores)
    factor = (std / (_squared_norm(drawn) / entries).sqrt()) ** (1 / len(drawn))
    for core, values in zip(cores, drawn, strict=True):
        core.copy_(factor * values)


def _orthonormal(like: Tensor, to_the_right: bool) -> Tensor:
    """Draw values of the core's shape, orthonormal over all but its right or its left bond.

    As near to that as they can be where the bond is too wide.
    """
    shape = like.shape
    sides = (-1, shape[-1]) if to_the_right else (shape[0], -1)
    wide = torch.promote_types(like.dtype, torch.float32)
    return nn.init.orthogonal_(like.new_empty(shape, dtype=wide).reshape(sides)).reshape(shape)


def _squared_norm(cores: Sequence[Tensor]) -> Tensor:
    """Compute the squared norm of the product of all cores, a scalar on their device."""
    gram = cores[0].new_ones(1, 1)
    for core in cores:
        core = core.flatten(1, -2)
        gram = torch.einsum("ab,anr,bns->rs", gram, core, core)
    return gram.squeeze()


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
