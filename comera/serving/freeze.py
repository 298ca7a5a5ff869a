"""Models whose cores are contracted once: frozen, to be run, or of torch's layers alone."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from comera.extras import listed, needed_by
from comera.nn.block_linear import BTTLinear
from comera.nn.embedding import TTEmbeddingBag
from comera.nn.evaluation_mode import evaluation_mode
from comera.nn.forms import from_torch, split_names
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, check_model, check_unsharded
from comera.nn.swap import swap_layers_
from comera.nn.table import HotRows, TTTable
from comera.nn.tied import TiedTTLinear
from comera.serving.layers import (
    FactoredHead,
    FactoredTable,
    ThinLinear,
    table_factors,
    thin_factors,
)
from comera.shapes import whole_number

log = logging.getLogger("comera")

_WORTH_ITS_MEMORY = 1.1
"""Speed-up from which a dense layer is taken instead of a smaller one."""

_ROUNDS, _CALLS = 7, 5
"""Timings of each layer, the shortest of which counts, and passes within one."""


def freeze_(
    model: nn.Module, *, batch: int = 1, quantize: Literal["int8"] | Any = None
) -> nn.Module:
    """Contract every tensor-train layer once, in place, for a model that is only run from now on.

    A linear layer becomes two thin ones, or a dense one where that takes less memory, or is faster
    at ``batch`` by more than a tenth, as measured here. A table becomes two small ones, of which a
    row is a product, or a dense one where that takes less memory. Dense ones are ``nn.Linear``,
    ``nn.Embedding`` and ``nn.EmbeddingBag``; all have a ``weight``. A :class:`~comera.BTTLinear`
    stays: it is multiplied by its cores as they are. The model evaluates afterwards, and a training
    step of it raises; save the model before to train it again.

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
    replacements = _contracted(model, batch, keep_forms=convert is None)
    model = swap_layers_(model, replacements, biases=False).eval()
    refuse_training_(model)
    if convert is not None:
        convert(model)
        left = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, BTTLinear) or getattr(layer, "dense_form", None) is not None
        ]
        if left:
            log.warning(
                "freeze_: quantize=%r leaves %s as they are: a BTTLinear is multiplied by cores, "
                "and a convolution is no nn.Linear",
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
        The model; if it is itself a tensor-train layer, the layer in its place.

    Example::

        with comera.frozen(model):
            texts = generate(model)
        train_further(model)
    """
    replacements = _contracted(model, batch)
    layers = {id(module): module for module in model.modules() if id(module) in replacements}
    with evaluation_mode(model):
        served = swap_layers_(model, replacements, biases=False)
        guard = served.register_forward_pre_hook(_refuse_training)
        try:
            yield served.eval()
        finally:
            guard.remove()
            back = {id(new): layers[key] for key, new in replacements.items()}
            swap_layers_(served, back, biases=False)


def to_plain_(model: nn.Module) -> nn.Module:
    """Replace every tensor-train layer by layers of torch alone, in place.

    Cores are contracted once. A linear layer becomes ``nn.Sequential`` of two thin ``nn.Linear``,
    or one where two would hold more numbers, and a 1 x 1 convolution two such. A table becomes a
    ``torch.fx.GraphModule`` that multiplies rows of two small ``nn.Embedding``, or ``nn.Embedding``
    and ``nn.EmbeddingBag`` themselves where those would hold more. A :class:`~comera.BTTLinear`
    stays one, of operations of torch's, and is named in the log. What is tied stays tied. The
    model computes the same, to rounding, and can be trained further. ``torch.export``, ONNX,
    ``torch.jit.trace`` and AOTInductor take it, and a process without this package can run what
    they make.

    Args:
        model: One that was frozen is taken too; its weights stay frozen.

    Returns:
        The model; if it is itself a tensor-train layer, what replaces it.

    Raises:
        ValueError: If a layer is sharded.
        TypeError: If ``model`` is no module.

    Example::

        comera.to_plain_(model)
        torch.export.save(torch.export.export(model.eval(), (tokens,)), "model.pt2")
    """
    check_model(model)
    apart = split_names(model)
    if apart:
        log.warning(
            "to_plain_: the layers of %s are torch's now, and what calls them is still of comera: "
            "a program exported from the model runs without it, the module itself does not",
            listed(apart),
        )
    blocks = [name or "the model" for name, m in model.named_modules() if isinstance(m, BTTLinear)]
    if blocks:
        log.warning(
            "to_plain_ leaves %s as block tensor trains, which torch has no layer for: a program "
            "exported from the model runs without comera, the module itself does not",
            listed(blocks),
        )
    contracted = _contracted(model, None)
    plain: dict[int, nn.Module] = {}
    for layer in list(model.modules()):
        for key, hook in list(layer._forward_pre_hooks.items()):
            if hook is _refuse_training:
                del layer._forward_pre_hooks[key]
        if id(layer) in contracted:
            trained = any(param.requires_grad for param in layer.parameters())
            plain[id(layer)] = _plain(contracted[id(layer)]).requires_grad_(trained)
        elif isinstance(layer, (ThinLinear, FactoredTable, FactoredHead)):
            plain[id(layer)] = _plain(layer)
    _leave_the_fast_path_(model, plain)
    return swap_layers_(model, plain, biases=False)


# ── training is refused ──────────────────────────────────────────────────────────────────────────


def _refuse_training(model: nn.Module, _: Any) -> None:
    """Forward pre-hook of a frozen model: raise where gradients are wanted in training mode."""
    is_frozen = not isinstance(model, TensorTrainModule)  # a lone layer shares its hooks
    if is_frozen and model.training and torch.is_grad_enabled():
        raise RuntimeError(
            f"this {type(model).__name__} was contracted by comera.freeze_ and has no cores left "
            "to train. Train the model before it is frozen, use it frozen only inside "
            "`with comera.frozen(model):`, or call model.eval() to let gradients pass through it "
            "to what comes before"
        )


def refuse_training_(model: nn.Module) -> None:
    """Add a hook that raises when a frozen model is called in training mode with gradients on."""
    if not refuses_training(model):
        model.register_forward_pre_hook(_refuse_training)


def refuses_training(model: nn.Module) -> bool:
    """Check that a module is a model which :func:`freeze_` was given."""
    return _refuse_training in model._forward_pre_hooks.values()


# ── contraction ──────────────────────────────────────────────────────────────────────────────────


def _contracted(
    model: nn.Module, batch: int | None, keep_forms: bool = True
) -> dict[int, nn.Module]:
    """Make the contracted layers of a model, by the ``id`` of the layers they stand for.

    Args:
        model: Is not changed.
        batch: For which they are to be fast; None for small ones.
        keep_forms: Whether the dense layer for one of another package, such as Conv1D of
            transformers, is of its class; else it is an ``nn.Linear``.

    Raises:
        ValueError: If ``batch`` is below one, or a layer is sharded.
    """
    try:
        enough = batch is None or whole_number(batch) >= 1
    except TypeError:
        enough = False
    if not enough:
        raise ValueError(f"batch={batch!r} must be a whole number of rows, at least 1")
    check_unsharded(model, "freeze_")
    contraction = _Contraction(batch, keep_forms)
    made: dict[int, nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (TTTable, TTLinear, TiedTTLinear)):
            made[id(layer)] = contraction.of(name, layer)
    where = "" if batch is None else f" at batch={batch}, as measured"
    log.info(
        "contracted %d layers; dense%s: %s",
        len(made), where, listed(contraction.dense, most=8) or "none",
    )  # fmt: skip
    return made


class _Contraction:
    """Contracted layers in the making, those on shared cores sharing what was made of them.

    Attributes:
        dense: Names of the linear layers that have become dense.
    """

    def __init__(self, batch: int | None, keep_forms: bool) -> None:
        self.dense: list[str] = []
        self._batch, self._keep_forms = batch, keep_forms
        self._shared: dict[Any, Any] = {}
        self._gains: dict[object, float] = {}

    def of(self, name: str, layer: Any) -> nn.Module:
        """Return what stands for a layer, not trained."""
        if isinstance(layer, TTTable):
            return self._table(layer)
        if isinstance(layer, TiedTTLinear):
            table: Any = self._table(layer.embedding)
            if not isinstance(table, FactoredTable):
                return _dense_head(layer, table.weight)
            bias = None if layer.bias is None else layer.bias.detach().clone()
            thin: Any = FactoredHead(table, bias).train(layer.training)
        else:
            thin = self._thin(layer)
        if self._gain_of_dense(thin, layer) <= _WORTH_ITS_MEMORY:
            return thin
        self.dense.append(name)
        return self._dense(layer)

    def _thin(self, layer: TTLinear) -> ThinLinear:
        key = id(layer.cores)
        if key not in self._shared:
            left, right = thin_factors(layer)
            self._shared[key] = _kept(left.T), _kept(right.T)
        weights = self._shared[key]
        first = nn.Linear(layer.in_features, len(weights[0]), False, "meta")
        second = nn.Linear(len(weights[0]), layer.out_features, False, "meta")
        first.weight, second.weight = weights
        if layer.bias is not None:
            second.bias = _kept(layer.bias)
        form = layer.dense_form if _is_pointwise(layer) else None
        return ThinLinear(from_torch(first, form), from_torch(second, form), form).train(
            layer.training
        )

    def _dense(self, layer: TTLinear | TiedTTLinear) -> nn.Module:
        if isinstance(layer, TiedTTLinear):
            return _dense_head(layer, _kept(layer.embedding.dense_weight()))
        dense: Any = layer.to_dense()
        dense.weight = self._shared.setdefault(("dense", id(layer.cores)), dense.weight)
        if self._keep_forms or _is_pointwise(layer):
            dense = from_torch(dense, layer.dense_form)
        return dense.requires_grad_(False)

    @torch.no_grad()
    def _table(self, table: TTTable) -> nn.Module:
        """Contract a table to two factors, or to one of all rows where that is smaller."""
        if id(table) in self._shared:
            return self._shared[id(table)]
        left, right = table_factors(table)
        if left.numel() + right.numel() >= table.num_dense:
            new: Any = table.to_dense().requires_grad_(False)
            key = "dense", id(table.cores), table.padding_idx  # that row is zero
            new.weight = self._shared.setdefault(key, new.weight)
        else:
            more: dict[str, Any] = {"row_order": table.row_order, "step": table.row_step}
            if isinstance(table.hot, HotRows):
                more["hot"], more["basis"] = thin_factors(table.hot)
            elif table.hot is not None:
                more["hot"] = table.hot.detach().clone()
            if isinstance(table, TTEmbeddingBag):
                more |= {"mode": table.mode, "include_last_offset": table.include_last_offset}
            sizes = table.num_embeddings, table.embedding_dim
            new = FactoredTable(*sizes, left, right, **more, padding_idx=table.padding_idx)
            new.share_(self._shared.setdefault(id(table.cores), new))
            new.train(table.training)
        self._shared[id(table)] = new
        return new

    def _gain_of_dense(self, thin: Any, layer: TTLinear | TiedTTLinear) -> float:
        """Return how many times faster the dense layer is; infinite if it is smaller as well."""
        numbers = sum(
            param.numel() for name, param in thin.named_parameters() if "bias" not in name
        )
        if numbers >= layer.in_features * layer.out_features:
            return math.inf
        if self._batch is None:
            return 0.0
        like = next(thin.parameters())
        sizes = layer.in_features, layer.out_features, numbers, like.dtype, like.device
        if sizes not in self._gains:
            x = torch.randn(self._batch, layer.in_features, device=like.device, dtype=like.dtype)
            dim = getattr(layer, "feature_dim", -1)
            x = x.reshape(*x.shape, *[1] * (-1 - dim))
            self._gains[sizes] = time_ratio(thin, self._dense(layer), x)
        return self._gains[sizes]


def _dense_head(layer: TiedTTLinear, weight: nn.Parameter) -> nn.Linear:
    dense = layer.to_dense(weight)
    if layer.bias is not None:
        dense.bias = _kept(layer.bias)  # the layer keeps its own
    return dense.requires_grad_(False)


def _is_pointwise(layer: Any) -> bool:
    """Check that a layer works along another dimension than the last, as convolutions do."""
    return getattr(layer, "feature_dim", -1) != -1


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


# ── layers of torch alone ────────────────────────────────────────────────────────────────────────


def _plain(layer: Any) -> nn.Module:
    """Return torch's layers for a contracted one, on the same parameters."""
    if isinstance(layer, ThinLinear):
        new: Any = nn.Sequential(*layer)
    elif isinstance(layer, (FactoredTable, FactoredHead)):
        new = fx.GraphModule(layer, fx.Tracer().trace(layer), type(layer).__name__)
    else:
        return layer
    for name in ("in_features", "out_features", "num_embeddings", "embedding_dim"):
        if hasattr(layer, name):
            setattr(new, name, getattr(layer, name))
    return new.train(layer.training)


def _leave_the_fast_path_(model: nn.Module, plain: dict[int, nn.Module]) -> None:
    """Set encoder layers of torch to call their linear layers, whose weights they would read."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = module.linear1, module.linear2
            if any(isinstance(plain.get(id(layer)), nn.Sequential) for layer in inside):
                module.activation_relu_or_gelu = 0
