"""Factors of the learning rate of a layer's cores, from shapes alone.

A step moves all cores of a layer, and the weight that they contract to by about the sum of what
each of them brings. With K cores of spectral norm g each, a step of norm s of one core moves the
weight by ``s * g ** (K - 1)``: more the wider the layer is, and more for wide bonds. What
activations need is a change of spectral norm ``sqrt(out / in)`` whatever the width (Yang, Simon and
Bernstein, arXiv 2310.17813). The factor is the one over the other.
"""

import math

import torch

from comera.nn.linear import TTLinear
from comera.optim.muon import STEP_SIZE, core_matrix
from comera.shapes import TTShape

_TARGET = 12.0
"""Spectral norm of a step of a square layer, in learning rates, all cores together.

About what it is at width 256 with bonds of 8, 16, 52, 16 and 8 without a factor, so that the rates
that were found there stay.
"""


def contracted_scale(layer: TTLinear) -> float:
    """Return the factor of the learning rate of a layer's cores.

    It follows from modes and from the ranks that the layer was built with, so that it is the same
    after truncation and in another process, and from the norm of fresh orthonormal cores: weights
    that are trained already may be larger or smaller.
    """
    started = TTShape(layer.shape.in_modes, layer.shape.out_modes, layer.start_ranks)
    if 0 in started.ranks:  # a weight that has vanished moves by no rate
        return 1.0
    middle = started.ranks[started.split - 1]
    shapes = started.core_shapes
    count = len(shapes)
    norm = math.sqrt(layer.out_features / (3 * middle))  # of the weight, see TTLinear
    others = norm ** ((count - 1) / count)
    # Changes by different cores hardly agree in direction: their squares add up.
    steps = math.sqrt(sum(max(core_matrix(torch.Size(shape))) for shape in shapes))
    moved = STEP_SIZE * steps * others
    return _TARGET * math.sqrt(layer.out_features / layer.in_features) / moved
