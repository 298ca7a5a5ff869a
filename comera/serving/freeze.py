"""Run a compressed model without contracting its cores anew in every pass."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera.extras import listed, needed_by
from comera.nn.block_linear import BTTLinear
from comera.nn.embedding import TTEmbeddingBag
from comera.nn.evaluation_mode import evaluation_mode
from comera.nn.linear import TTLinear, TTPointwise
from comera.nn.module import check_unsharded
from comera.nn.swap import swap_layers_
from comera.nn.table import HotRows, TTTable
from comera.nn.tied import TiedTTLinear
from comera.serving.frozen_layers import (
    Frozen,
    FrozenEmbedding,
    FrozenEmbeddingBag,
    FrozenHead,
    FrozenLinear,
    FrozenTable,
    table_factors,
    thin_factors,
)
from comera.shapes import whole_number

log = logging.getLogger("comera")

_WORTH_ITS_MEMORY = 1.1
"""How many times faster a dense layer must be than a smaller one to be taken instead."""

_ROUNDS, _CALLS = 7, 5
"""Timings of each way, the shortest of which counts, and passes within one."""


def freeze_(
    model: nn.Module, *, batch: int = 1, quantize: Literal["int8"] | Any = None
) -> nn.Module:
    """Contract every tensor-train layer once, in place, for a model that is only run from now on.

    A linear layer becomes two thin ones, or a dense one where that takes less memory, or is faster
    at ``batch`` by more than a tenth, as measured here. A table becomes two small ones, of which a
    row is a product. A :class:`~comera.BTTLinear` stays: it is multiplied by its cores as they are.
    The model evaluates afterwards, and a training step through a frozen layer
    raises; save the model before to train it again.

    Args:
        model: Is put into evaluation mode.
        batch: Rows of the input of a linear layer in the passes that should be fast: 1 for
            generating text one token at a time, batch size times length for other models.
        quantize: ``"int8"`` has torchao hold the weights of all linear layers in eight bits; its
            other ways of quantizing, four bits among them, are named by its own configurations.

    Returns:
        The model; if it is itself a tensor-train layer, the layer that replaces it.

    Raises:
        ValueError: If ``batch`` is below one, ``quantize`` is none of these, or a layer is sharded.
        MissingPackageError: If torchao is needed and not installed.

    Example::

        comera.freeze_(model, batch=1)
        with torch.inference_mode():
            logits = model(tokens)
    """
    convert = None if quantize is None else _quantizer(quantize)
    replacements = contracted(model, batch)
    model = swap_layers_(model, replacements, biases=False).eval()
    if convert is not None:
        convert(model)
        left = [name for name, layer in model.named_modules() if isinstance(layer, BTTLinear)]
        if left:
            log.warning(
                "freeze_: quantize=%r leaves %s as they are: a BTTLinear is multiplied by cores",
                quantize, listed(left),
            )  # fmt: skip
    return model


@contextlib.contextmanager
def frozen(model: nn.Module, *, batch: int = 1) -> Iterator[nn.Module]:
    """Run a model frozen inside the context, and with the layers it had afterwards.

    Inside it evaluates. Parameters that are written to inside take effect after it.

    Args:
        model: The model, changed in place meanwhile.
        batch: As for :func:`freeze_`.

    Yields:
        The model; if it is itself a tensor-train layer, a frozen one.

    Example::

        with comera.frozen(model):
            texts = generate(model)
        train_further(model)
    """
    replacements = contracted(model, batch)
    layers = {id(module): module for module in model.modules() if id(module) in replacements}
    with evaluation_mode(model):
        served = swap_layers_(model, replacements, biases=False)
        try:
            yield served.eval()
        finally:
            back = {id(new): layers[key] for key, new in replacements.items()}
            swap_layers_(served, back, biases=False)


def contracted(model: nn.Module, batch: int | None) -> dict[int, nn.Module]:
    """Make the frozen layers of a model, by the ``id`` of the layers they stand for.

    Args:
        model: Is not changed.
        batch: For which they are to be fast; None for small ones.

    Raises:
        ValueError: If ``batch`` is below one, or a layer is sharded.
    """
    _check_batch(batch)
    check_unsharded(model, "freeze_")
    contraction = _Contraction(batch)
    made: dict[int, nn.Module] = {}
    for name, layer in model.named_modules():
        new = contraction.of(name, layer)
        if new is not None:
            made[id(layer)] = new
    contraction.say(len(made))
    return made


class _Contraction:
    """Frozen layers in the making, those on shared cores sharing what was made of them."""

    def __init__(self, batch: int | None) -> None:
        self._batch = batch
        self._shared: dict[int, Any] = {}
        self._gains: dict[object, float] = {}
        self._dense: list[str] = []

    def of(self, name: str, layer: nn.Module) -> Frozen | None:
        """Return what stands for a layer; None for one that is no tensor train."""
        if isinstance(layer, TTTable):
            return self._table(layer)
        if not isinstance(layer, (TTLinear, TiedTTLinear)):
            return None
        thin = self._linear(layer) if isinstance(layer, TTLinear) else self._head(layer)
        if self._gain_of_dense(thin, layer) <= _WORTH_ITS_MEMORY:
            return thin
        self._dense.append(name)
        return _dense(layer)

    def say(self, count: int) -> None:
        """Log what the layers have become."""
        where = "" if self._batch is None else f" at batch={self._batch}, as measured"
        log.info(
            "contracted %d layers; dense%s: %s",
            count, where, listed(self._dense, most=8) or "none",
        )  # fmt: skip

    def _linear(self, layer: TTLinear) -> FrozenLinear:
        key = id(layer.cores)
        if key not in self._shared:
            left, right = thin_factors(layer)
            self._shared[key] = _kept(left.T), _kept(right.T)
        first, second = self._shared[key]
        new = _frozen_linear(layer, len(first))
        new[0].weight, new[1].weight = first, second
        if layer.bias is not None:
            new[1].bias = _kept(layer.bias)
        return new.train(layer.training)

    def _head(self, layer: TiedTTLinear) -> FrozenHead:
        bias = None if layer.bias is None else layer.bias.detach().clone()
        return FrozenHead(self._table(layer.embedding), bias).train(layer.training)

    def _table(self, layer: TTTable) -> FrozenTable:
        if id(layer) not in self._shared:
            new = frozen_table(layer)
            new.share_(self._shared.setdefault(id(layer.cores), new))
            self._shared[id(layer)] = new.train(layer.training)
        return self._shared[id(layer)]

    def _gain_of_dense(self, thin: Frozen, layer: TTLinear | TiedTTLinear) -> float:
        """Return how many times faster the dense layer is; infinite if it is smaller as well."""
        if isinstance(thin, FrozenHead) and thin.embedding.is_dense:
            return 0.0  # it reads the table that is there
        numbers = sum(
            param.numel() for name, param in thin.named_parameters() if "bias" not in name
        )
        if numbers >= layer.in_features * layer.out_features:
            return float("inf")
        if self._batch is None:
            return 0.0
        like = next(thin.parameters())
        sizes = layer.in_features, layer.out_features, numbers, like.dtype, like.device
        if sizes not in self._gains:
            x = torch.randn(self._batch, layer.in_features, device=like.device, dtype=like.dtype)
            dim = getattr(layer, "feature_dim", -1)
            x = x.reshape(*x.shape, *[1] * (-1 - dim))
            self._gains[sizes] = time_ratio(thin, _dense(layer), x)
        return self._gains[sizes]


@torch.no_grad()
def frozen_table(table: TTTable) -> FrozenTable:
    """Contract a table to two factors, or to one of all rows where that holds fewer numbers."""
    left, right = table_factors(table)
    sizes = table.num_embeddings, table.embedding_dim
    more: dict[str, Any] = {"row_order": table.row_order, "step": table.row_step}
    if isinstance(table.hot, HotRows):
        more["hot"], more["basis"] = thin_factors(table.hot)
    elif table.hot is not None:
        more["hot"] = table.hot.detach().clone()
    if left.numel() + right.numel() >= table.num_dense:
        every = torch.arange(table.num_embeddings, device=left.device)
        rows = FrozenTable(*sizes, left, right, **more).rows(every)
        left, right, more = rows.unsqueeze(-1), rows.new_ones(1, 1, 1), {}
    more["padding_idx"] = table.padding_idx
    if isinstance(table, TTEmbeddingBag):
        return FrozenEmbeddingBag(
            table.mode, table.include_last_offset, *sizes, left, right, **more
        )
    return FrozenEmbedding(*sizes, left, right, **more)


@torch.no_grad()
def _dense(layer: TTLinear | TiedTTLinear) -> FrozenLinear:
    source = layer if isinstance(layer, TTLinear) else layer.embedding
    new = _frozen_linear(layer, None)
    new[0].weight = _kept(source.dense_weight())
    if layer.bias is not None:
        new[0].bias = _kept(layer.bias)
    return new.train(layer.training)


def _frozen_linear(layer: TTLinear | TiedTTLinear, rank: int | None) -> FrozenLinear:
    """Return a frozen layer of the same sizes, without numbers."""
    has_bias = layer.bias is not None
    more: dict[str, Any] = {}
    if isinstance(layer, TTPointwise):
        more = {"feature_dim": layer.feature_dim, "dense_form": layer.dense_form}
    return FrozenLinear(layer.in_features, layer.out_features, rank, has_bias, "meta", **more)


def _kept(tensor: Tensor) -> nn.Parameter:
    """Return the numbers of a tensor as a parameter of their own that is not trained."""
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format), False)


@torch.no_grad()
def time_ratio(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    """Measure how many times longer one module takes for an input than another, taken in turn."""
    modules = [module.eval() for module in (one, other)]
    shortest = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        for k, module in enumerate(modules):
            shortest[k] = min(shortest[k], _seconds(module, x))
    return shortest[0] / shortest[1]


def _seconds(module: nn.Module, x: Tensor) -> float:
    module(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        module(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start


def _check_batch(batch: Any) -> None:
    try:
        enough = batch is None or whole_number(batch) >= 1
    except TypeError:
        enough = False
    if not enough:
        raise ValueError(f"batch={batch!r} must be a whole number of rows, at least 1")


def _quantizer(quantize: Any) -> Callable[[nn.Module], None]:
    """Return what has torchao hold the weights of linear layers in fewer bits, in place."""
    with needed_by(f"quantize={quantize!r}"):
        from torchao.core.config import AOBaseConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    config = Int8WeightOnlyConfig() if quantize == "int8" else quantize
    if not isinstance(config, AOBaseConfig):
        raise ValueError(
            f'quantize={quantize!r} must be "int8" or a configuration of torchao.quantization, '
            "such as Int4WeightOnlyConfig()"
        )
    return lambda model: quantize_(model, config)
