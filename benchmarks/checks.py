"""Check, before any timing, that compressed layers compute what their dense weights do.

Outputs and gradients are those of the batch that will be timed, at some of its rows: the others get
an upstream gradient of zero. The reference is computed in float64 from the same cores.
"""

import contextlib
import copy
import math
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from comera.extras import listed
from comera.nn.batched_contraction import BatchedContraction
from comera.nn.convert import densify_
from comera.nn.embedding import TTEmbedding
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.table import HotRows

_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative error, by the dtype that is timed."""

_VANISHING = 1e-9  # size of a reference that is rounding alone, over the median one
_ROWS = 128

Pairs = dict[str, tuple[Tensor, Tensor]]


class DisagreementError(RuntimeError):
    """A compressed layer does not compute what its dense one does."""


def relative_errors(pairs: Pairs) -> dict[str, float]:
    """Return the norm of each difference over the norm of the reference.

    It is infinite if shapes differ or a number is not finite. A reference that vanishes, as the
    gradient of a key's bias does, is replaced by the median size of all references.
    """
    usual = median(_size(reference) for _, reference in pairs.values())

    def error(own: Tensor, reference: Tensor) -> float:
        if own.shape != reference.shape:
            return math.inf
        size, off = _size(reference), _size(own.double() - reference.double())
        found = off / (size if size > _VANISHING * usual else usual)
        return found if math.isfinite(found) else math.inf

    with torch.no_grad():
        return {name: error(*pair) for name, pair in pairs.items()}


def agreement(
    what: str, pairs: Pairs, dtype: torch.dtype, against: str = "dense in float64"
) -> str:
    """Return a line about tensors that agree with their references, or raise the error."""
    errors, allowed = relative_errors(pairs), _ALLOWED[dtype]
    off = {name: error for name, error in errors.items() if not error <= allowed}
    if off:
        wrong = ", ".join(f"{name} by {error:.1e}" for name, error in off.items())
        raise DisagreementError(
            f"{what} is not timed: it disagrees with {against}. "
            f"Off are {wrong} (relative error, at most {allowed:.0e} is allowed)"
        )
    return (
        f"{what} agrees with {against} to {max(errors.values()):.1e} (allowed {allowed:.0e}): "
        f"{listed(list(errors), most=2)}"
    )


def check_model(
    what: str, model: nn.Module, inputs: tuple[Tensor, ...], most: int = _ROWS, **settings: Any
) -> str:
    """Compare a layer or a model with its dense one, at most ``most`` rows of a batch.

    The gradient of the first input is compared if it needs one. ``settings`` are keywords of
    ``forward``. The model is left in training mode.

    Raises:
        DisagreementError: If an output or a gradient is off.
    """
    model.eval()
    rows = _some(inputs[0].shape[0], most).to(inputs[0].device)
    is_layer = isinstance(model, TensorTrainModule)
    with contextlib.nullcontext() if is_layer else BatchedContraction(model):
        own, toward = _outputs(model, inputs, rows, None, settings)
    exact = copy.deepcopy(model).double()
    dense = densify_(copy.deepcopy(exact))
    first = inputs[0].detach()[rows]
    if first.is_floating_point():
        first = first.double().requires_grad_()
    picked = (first, *(part[rows] for part in inputs[1:]))
    reference, _ = _outputs(dense, picked, slice(None), toward.double(), settings)
    for name, layer in tensor_trains(exact).items():
        prefix = f"{name}." if name else ""
        grad = reference.pop(_gradient_of(f"{prefix}weight"))
        parts = dict(layer.named_parameters())
        parts = {k: v for k, v in parts.items() if k.startswith(("cores.", "gates."))}
        leaves, dense_weight = list(parts.values()), layer.dense_weight()
        found = torch.autograd.grad(dense_weight, leaves, grad, materialize_grads=True)
        names = (_gradient_of(prefix + part) for part in parts)
        reference |= dict(zip(names, found, strict=True))
    if _INPUT in own:
        own[_INPUT] = own[_INPUT][rows]
    model.train()
    pairs = {name: (value, reference[name]) for name, value in own.items()}
    return agreement(what, pairs, next(model.parameters()).dtype)


def check_table(layer: TTEmbedding, indices: Tensor) -> str:
    """Compare a table with :class:`RowByRow`, at some of the indices, or raise the error."""
    rows = _some(indices.shape[0], _ROWS).to(indices.device)
    own, toward = _outputs(layer, (indices,), rows, None, {})
    exact = RowByRow(copy.deepcopy(layer).double())
    reference, _ = _outputs(exact, (indices[rows],), slice(None), toward.double(), {})
    expected = {name.replace(" layer.", " "): value for name, value in reference.items()}
    pairs = {name: (value, expected[name]) for name, value in own.items()}
    what = f"{type(layer).__name__} {layer.num_embeddings} x {layer.embedding_dim}"
    return agreement(what, pairs, layer.cores[0].dtype)


_INPUT = "the gradient of the input"


def _gradient_of(name: str) -> str:
    return f"the gradient of {name}"


def _outputs(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    rows: Tensor | slice,
    toward: Tensor | None,
    settings: dict[str, Any],
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the output at some rows and all gradients by name, and the upstream gradient."""
    y = model(*inputs, **settings)[rows]
    toward = torch.randn_like(y) if toward is None else toward
    leaves: dict[str, Tensor] = {_INPUT: inputs[0]} if inputs[0].requires_grad else {}
    leaves |= {_gradient_of(name): param for name, param in model.named_parameters()}
    grads = torch.autograd.grad(y, list(leaves.values()), toward, materialize_grads=True)
    return {"the output": y.detach(), **dict(zip(leaves, grads, strict=True))}, toward


class RowByRow(nn.Module):
    """Reference lookup in a tensor train, by a slice of every core for every index."""

    def __init__(self, layer: TTEmbedding) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, indices: Tensor) -> Tensor:
        layer = self.layer
        indices = layer._kept_at(indices)
        digits, rest = [], (indices - layer.hot_rows).clamp(min=0)
        for mode in reversed(layer.shape.row_modes):
            digits.append(rest % mode)
            rest = rest // mode
        like = layer.cores[0]
        made = torch.ones(len(indices), 1, 1, dtype=like.dtype, device=like.device)
        for core, digit in zip(layer.gated_cores(), reversed(digits), strict=True):
            made = torch.einsum("bpl,lbqr->bpqr", made, core[:, digit]).flatten(1, 2)
        cold = made[:, : layer.embedding_dim, 0]
        if layer.hot is None:
            return cold
        hot = layer.hot.dense_weight() if isinstance(layer.hot, HotRows) else layer.hot
        is_hot = (indices < layer.hot_rows).unsqueeze(1)
        return torch.where(is_hot, hot[indices.clamp(max=layer.hot_rows - 1)], cold)


def _some(count: int, most: int) -> Tensor:
    """Choose at most ``most`` of ``count`` rows, evenly spaced, the first and the last included."""
    return torch.linspace(0, count - 1, min(count, most)).round().long().unique()


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())
