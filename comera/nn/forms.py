"""Layers of other packages that are torch layers in another form, such as with a turned weight."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn


class Form(NamedTuple):
    """How layers of one class are read and written as torch layers, see :func:`register_layer`."""

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
    """Let :func:`~comera.tensorize_` and :func:`~comera.densify_` know layers of another class.

    Such a layer computes what a torch layer does, on the same input, and holds its numbers in a
    parameter ``weight``. It is then picked, shaped, trained, saved and made dense again like that.
    ``Conv1D`` of transformers, the linear layer of GPT-2, is known from the start, and so are
    ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` of kernel 1, stride 1, one group and no padding.

    Args:
        dense_class: The class itself, not those derived from it; or its module and name with a dot
            between, so that nothing has to be imported.
        to_torch: Returns, of such a layer, an ``nn.Linear``, ``nn.Embedding`` or
            ``nn.EmbeddingBag`` that computes the same; of a layer on the ``meta`` device, too. Its
            parameters need gradients as those of the layer do.
        from_torch: Returns, of such a torch layer, one of the class that computes the same.
        feature_dim: Dimension of the features in input and output, counted from the last, which is
            -1; another one is for layers that are an ``nn.Linear`` along it, such as -3 for
            pictures ``(N, C, H, W)``.
        fits: Returns whether a layer of the class is one of these: others stay as they are. All
            are if None.

    Raises:
        TypeError: If the first is no class and no name, or one of the others no function.
        ValueError: If ``feature_dim`` is no whole number below zero.

    Example::

        comera.register_layer(MyLinear, lambda mine: mine.as_linear(), MyLinear.of_linear)
    """
    name = dense_class if isinstance(dense_class, str) else _path_of(dense_class)
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
    """Return in which form a layer is a torch layer; None for torch's own and unknown ones."""
    form = _FORMS.get(_path_of(type(layer)))
    return form if form is None or form.fits is None or form.fits(layer) else None


def as_torch(layer: nn.Module) -> Any:
    """Return the torch layer that a registered layer is in another form; others as they are."""
    form = form_of(layer)
    return layer if form is None else form.to_torch(layer)


def from_torch(dense: nn.Module, name: str | None) -> nn.Module:
    """Return a torch layer in the form that has a name, if any.

    Raises:
        ValueError: If none of that name is registered here.
    """
    if name is None:
        return dense
    if name not in _FORMS:
        raise ValueError(
            f"a layer stands for a {name}, which is not known here: comera.register_layer says how "
            "to make one of a torch layer"
        )
    return _FORMS[name].from_torch(dense).train(dense.training)


def _path_of(dense_class: Any) -> str:
    if not isinstance(dense_class, type):
        raise TypeError(f"dense_class={dense_class!r} must be a class, or its module and name")
    return f"{dense_class.__module__}.{dense_class.__qualname__}"


# ── Conv1D of transformers, y = x W + b ──────────────────────────────────────────────────────────


def _linear_of_conv1d(layer: Any) -> nn.Linear:
    linear = nn.Linear(layer.nx, layer.nf, device="meta")
    linear.weight = nn.Parameter(layer.weight.detach().T, layer.weight.requires_grad)
    linear.bias = layer.bias
    return linear.train(layer.training)


def _conv1d_of_linear(linear: nn.Linear) -> Any:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(linear.out_features, linear.in_features)
    weight = linear.weight.detach().T.contiguous()
    layer.weight = nn.Parameter(weight, linear.weight.requires_grad)
    layer.bias = linear.bias
    return layer


register_layer("transformers.pytorch_utils.Conv1D", _linear_of_conv1d, _conv1d_of_linear)


# ── convolutions that are a linear layer at every position ───────────────────────────────────────


def _is_pointwise(conv: Any) -> bool:
    ones = (1,) * len(conv.kernel_size)
    # with a kernel of one "same" and "valid" pad nothing
    padded = not isinstance(conv.padding, str) and any(conv.padding)
    return conv.kernel_size == conv.stride == ones and conv.groups == 1 and not padded


def _linear_of_conv(conv: Any) -> nn.Linear:
    linear = nn.Linear(conv.in_channels, conv.out_channels, device="meta")
    weight = conv.weight.detach().flatten(1)
    linear.weight = nn.Parameter(weight, conv.weight.requires_grad)
    linear.bias = conv.bias
    return linear.train(conv.training)


def _conv_of_linear(conv_class: Any, spatial: int, linear: nn.Linear) -> nn.Module:
    sizes = linear.in_features, linear.out_features
    conv = conv_class(*sizes, 1, bias=linear.bias is not None, device="meta")
    weight = linear.weight.detach().reshape(*linear.weight.shape, *[1] * spatial)
    conv.weight = nn.Parameter(weight, linear.weight.requires_grad)
    if linear.bias is not None:
        conv.bias = linear.bias
    return conv


for _spatial, _conv in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
    register_layer(
        _conv,
        _linear_of_conv,
        partial(_conv_of_linear, _conv, _spatial),
        feature_dim=-1 - _spatial,
        fits=_is_pointwise,
    )
