"""Convert layers of other packages to torch's: transposed weights, convolutions, fused experts.

transformers 5 holds the experts of a mixture in ``gate_up_proj`` (or ``up_proj``) and
``down_proj``, ``(experts, out, in)`` each, and flags set by ``transformers.integrations.moe``
define the computation. This file splits them into a linear layer for each expert and matrix.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from comera.nn.feed_forward_parts import may_fuse, path_of
from comera.nn.fused import factors_together, grouped_linear
from comera.nn.module import linear_of
from comera.nn.swap import swap_layers_
from comera.ops.context import is_ordinary


class Form(NamedTuple):
    """How to convert layers of a class to torch's and back, see :func:`register_layer`."""

    name: str
    to_torch: Callable[[Any], nn.Module]
    from_torch: Callable[[Any], nn.Module]
    feature_dim: int = -1
    fits: Callable[[Any], bool] | None = None


_FORMS: dict[str, Form] = {}


def register_layer(
    dense_class: type[nn.Module] | str,
    to_torch: Callable[[Any], nn.Module],
    from_torch: Callable[[Any], nn.Module],
    *,
    feature_dim: int = -1,
    fits: Callable[[Any], bool] | None = None,
) -> None:
    """Register layers of another class for :func:`~comera.tensorize_` and :func:`~comera.densify_`.

    Layers of that class compute the same as a torch layer and have a parameter ``weight``. Already
    registered are ``Conv1D``, ``FalconLinear`` and tables that scale their output, such as Gemma's,
    of transformers, ``Linear`` of torch_geometric, and ``nn.Conv1d``, ``nn.Conv2d`` and
    ``nn.Conv3d`` of kernel 1, stride 1, one group and no padding.

    Args:
        dense_class: The class, or its module and name joined by a dot; subclasses do not count.
        to_torch: Function that converts a layer, also on the ``meta`` device, to an ``nn.Linear``,
            ``nn.Embedding`` or ``nn.EmbeddingBag`` with the same ``requires_grad``. An embedding's
            attribute ``output_scale``, if set, multiplies the rows that the converted one gives.
        from_torch: Function that converts such a torch layer back.
        feature_dim: Dimension of the features in input and output, counted from the end: -1 is the
            last, -3 that of pictures ``(N, C, H, W)``.
        fits: Function that returns whether a layer can be converted; None if all can.

    Example::

        comera.register_layer(MyLinear, lambda mine: mine.as_linear(), MyLinear.of_linear)
    """
    name = path_of(dense_class)
    if not (callable(to_torch) and callable(from_torch)):
        raise TypeError(f"to_torch={to_torch!r} and from_torch={from_torch!r} must be functions")
    if fits is not None and not callable(fits):
        raise TypeError(f"fits={fits!r} must be a function, or None for all layers of the class")
    if type(feature_dim) is not int or feature_dim >= 0:
        raise ValueError(
            f"feature_dim={feature_dim!r} must be a whole number below 0, counted from the last "
            "dimension, which is -1"
        )
    _FORMS[name] = Form(name, to_torch, from_torch, feature_dim, fits)


def form_of(layer: nn.Module) -> Form | None:
    """Return the registered form of a layer; None for a layer of an unregistered class."""
    form = _form_named(path_of(type(layer)))
    return form if form is None or form.fits is None or form.fits(layer) else None


def as_torch(layer: nn.Module) -> Any:
    """Convert a layer of a registered class to a torch layer; return any other layer as it is."""
    form = form_of(layer)
    return layer if form is None else form.to_torch(layer)


def from_torch(dense: nn.Module, name: str | None) -> nn.Module:
    """Convert a torch layer to the class registered as ``name``; None returns it as it is.

    Raises ``ValueError`` if no such class is registered.
    """
    if name is None:
        return dense
    form = _form_named(name)
    if form is None:
        raise ValueError(
            f"a layer stands for a {name}, which is not known here: comera.register_layer says how "
            "to make one of a torch layer"
        )
    return form.from_torch(dense).train(dense.training)


