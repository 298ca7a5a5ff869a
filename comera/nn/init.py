"""Draw the cores of a tensor train so that what they stand for has the right scale.

Independent normal cores give entries of the right variance but a lopsided matrix: a product of
normal factors has few large singular values, and its gradients differ tenfold between cores. A
256 by 256 weight with a middle bond of 96 has a stable rank of 10 that way. Cores that are
orthonormal from both ends towards the middle bond have 96 equal singular values, and gradients of
one size. ``docs/experiments.md`` has what either does to training.
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
