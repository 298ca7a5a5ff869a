"""Factors of the learning rate of a layer's cores, from shapes alone.

A step moves all cores of a layer, and the weight that they contract to by about the sum of what
each of them brings. With K cores of spectral norm g each, a step of norm s of one core moves the
weight by ``s * g ** (K - 1)``: more the wider the layer is, and more for wide bonds. What
activations need is a change of spectral norm ``sqrt(out / in)`` whatever the width (Yang, Simon and
Bernstein, arXiv 2310.17813). Models of widths 128 to 512 want a change that falls with the root of
``in`` besides (``docs/experiments.md``). The factor is the one over the other.
"""

import math

import torch

from comera.nn.linear_base import CompressedLinear
from comera.optim.muon import STEP_SIZE, block_step, core_matrix

_TARGET, _OF_BLOCKS, _AT_WIDTH = 12.0, 6.0, 256
"""Spectral norm of a step of a square layer of this width, in learning rates, all cores together.

About what it is with bonds of 8, 16, 52, 16 and 8 without a factor, so that the rates that were
found there stay. Blocks do best at half of it: their steps are large in every direction.
"""


def contracted_scale(layer: CompressedLinear) -> float:
    """Return the factor of the learning rate of a layer's cores.

    It follows from modes and from the ranks that the layer was built with, so that it is the same
    after truncation and in another process, and from the norm of fresh orthonormal cores: weights
    that are trained already may be larger or smaller.
    """
    started = layer.shape.of_ranks(layer.start_ranks)
    if 0 in started.ranks:  # a weight that has vanished moves by no rate
        return 1.0
    shapes = [torch.Size(shape) for shape in started.core_shapes]
    if not layer.is_chain:
        rank = min(layer.in_features, layer.out_features)
        target, steps = _OF_BLOCKS, [block_step(shape) for shape in shapes]
    else:
        rank = started.ranks[started.split - 1]
        target, steps = _TARGET, [math.sqrt(max(core_matrix(shape))) for shape in shapes]
    norm = math.sqrt(layer.out_features / (3 * rank))  # of the weight, see TTLinear
    others = norm ** (1 - 1 / len(shapes))
    # Changes by different cores hardly agree in direction: their squares add up.
    moved = STEP_SIZE * math.sqrt(sum(step * step for step in steps)) * others
    return target * math.sqrt(_AT_WIDTH * layer.out_features) / layer.in_features / moved