def _form_named(name: str) -> Form | None:
    """Return the form of a class by its path; tables of transformers that only scale have one."""
    if name.startswith("transformers.models.") and name.endswith("ScaledWordEmbedding"):
        form = Form(name, _unscaled, partial(_scaled, name), fits=lambda t: len(t._parameters) == 1)
        _FORMS.setdefault(name, form)  # T5Gemma2's holds a second parameter, a row
    return _FORMS.get(name)


def _unscaled(layer: Any) -> nn.Embedding:
    rows, width = layer.weight.shape
    table: Any = nn.Embedding(rows, width, layer.padding_idx, device="meta")
    table.weight = layer.weight
    scale = getattr(layer, "scalar_embed_scale", layer.embed_scale)
    if isinstance(layer.embed_scale, Tensor):  # it is rounded, as by Gemma's
        scale = torch.as_tensor(scale, dtype=layer.weight.dtype, device="cpu").item()
    table.output_scale = scale
    return table.train(layer.training)


def _scaled(name: str, table: Any) -> nn.Module:
    module, _, kind = name.rpartition(".")
    sizes = *table.weight.shape, table.padding_idx, getattr(table, "output_scale", 1.0)
    layer = getattr(import_module(module), kind)(*sizes)
    layer.weight = table.weight
    return layer.to(table.weight.device)


def _as_linear(weight: Tensor, layer: Any) -> nn.Linear:
    param = nn.Parameter(weight, layer.weight.requires_grad)
    return linear_of(param, layer.bias).train(layer.training)


def _conv1d_of_linear(linear: nn.Linear) -> Any:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(linear.out_features, linear.in_features)
    weight = linear.weight.detach().T.contiguous()
    layer.weight = nn.Parameter(weight, linear.weight.requires_grad)
    layer.bias = linear.bias
    return layer


def _is_pointwise(conv: Any) -> bool:
    ones = (1,) * len(conv.kernel_size)
    # with a kernel of one "same" and "valid" pad nothing
    padded = not isinstance(conv.padding, str) and any(conv.padding)
    return conv.kernel_size == conv.stride == ones and conv.groups == 1 and not padded


def _conv_of_linear(conv_class: Any, spatial: int, linear: nn.Linear) -> nn.Module:
    sizes = linear.in_features, linear.out_features
    conv = conv_class(*sizes, 1, bias=linear.bias is not None, device="meta")
    weight = linear.weight.detach().reshape(*linear.weight.shape, *[1] * spatial)
    conv.weight = nn.Parameter(weight, linear.weight.requires_grad)
    conv.bias = linear.bias
    return conv


register_layer(
    "transformers.pytorch_utils.Conv1D",
    lambda layer: _as_linear(layer.weight.detach().T, layer),
    _conv1d_of_linear,
)


def _named_linear(name: str, linear: nn.Linear) -> nn.Module:
    module, _, kind = name.rpartition(".")
    sizes = linear.in_features, linear.out_features
    layer: Any = getattr(import_module(module), kind)(*sizes, bias=linear.bias is not None)
    layer.weight, layer.bias = linear.weight, linear.bias
    return layer


# Classes of their own that compute what nn.Linear does.
for _name in (
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "torch_geometric.nn.dense.linear.Linear",
):
    register_layer(
        _name,
        lambda layer: linear_of(layer.weight, layer.bias).train(layer.training),
        partial(_named_linear, _name),
        fits=lambda layer: not is_lazy(layer.weight),
    )
for _spatial, _conv in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
    register_layer(
        _conv,
        lambda conv: _as_linear(conv.weight.detach().flatten(1), conv),
        partial(_conv_of_linear, _conv, _spatial),
        feature_dim=-1 - _spatial,
        fits=_is_pointwise,
    )


_GROUPED_TO = 1 << 15
"""Numbers of an expert's rows up to which grouped products beat a loop, by a thread of an EPYC."""

_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")


