"""Layers made smaller that make up for what layers before them, made smaller, let through.

A layer was approximated for the inputs of the dense model. Once the layers before it are replaced
it gets others. Its left factor is then fitted anew, by least squares, so that what it makes of the
inputs it now gets comes close to what the dense layer makes of those it had. Each batch passes the
dense model and then the smaller one; in the latter every layer takes the batch into its sums,
solves for its factor and answers with that, so that the layers after it see what it will let
through. Sources: the sequential update of SVD-LLM (arXiv 2403.07378), towards the dense model's
outputs as in GPTAQ (arXiv 2504.02692), and recursive least squares.

Shape suffixes: N = rows, I = input width, O = output width, R = rank.

Tensor trains of a higher order in the place of two factors, where they lose less.

The best two factors of a rank are known whatever the metric is. The best longer train is not: roots
of moments mix the modes of a side, so that a train of the whitened weight is no train of the
weight. Here the weight is cut to a higher rank in the metric, and only the split of its factors
into modes, by TT-SVD, knows nothing of it; what both lose is then measured in the metric.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.compress.allocate import CompressedLayer
from comera.compress.layer_moments import LossFn, evaluating
from comera.compress.sensitivity import LayerSensitivity
from comera.compress.whitened import WhitenedSVD, raised_loss
from comera.extras import listed
from comera.nn.decompose import decompose_matrix
from comera.ops.context import without_autocast
from comera.ops.linear.tt_linear import tt_to_dense
from comera.shapes import TTShape

log = logging.getLogger("comera")

_PRIOR_ROWS = 32768
"""As so many rows of data counts the factor that was found for the dense model's inputs."""


class FittedLayer:
    """A linear layer as two factors, of which the left one follows the data.

    What ``right_RI`` makes of the dense model's inputs has mean squares of one. So the factor found
    for these counts as a multiple of the unit matrix beside the sums of the data: their matrix has
    no eigenvalue below it, and least squares are well posed however few rows there are.

    Args:
        layer: The dense layer; its bias stays.
        found: The decomposition of its weight.
        rank: How many directions are kept.
    """

    def __init__(self, layer: nn.Linear, found: WhitenedSVD, rank: int) -> None:
        self.first_OR, self.right_RI = found.spread_factors(rank)
        self.left_OR, self.bias = self.first_OR, layer.bias
        same = torch.eye(rank, dtype=self.left_OR.dtype, device=self.left_OR.device)
        self.inner_RR, self.cross_RO = _PRIOR_ROWS * same, torch.zeros_like(self.left_OR.T)

    def __call__(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        """Return the layer's output, ``(*, O)``, fitted to what is wanted as well, if that is."""
        with without_autocast(x):
            made = self._fitted(x, wanted)
        return made.to(x.dtype if wanted is None else wanted.dtype)

    def _fitted(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        z_NR = F.linear(x.to(self.right_RI.dtype), self.right_RI).flatten(0, -2)
        if wanted is not None:
            missing_NO = wanted.flatten(0, -2).to(z_NR.dtype) - z_NR @ self.first_OR.T
            if self.bias is not None:
                missing_NO -= self.bias.to(z_NR.dtype)
            self.inner_RR.addmm_(z_NR.T, z_NR)
            self.cross_RO.addmm_(z_NR.T, missing_NO)
            root, problem = torch.linalg.cholesky_ex(self.inner_RR.double())
            if problem or not bool(torch.isfinite(root).all()):
                raise ValueError("outputs of layers overflow while later ones are fitted to them")
            change = torch.cholesky_solve(self.cross_RO.double(), root)
            self.left_OR = self.first_OR + change.T.to(self.first_OR)
        made = z_NR @ self.left_OR.T
        if self.bias is not None:
            made += self.bias.to(made.dtype)
        return made.unflatten(0, x.shape[:-1])


@torch.no_grad()
def correct_factors(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    fitted: Mapping[str, FittedLayer],
    batches: Iterable[Any],
    loss_fn: LossFn,
) -> None:
    """Fit left factors to what the dense model's layers answer, batch by batch, forward only.

    The model is left as it was.

    Args:
        model: The dense model.
        layers: Its layers, by name, at least those to be fitted.
        fitted: What will replace them; their ``left_OR`` change.
        batches: What ``loss_fn`` takes.
        loss_fn: Called for what it makes the model do.

    Raises:
        ValueError: If there is no batch, or an output is not finite.
    """
    layers = {name: layers[name] for name in fitted}
    count = 0
    strays: set[str] = set()
    with evaluating(model):
        for batch in batches:
            outputs: dict[str, list[Tensor]] = {name: [] for name in layers}
            with _recorded(layers, outputs):
                loss_fn(model, batch)
            with _replaced(layers, fitted, outputs, strays):
                loss_fn(model, batch)
            count += 1
    if not count:
        raise ValueError("there is no batch to correct the layers with")
    if strays:
        log.warning(
            "compress_ did not correct %s by all batches: with other layers replaced, the model "
            "gives it other rows", listed(sorted(strays)),
        )  # fmt: skip


@contextmanager
def _recorded(layers: Mapping[str, nn.Module], outputs: Mapping[str, list[Tensor]]) -> Iterator:
    """Collect what layers answer, call by call."""

    def note(name: str) -> Callable[..., None]:
        # Copies: models may write into what layers return, as nn.ReLU(inplace=True) does.
        return lambda layer, args, output: outputs[name].append(output.clone())

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced(
    layers: Mapping[str, nn.Module],
    fitted: Mapping[str, FittedLayer],
    outputs: Mapping[str, list[Tensor]],
    strays: set[str],
) -> Iterator[None]:
    """Let factors answer in the place of layers, and learn from what these answered."""

    def forward(name: str) -> Callable[[Tensor], Tensor]:
        def answer(input: Tensor) -> Tensor:
            wanted = outputs[name].pop(0) if outputs[name] else None
            if wanted is None or wanted.shape[:-1] != input.shape[:-1]:
                strays.add(name)
                wanted = None
            return fitted[name](input, wanted)

        return answer

    for name, layer in layers.items():
        layer.forward = forward(name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


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
