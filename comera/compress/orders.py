"""Tensor trains of a higher order in the place of two factors, where they lose less.

The best two factors of a rank are known whatever the metric is. The best longer train is not: roots
of moments mix the modes of a side, so that a train of the whitened weight is no train of the
weight. Here the weight is cut to a higher rank in the metric, and only the split of its factors
into modes, by TT-SVD, knows nothing of it; what both lose is then measured in the metric.
"""

import torch
from torch import Tensor

from comera.compress.compressed_layers import CompressedLayer
from comera.compress.sensitivity import LayerSensitivity
from comera.compress.whitened import raised_loss
from comera.nn.decompose import decompose_matrix
from comera.ops.linear.tt_linear import tt_to_dense
from comera.shapes import TTShape

_ORDERS = (2, 3)
_MORE = (1.25, 1.5, 2.0)
"""Middle bonds that are tried, in units of the rank of two factors."""


@torch.no_grad()
def better_train(
    layer: LayerSensitivity, chosen: CompressedLayer
) -> tuple[CompressedLayer, TTShape, list[Tensor]] | None:
    """Return the train of order 2 or 3 that loses least, if that is less than what was chosen.

    Args:
        layer: What is known of the layer, its moments included.
        chosen: Two factors; no train is larger than they are.

    Returns:
        What becomes of the layer, the train's modes and ranks, and its cores; None where the
        factors lose least.
    """
    assert layer.moments is not None, "they were asked for"
    assert chosen.rank is not None, "it is a train already"
    weight = layer.whitened.weight_OI
    out_features, in_features = weight.shape
    best, least = None, chosen.loss
    for order in _ORDERS:
        modes = TTShape.fit(in_features, out_features, rank=1, order=order)
        for middle in sorted({int(more * chosen.rank) for more in _MORE}):
            shape = _largest(modes, middle, chosen.params)
            if shape is None or len(modes.slice_sizes) < 3:
                continue
            left, right = layer.whitened.factors(middle)
            cores = decompose_matrix(left @ right, shape)
            product = tt_to_dense(cores, shape.split)[:out_features, :in_features]
            loss = raised_loss(weight - product.to(weight), layer.moments)
            if loss < least:
                size, rank = _params(shape), shape.ranks[shape.split - 1]
                made = CompressedLayer(layer.name, weight.numel(), size, rank, loss, order)
                least, best = loss, (made, shape, cores)
    return best


def _params(shape: TTShape) -> int:
    return shape.num_params + sum(shape.ranks)  # a gate on each rank


def _largest(modes: TTShape, middle: int, room: int) -> TTShape | None:
    """Return these modes with that middle bond and the others as wide as there is room, or None."""

    def at(side: int) -> TTShape:
        return modes.with_rank(
            [middle if k == modes.split - 1 else side for k in range(len(modes.ranks))]
        )

    low, high = 0, max(modes.max_ranks)
    while low < high:
        side = (low + high + 1) // 2
        low, high = (side, high) if _params(at(side)) <= room else (low, side - 1)
    return at(low) if low else None
