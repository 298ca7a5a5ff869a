"""Replace layers in an existing model, and switch it to evaluation."""

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn

from comera.extras import listed
from comera.nn.feed_forward_parts import fuse_feed_forwards_
from comera.nn.module import TensorTrainModule, tensor_trains

log = logging.getLogger("comera")


def swap_layers_(
    model: nn.Module, replacements: Mapping[int, nn.Module], *, biases: bool = True
) -> nn.Module:
    """Replace layers of a model in place; new layers take over the old ones' hooks.

    A patched forward method is lost, and the log says so. Layers inside lists, tuples, dicts, sets
    and dataclasses that are attributes of modules are replaced too, and so are their bound methods;
    other objects and closures keep the old layer. Registered feed-forward parts are fused.

    ``replacements`` has new layers by the ``id`` of the old; with ``biases`` a new layer gets the
    old one's bias. Models of transformers inside are prepared for ``save_pretrained``, see
    :func:`~comera.integrations.transformers.attach_`. Returns the model, or the layer that replaces
    it.
    """
    lost = [
        name
        for name, module in model.named_modules()
        if id(module) in replacements
        and ("forward" in vars(module) or _is_patched_train(type(module)))
    ]
    if lost:
        log.warning(
            "%s: the forward pass of its own, put on the layer or written in its class, is lost: "
            "what takes its place computes with the weight and the bias alone. Hooks are taken "
            "over, see register_forward_hook; those of accelerate must be put on anew",
            listed(lost),
        )  # fmt: skip
    if id(model) in replacements:
        return _with_hooks_of(model, replacements[id(model)])
    seen: set[int] = set()
    for parent in list(model.modules()):
        if id(parent) in replacements:  # stays whole: it may be put back
            continue
        for name, child in parent._modules.items():
            if id(child) in replacements:
                assert child is not None
                new = _with_hooks_of(child, replacements[id(child)])
                if biases and getattr(child, "bias", None) is not None:
                    new.bias = child.bias  # it may be another module's too
                setattr(parent, name, new)
                if name == "base_layer":  # of PEFT, whose adapters merge into (out, in) unless told
                    for part in parent.modules():
                        if hasattr(part, "fan_in_fan_out"):
                            vars(part)["fan_in_fan_out"] = type(new).__name__ == "Conv1D"
        for name, value in vars(parent).items():
            if name != "_modules":
                vars(parent)[name] = _swapped(value, replacements, seen)
    fuse_feed_forwards_(model)
    rename_tied_weights_(model)
    loaded: Any = sys.modules.get("transformers.modeling_utils")
    for part in model.modules() if loaded else ():
        is_new = isinstance(part, loaded.PreTrainedModel) and not hasattr(part, "hf_quantizer")
        if is_new and tensor_trains(part):  # by its name, since that room lies above this one
            import_module("comera.integrations.pretrained").attach_(part)
    return model


def _is_patched_train(kind: Any) -> bool:
    """Return whether a class derives from a tensor-train layer and overrides ``forward``."""
    return issubclass(kind, TensorTrainModule) and not kind.forward.__module__.startswith("comera.")


def _swapped(value: Any, replacements: Mapping[int, nn.Module], seen: set[int]) -> Any:
    """Return a value with its layers replaced; containers except tuples change in place."""
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in replacements:
        return getattr(replacements[id(value.__self__)], value.__name__, value)
    if isinstance(value, tuple):
        made = [_swapped(each, replacements, seen) for each in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if id(value) in seen:
        return value
    if isinstance(value, set):
        seen.add(id(value))
        for each in [each for each in value if id(each) in replacements]:
            value.remove(each)
            value.add(replacements[id(each)])
    elif isinstance(value, (list, deque, dict)):
        seen.add(id(value))
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new = _swapped(each, replacements, seen)
            if new is not each:
                value[key] = new
    elif is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        seen.add(id(value))
        for field in fields(value):
            each = getattr(value, field.name, None)
            new = _swapped(each, replacements, seen)
            if new is not each:
                object.__setattr__(value, field.name, new)  # it may be frozen
    return value


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def _with_hooks_of(old: nn.Module, new: nn.Module) -> nn.Module:
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))  # the same dicts: handles still remove from them
    return new


_PARTS = {"cores", "gates", "hot", "left", "right", "basis"}


def rename_tied_weights_(model: nn.Module) -> None:
    """Update transformers' lists of tied weights, for saving and for ``tie_weights()``."""
    for module in model.modules():
        kept = {
            key: names
            for key in ("_tied_weights_keys", "all_tied_weights_keys")
            if isinstance(names := getattr(module, key, None), dict)
        }
        if not kept:
            continue
        layers: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
        params = dict(module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        tied = {
            name: first[id(param)]
            for name, param in params.items()
            if first.setdefault(id(param), name) != name
        }

        def is_gone(name: str, layers=layers, params=params) -> bool:  # a pattern never is
            owner = layers.get(name.removesuffix(".weight"))
            converted = owner is not None and "weight" not in owner._parameters
            return converted or (name not in params and not _PARTS.isdisjoint(name.split(".")))

        for key, names in kept.items():
            still = {a: b for a, b in names.items() if not (is_gone(a) or is_gone(b))}
            setattr(module, key, {**still, **tied})


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Disable the fast path of ``nn.TransformerEncoder``, which skips layers and zeroes padding."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
