"""Check, before any timing, that compressed layers compute what their dense weights do.

Outputs and gradients are taken at the batch that will be timed, so on the same path, but only of
some of its rows: the others get an upstream gradient of zero. The reference is the dense layer in
float64, from the very same cores.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from comera.extras import listed
from comera.nn.batched_contraction import BatchedContraction
from comera.nn.convert import densify_
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.table import HotRows

_ALLOWED = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
"""Largest relative error, by the dtype that is timed."""

_VANISHING = 1e-9
"""Size of a reference, in units of the median one, that is rounding and nothing else."""

_ROWS = 128
_LARGEST_TABLE = 1 << 26
"""Entries of a table that is formed for comparison; beyond, its rows alone are."""

Pairs = dict[str, tuple[Tensor, Tensor]]
Batch = tuple[Tensor, ...]


class DisagreementError(RuntimeError):
    """A compressed layer does not compute what its dense one does."""


@dataclass(frozen=True)
class Comparison:
    """Relative errors of named tensors.

    Attributes:
        what: The layer or model in words.
        errors: Norm of the difference over the norm of the reference, infinite where the shapes
            differ or a number is not finite. Where the reference vanishes, as the gradient of a
            key's bias does, the median size of all references stands in for its own.
        allowed: The largest that passes.
        against: What the references are, in words.
    """

    what: str
    errors: dict[str, float]
    allowed: float
    against: str

    def verdict(self) -> str:
        """Return one line about tensors that agree.

        Raises:
            DisagreementError: If one does not; the message lists those.
        """
        off = {name: error for name, error in self.errors.items() if not error <= self.allowed}
        if off:
            wrong = ", ".join(f"{name} by {error:.1e}" for name, error in off.items())
            raise DisagreementError(
                f"{self.what} is not timed: it disagrees with {self.against}. "
                f"Off are {wrong} (relative error, at most {self.allowed:.0e} is allowed)"
            )
        return (
            f"{self.what} agrees with {self.against} to {max(self.errors.values()):.1e} "
            f"(allowed {self.allowed:.0e}): {listed(list(self.errors), most=2)}"
        )


def compare(
    what: str, pairs: Pairs, dtype: torch.dtype, against: str = "dense in float64"
) -> Comparison:
    """Compare each tensor with its reference."""
    usual = median(_size(reference) for _, reference in pairs.values())
    errors = {name: _error(own, reference, usual) for name, (own, reference) in pairs.items()}
    return Comparison(what, errors, _ALLOWED[dtype], against)


def compare_linear(layer: TTLinear, x: Tensor) -> Comparison:
    """Compare a layer with its weight at ``x (tokens, in_features)``, which needs a gradient."""
    y = layer(x)
    rows = _some(x.shape[0]).to(x.device)
    toward = torch.zeros_like(y)
    toward[rows] = torch.randn_like(toward[rows])
    own = dict(layer.named_parameters())
    grad_x, *grads = torch.autograd.grad(y, [x, *own.values()], toward, materialize_grads=True)

    exact = copy.deepcopy(layer).double()
    dense = exact.to_dense()
    x_rows = x.detach()[rows].double().requires_grad_()
    y_rows = dense(x_rows)
    y_rows.backward(toward[rows].double())
    expected = _through_weight(exact, _gradient(dense.weight))
    if dense.bias is not None:
        expected["bias"] = _gradient(dense.bias)
    pairs: Pairs = {"the output": (y[rows], y_rows)}
    pairs["the gradient of the input"] = (grad_x[rows], _gradient(x_rows))
    for name, grad in zip(own, grads, strict=True):
        pairs[f"the gradient of {name}"] = (grad, expected[name])
    return compare(
        f"TTLinear {layer.in_features} -> {layer.out_features}", pairs, layer.cores[0].dtype
    )


def compare_table(layer: TTEmbedding | TTEmbeddingBag, indices: Tensor) -> Comparison:
    """Compare a table with its weight at indices: one a row, or ``(bags, indices)``.

    The reference multiplies the slices of each row's cores one after the other. A table that is
    not too large is formed as well.
    """
    y = layer(indices)
    picked = _some(indices.shape[0]).to(indices.device)
    toward = torch.zeros_like(y)
    toward[picked] = torch.randn_like(toward[picked])
    own = dict(layer.named_parameters())
    grads = torch.autograd.grad(y, list(own.values()), toward, materialize_grads=True)

    exact = copy.deepcopy(layer).double()
    some = indices[picked]
    rows = rows_by_cores(exact, some.flatten()).unflatten(0, some.shape)
    y_rows = rows if some.dim() == 1 else rows.sum(1)
    names = dict(exact.named_parameters())
    expected = torch.autograd.grad(
        y_rows, list(names.values()), toward[picked].double(), materialize_grads=True
    )
    pairs: Pairs = {"the output": (y[picked], y_rows)}
    for name, grad, reference in zip(own, grads, expected, strict=True):
        pairs[f"the gradient of {name}"] = (grad, reference)
    if exact.num_dense <= _LARGEST_TABLE:
        pairs["the output, from the dense table,"] = (y[picked], exact.to_dense()(some))
    what = f"{type(layer).__name__} {layer.num_embeddings} x {layer.embedding_dim}"
    return compare(what, pairs, layer.cores[0].dtype)


def compare_model(
    what: str, model: nn.Module, loss_fn: Callable[..., Tensor], batch: Batch, most: int = 2
) -> Comparison:
    """Compare a model without dropout: its loss on ``most`` rows, and every gradient.

    Args:
        what: The model in words.
        model: Left in training mode, without gradients.
        loss_fn: ``loss_fn(model, batch, rows)`` is the mean loss of some rows.
        batch: Tensors with one row a sequence.
        most: How many rows.
    """
    model.eval()
    rows = _some(batch[0].shape[0], most).to(batch[0].device)
    with BatchedContraction(model):
        loss = loss_fn(model, batch, rows)
        loss.backward()
    exact = copy.deepcopy(model).double()
    dense = densify_(copy.deepcopy(exact))
    dense.zero_grad()
    dense_loss = loss_fn(dense, tuple(part[rows] for part in batch), slice(None))
    dense_loss.backward()
    expected = {name: _gradient(param) for name, param in dense.named_parameters()}
    for name, layer in tensor_trains(exact).items():
        through = _through_weight(layer, expected[f"{name}.weight"])
        expected |= {f"{name}.{part}": grad for part, grad in through.items()}
    pairs: Pairs = {"the loss": (loss, dense_loss)}
    for name, param in model.named_parameters():
        pairs[f"the gradient of {name}"] = (_gradient(param), expected[name])
    comparison = compare(what, pairs, next(model.parameters()).dtype)
    model.zero_grad(set_to_none=True)
    model.train()
    return comparison


def _through_weight(layer: TensorTrainModule, grad: Tensor) -> dict[str, Tensor]:
    """Return gradients of cores and gates, given that of the dense weight they make up."""
    parts = {
        name: param
        for name, param in layer.named_parameters()
        if name.startswith(("cores.", "gates."))
    }
    weight = layer.dense_weight()
    found = torch.autograd.grad(weight, list(parts.values()), grad, materialize_grads=True)
    return dict(zip(parts, found, strict=True))


def rows_by_cores(layer: TTEmbedding | TTEmbeddingBag, indices: Tensor) -> Tensor:
    """Read rows of the table, ``(indices, width)``, one core after the other, for autograd."""
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


def _some(count: int, most: int = _ROWS) -> Tensor:
    """Choose at most so many of ``count`` rows, evenly spaced, the first and the last included."""
    return torch.linspace(0, count - 1, min(count, most)).round().long().unique()


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad.clone()


@torch.no_grad()
def _size(tensor: Tensor) -> float:
    """Return the root mean square."""
    return float(tensor.double().square().mean().sqrt())


@torch.no_grad()
def _error(own: Tensor, reference: Tensor, usual: float) -> float:
    if own.shape != reference.shape:
        return math.inf
    size = _size(reference)
    off = _size(own.double() - reference.double())
    error = off / (size if size > _VANISHING * usual else usual)
    return error if math.isfinite(error) else math.inf
