"""Contract the cores of a model once, to freeze it or to convert it to torch's own layers."""

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera.extras import listed, needed_by
from comera.nn.embedding import TiedTTLinear
from comera.nn.forms import from_torch, split_names
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, check_model, check_unsharded, linear_of
from comera.nn.swap import evaluation_mode, naming_old_optimizers, swap_layers_
from comera.nn.table import HotRows, TTTable
from comera.params import renew_wrappers_
from comera.serving.layers import (
    FactoredHead,
    FactoredTable,
    PlainWhenPickled,
    ThinLinear,
    table_factors,
    thin_factors,
)
from comera.shapes import check_whole_numbers

log = logging.getLogger("comera")

_WORTH_ITS_MEMORY = 1.1
"""Speed-up above which a dense layer is preferred to a smaller one."""

_ROUNDS, _CALLS = 7, 5
"""Timings of each layer, of which the shortest counts, and passes in each."""


def freeze_(
    model: nn.Module, *, batch: int = 1, quantize: Literal["int8"] | Any = None
) -> nn.Module:
    """Contract every tensor-train layer once, in place, for inference.

    A linear layer becomes two thin linear layers and a table two small tables, or either becomes
    one dense layer if that takes less memory. A linear layer also becomes dense if that measures
    over a tenth faster at ``batch``. All new layers have a ``weight``. A :class:`~comera.BTTLinear`
    stays. The model is then in evaluation mode, and training steps raise; save it first to train it
    further. ``torch.jit.script`` takes it after :func:`to_plain_`.

    Args:
        model: The model.
        batch: Rows of a linear layer's input in a typical pass: 1 for text generated one token at a
            time, batch size times length for other models.
        quantize: ``"int8"`` quantizes the weights of all linear layers to eight bits by torchao; a
            configuration of torchao selects another format.

    Returns:
        The model, or the layer that replaces it.

    Example::

        comera.freeze_(model, batch=1)
        with torch.inference_mode():
            logits = model(tokens)
    """
    if quantize is not None:
        with needed_by(f"quantize={quantize!r}"):
            from torchao.core.config import AOBaseConfig
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        config = Int8WeightOnlyConfig() if quantize == "int8" else quantize
        if not isinstance(config, AOBaseConfig):
            raise ValueError(
                f'quantize={quantize!r} must be "int8" or a configuration of torchao.quantization, '
                "such as Int4WeightOnlyConfig()"
            )
    replacements = _contracted(model, batch, keep_forms=quantize is None)
    model = swap_layers_(model, replacements, biases=False).eval()
    refuse_training_(model)
    if quantize is not None:
        quantize_(model, config)
        left = [
            name
            for name, layer in model.named_modules()
            if not getattr(layer, "has_plain_form", True)
            or getattr(layer, "dense_form", None) is not None
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
    """Freeze a model inside the context, in evaluation mode, and restore its layers afterwards.

    Writes to parameters inside take effect afterwards. ``batch`` is that of :func:`freeze_`. Yields
    the model, or the layer that replaces it.

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

    A linear layer becomes an ``nn.Sequential`` of two thin ``nn.Linear``, a 1 x 1 convolution one
    of two thin convolutions, and a table two small ``nn.Embedding``; each becomes one dense layer
    if that is smaller. A :class:`~comera.BTTLinear` stays and is logged. Ties and frozen weights
    are kept. The model computes the same, to rounding, and can be trained further; a ``weight`` is
    the product of the factors. ``torch.export``, ONNX, ``torch.jit.trace`` and AOTInductor then
    need no comera, nor does a pickle of the layers, in which they have no ``weight``.

    Returns the model, or the layer that replaces it. Raises ``ValueError`` if a layer is sharded.

    Example::

        comera.to_plain_(model)
        torch.export.save(torch.export.export(model.eval(), (tokens,)), "model.pt2")
    """
    check_model(model)
    if apart := split_names(model):
        log.warning(
            "to_plain_: the layers of %s are torch's now, and what calls them is still of comera: "
            "a program exported from the model runs without it, the module itself does not",
            listed(apart),
        )
    modules = model.named_modules()
    if of_blocks := [name for name, m in modules if not getattr(m, "has_plain_form", True)]:
        log.warning(
            "to_plain_ leaves %s as block tensor trains, which torch has no layer for: a program "
            "exported from the model runs without comera, the module itself does not",
            listed(of_blocks),
        )
    plain = _contracted(model, None)
    for layer in list(model.modules()):
        for key, hook in list(layer._forward_pre_hooks.items()):
            if hook is _refuse_training:
                del layer._forward_pre_hooks[key]
        new = plain.get(id(layer), layer)
        if new is not layer:
            trained = {_part(name) for name, p in layer.named_parameters() if p.requires_grad}
            for part in new.modules():  # a bias may be another module's too
                if part._parameters.get("bias") is not None and "bias" in layer._parameters:
                    part.bias = layer.bias
            for name, param in new.named_parameters():
                param.requires_grad_(_part(name) in trained)
        if isinstance(new, PlainWhenPickled):
            new.is_plain = True
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = module.linear1, module.linear2
            if any(isinstance(plain.get(id(layer)), nn.Sequential) for layer in inside):
                module.activation_relu_or_gelu = 0  # off its fast path, which reads the weights
    with naming_old_optimizers(model):
        model = swap_layers_(model, plain, biases=False)
    renew_wrappers_(model.modules())
    return model


def _part(name: str) -> str:
    """Return which part of a layer a parameter is of: bias, hot rows, or all else."""
    return "bias" if name.endswith("bias") else "hot" if "hot" in name or "basis" in name else ""


def _refuse_training(model: nn.Module, _: Any) -> None:
    is_frozen = not isinstance(model, TensorTrainModule)  # a lone layer shares its hooks
    if is_frozen and model.training and torch.is_grad_enabled():
        raise RuntimeError(
            f"this {type(model).__name__} was contracted by comera.freeze_ and has no cores left "
            "to train. Train the model before it is frozen, use it frozen only inside "
            "`with comera.frozen(model):`, or call model.eval() to let gradients pass through it "
            "to what comes before"
        )


def refuse_training_(model: nn.Module) -> None:
    """Hook a frozen model to raise an error if called in training mode with gradients enabled."""
    if not refuses_training(model):
        model.register_forward_pre_hook(_refuse_training)


def refuses_training(model: nn.Module) -> bool:
    """Return whether a module was given to :func:`freeze_`."""
    return _refuse_training in model._forward_pre_hooks.values()


def _contracted(
    model: nn.Module, batch: int | None, keep_forms: bool = True
) -> dict[int, nn.Module]:
    """Make the contracted layers of a model, by the ``id`` of the layers they replace.

    They are chosen to be fast for ``batch`` rows, or smallest if that is None. With ``keep_forms``
    layers that become dense get their registered class, such as Conv1D of transformers, otherwise
    ``nn.Linear``.
    """
    if batch is not None:
        check_whole_numbers(1, batch=batch)
    check_unsharded(model, "freeze_")
    contraction = _Contraction(batch, keep_forms)
    made: dict[int, nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (TTTable, TTLinear, TiedTTLinear)):
            made[id(layer)] = contraction.of(name, layer).train(layer.training)
    where = "" if batch is None else f" at batch={batch}, as measured"
    log.info(
        "contracted %d layers; dense%s: %s",
        len(made), where, listed(contraction.dense, most=8) or "none",
    )  # fmt: skip
    return made


class _Contraction:
    """Makes contracted layers, which share parameters if cores do; ``dense`` names dense layers."""

    def __init__(self, batch: int | None, keep_forms: bool) -> None:
        self.dense: list[str] = []
        self._batch, self._keep_forms = batch, keep_forms
        self._shared: dict[Any, Any] = {}
        self._gains: dict[object, float] = {}

    def of(self, name: str, layer: Any) -> nn.Module:
        """Return the contracted layer, without gradients, that replaces ``layer``."""
        if isinstance(layer, TTTable):
            return self._table(layer)
        if isinstance(layer, TiedTTLinear):
            table: Any = self._table(layer.embedding)
            if not isinstance(table, FactoredTable):
                return _linear(table.weight, layer.bias)
            bias = None if layer.bias is None else _kept(layer.bias)
            thin: Any = FactoredHead(table, bias)
        else:
            key = id(layer.cores)
            if key not in self._shared:
                self._shared[key] = [_kept(factor.T) for factor in thin_factors(layer)]
            left, right = self._shared[key]
            form = layer.dense_form if _is_pointwise(layer) else None
            first, second = _linear(left), _linear(right, layer.bias)
            thin = ThinLinear(from_torch(first, form), from_torch(second, form), form)
        if self._gain_of_dense(thin, layer) <= _WORTH_ITS_MEMORY:
            return thin
        self.dense.append(name)
        return self._dense(layer)

    def _dense(self, layer: TTLinear | TiedTTLinear) -> nn.Module:
        if isinstance(layer, TiedTTLinear):
            return _linear(_kept(layer.embedding.dense_weight()), layer.bias)
        dense: Any = layer.to_dense()
        dense.weight = self._shared.setdefault(("dense", id(layer.cores)), dense.weight)
        if self._keep_forms or _is_pointwise(layer):
            dense = from_torch(dense, layer.dense_form)
        return dense.requires_grad_(False)

    @torch.no_grad()
    def _table(self, table: TTTable) -> nn.Module:
        """Contract a table to two factors, or to the dense table if that is smaller."""
        if id(table) in self._shared:
            return self._shared[id(table)]
        left, right = table_factors(table)
        if left.numel() + right.numel() >= table.num_dense:
            new: Any = from_torch(table.to_dense(), table.dense_form).requires_grad_(False)
            key = "dense", id(table.cores), table.padding_idx  # that row is zero
            new.weight = self._shared.setdefault(key, new.weight)
        else:
            more: dict[str, Any] = {"row_order": table.row_order, "step": table._step}
            if isinstance(table.hot, HotRows):
                more["hot"], more["basis"] = thin_factors(table.hot)
            elif table.hot is not None:
                more["hot"] = table.hot.detach().clone()
            more |= {name: getattr(table, name) for name in table._own_settings}
            sizes = table.num_embeddings, table.embedding_dim
            new = FactoredTable(*sizes, left, right, **more, padding_idx=table.padding_idx)
            new.output_scale = table.output_scale
            lead = self._shared.setdefault(id(table.cores), new)
            for part in ("left", "right", "hot", "basis", "row_order"):
                setattr(new, part, getattr(lead, part))
        self._shared[id(table)] = new
        return new

    def _gain_of_dense(self, thin: Any, layer: TTLinear | TiedTTLinear) -> float:
        """Return a dense layer's speed over that of ``thin``; infinite if dense is no larger."""
        numbers = sum(
            param.numel() for name, param in thin.named_parameters() if "bias" not in name
        )
        if numbers >= layer.in_features * layer.out_features:
            return math.inf
        like = next(thin.parameters())
        if self._batch is None or like.is_meta:
            return 0.0
        sizes = layer.in_features, layer.out_features, numbers, like.dtype, like.device
        if sizes not in self._gains:
            x = torch.randn(self._batch, layer.in_features, device=like.device, dtype=like.dtype)
            dim = getattr(layer, "feature_dim", -1)
            x = x.reshape(*x.shape, *[1] * (-1 - dim))
            self._gains[sizes] = time_ratio(thin, self._dense(layer), x)
        return self._gains[sizes]


def _linear(weight: nn.Parameter, bias: Tensor | None = None) -> nn.Linear:
    return linear_of(weight, None if bias is None else _kept(bias))


def _is_pointwise(layer: Any) -> bool:
    return getattr(layer, "feature_dim", -1) != -1


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format), False)


@torch.no_grad()
def time_ratio(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    """Measure how many times as long as ``other`` the module ``one`` takes, in turns."""
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = [
        Timer("module(x)", globals={"module": module.eval(), "x": x}, num_threads=threads)
        for module in (one, other)
    ]
    times = [[timer.timeit(_CALLS).mean for timer in timers] for _ in range(_ROUNDS)]
    shortest = [min(each) for each in zip(*times, strict=True)]
    return shortest[0] / shortest[1]