class SplitExperts(nn.Module):
    """Experts with linear layers of their own, whose weights are views of the fused parameters.

    Shapes:
        hidden_states ``(tokens, width)``, top_k_index ``(tokens, k)`` integers, top_k_weights
        ``(tokens, k)``; output ``(tokens, width)``. An index that is no expert's adds nothing.
    """

    _fused: tuple[Any]

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.num_experts = len(fused.down_proj)
        self.up = nn.ModuleList(_linears(fused, _up_name(fused)))
        self.down = nn.ModuleList(_linears(fused, "down_proj"))
        for name in list(fused._parameters):
            fused.register_parameter(name, None)
        # It computes the activation and takes the weights back. In a tuple, as it is no child.
        self._fused = (fused,)
        self.train(fused.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        (fused,) = self._fused
        between = fused._apply_gate if fused.has_gate else fused.act_fn
        # Rows in the order of their experts; those whose index is no expert's come first or last.
        index, order = top_k_index.flatten().sort(stable=True)
        numbers = torch.arange(-1, self.num_experts, device=index.device, dtype=index.dtype)
        first, *ends = torch.searchsorted(index, numbers, right=True).tolist()
        order, sizes = order[first : ends[-1]], list(map(sub, ends, [first, *ends]))
        tokens = order // top_k_index.shape[1]
        # With gradients, an expert without tokens gets zeros; a graph has no branches.
        may_skip = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        rows = hidden_states.index_select(0, tokens)
        few = may_fuse(rows) and rows.numel() <= _GROUPED_TO * self.num_experts
        ups = factors_together(rows, self.up) if few and rows.is_cpu and is_ordinary(rows) else None
        downs = factors_together(rows, self.down) if ups else None
        if ups and downs:
            until = torch.tensor(ends, dtype=torch.int32) - first
            found = [grouped_linear(between(grouped_linear(rows, until, *ups)), until, *downs)]
        else:
            found = [
                part if may_skip and not len(part) else down(between(up(part)))
                for part, up, down in zip(rows.split(sizes), self.up, self.down, strict=True)
            ]
        weighted = torch.cat(found) * top_k_weights.flatten()[order, None]
        output = torch.zeros_like(hidden_states)
        return output.index_add(0, tokens, weighted.to(output.dtype))

    @property
    def is_dense(self) -> bool:
        """Whether all layers are ``nn.Linear``, none compressed."""
        return all(type(layer) is nn.Linear for layer in (*self.up, *self.down))

    def fuse(self) -> nn.Module:
        """Copy the dense layers back to the module they were made from; return that module."""
        (fused,) = self._fused
        parts: dict[str, Any] = {_up_name(fused): self.up, "down_proj": self.down}
        for name, layers in parts.items():
            weights = [_turned(fused, layer.weight) for layer in layers]
            fused.register_parameter(name, _stacked(weights))
            if fused.has_bias:
                fused.register_parameter(f"{name}_bias", _stacked([layer.bias for layer in layers]))
        return fused.train(self.training)


def is_fused(module: Any) -> bool:
    """Return whether a module has only 3-d parameters of experts, as transformers 5 makes them."""
    if not all(hasattr(module, flag) for flag in _FLAGS) or not hasattr(module, "_apply_gate"):
        return False
    if module.has_post_expert_norm or module._is_expert_parallel or module._buffers:
        return False
    names = {_up_name(module), "down_proj"}
    biases = {f"{name}_bias" for name in names} if module.has_bias else set()
    held = dict(module.named_parameters())
    return held.keys() == names | biases and all(held[name].dim() == 3 for name in names)


@contextmanager
def experts_apart(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[None]:
    """Split fused experts of a model in place, so that their layers can be replaced.

    If ``names`` is None, all experts are split; experts with only dense layers at the end are fused
    again. An error fuses all experts again. Raises ``ValueError`` if a name has no fused experts.
    """
    found = {name: module for name, module in model.named_modules() if name and is_fused(module)}
    if lost := [name for name in names or () if name not in found]:
        raise ValueError(
            f"the saved model has experts at {lost[0]!r}, where the model given has none that are "
            "made as those of transformers 5: make it as the one that was saved"
        )
    wanted = [found[name] for name in (found if names is None else names)]
    params = [dict(fused._parameters) for fused in wanted]
    apart = [SplitExperts(fused) for fused in wanted]
    swap_layers_(model, {id(fused): split for fused, split in zip(wanted, apart, strict=True)})
    done = False
    try:
        yield
        done = True
    finally:
        back = {}
        for split, fused, held in zip(apart, wanted, params, strict=True):
            if not done or (names is None and split.is_dense):
                for name, param in held.items():
                    fused.register_parameter(name, param)
                back[id(split)] = fused
            elif names is None:  # dense layers get their own memory, so that the whole can be freed
                for layer in (*split.up, *split.down):
                    for name, param in list(layer._parameters.items()):
                        if param is not None and param.untyped_storage().nbytes() > param.nbytes:
                            own = param.detach().clone(memory_format=torch.contiguous_format)
                            layer.register_parameter(name, nn.Parameter(own, param.requires_grad))
        if back:
            swap_layers_(model, back)


PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
"""Names, in modules and in configs, of the number of experts that a row goes to."""


def expert_shares(model: nn.Module) -> dict[str, float | None]:
    """Return by name, for each module that holds experts, the share of all rows that one gets.

    It is told by the nearest module around them, or by that module's ``config``; None if by none.
    """
    shares: dict[str, float | None] = {}
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and name.endswith("experts")
        if not (is_list or isinstance(module, SplitExperts)):
            continue
        number = module.num_experts if isinstance(module, SplitExperts) else len(module)
        shares[name], parts = None, name.split(".")
        for depth in range(len(parts), -1, -1):
            around = model.get_submodule(".".join(parts[:depth]))
            config = getattr(around, "config", None)
            said = [getattr(around, "top_k", None)]
            said += [getattr(of, key, None) for of in (around, config) for key in PER_TOKEN]
            count = next((each for each in said if type(each) is int and each > 0), None)
            if count is not None:
                shares[name] = min(1.0, count / max(1, number))
                break
    return shares


def are_grouped(name: str, rows: int, layer: Any, shares: Mapping[str, float | None]) -> bool:
    """Return whether a layer is of :class:`SplitExperts`, which groups products of few rows."""
    held, _, part = name.rpartition(".")[0].rpartition(".")
    width = {"up": "in_features", "down": "out_features"}.get(part)
    return held in shares and width is not None and rows * getattr(layer, width) <= _GROUPED_TO


def rows_at(tokens: int, name: str, shares: Mapping[str, float | None]) -> int:
    """Return how many rows of a batch a layer gets: all, or an expert's share of them."""
    share = next((of for held, of in shares.items() if name.startswith(f"{held}.")), None)
    return tokens if share is None else max(1, round(share * tokens))


def fuse_experts_(model: nn.Module) -> nn.Module:
    """Fuse split experts whose layers are all dense, in place; return the model."""
    apart = [m for m in model.modules() if isinstance(m, SplitExperts) and m.is_dense]
    return swap_layers_(model, {id(split): split.fuse() for split in apart})


def split_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, SplitExperts)]


def _up_name(fused: Any) -> str:
    return "gate_up_proj" if fused.has_gate else "up_proj"


def _linears(fused: Any, name: str) -> Iterator[nn.Linear]:
    weights = getattr(fused, name)
    biases = getattr(fused, f"{name}_bias") if fused.has_bias else None
    for expert in range(len(weights)):
        weight, bias = _turned(fused, weights.detach()[expert]), None
        if biases is not None:
            bias = nn.Parameter(biases.detach()[expert], biases.requires_grad)
        yield linear_of(nn.Parameter(weight, weights.requires_grad), bias)


def _turned(fused: Any, weight: Tensor) -> Tensor:
    return weight.T if fused.is_transposed else weight


def _stacked(tensors: Sequence[Tensor]) -> nn.Parameter:
    whole = torch.stack([tensor.detach() for tensor in tensors])
    return nn.Parameter(whole, any(tensor.requires_grad for tensor in tensors))
