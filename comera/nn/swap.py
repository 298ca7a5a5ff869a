"""Replace layers in an existing model, and switch it to evaluation."""

import dis
import functools
import inspect
import itertools
import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from comera.extras import after_swap, listed, say_once
from comera.nn.dense_weight import WeightByAssignment
from comera.nn.feed_forward_parts import fuse_feed_forwards_
from comera.nn.module import TensorTrainModule, tensor_trains

log = logging.getLogger("comera")


_LOADS_DENSE = {"huggingface_hub.PyTorchModelHubMixin", "diffusers.ModelMixin"}
"""Classes whose ``from_pretrained`` makes a dense model, and leaves out what it does not know."""

_RANDOM_FOLDER = (
    "%s.save_pretrained writes a folder that from_pretrained loads as a dense model of random "
    "weights: save by comera.save_model and load by comera.load_model, or densify_ before saving"
)


def swap_layers_(
    model: nn.Module, replacements: Mapping[int, nn.Module], *, biases: bool = True
) -> nn.Module:
    """Replace layers of a model in place; new layers take over what others put on the old ones.

    That is hooks, attributes, buffers, and attributes of the weight. A patched forward method and
    hooks on a weight's gradient are lost, and the log says so. Layers inside lists, tuples, dicts,
    sets, dataclasses and partials that are attributes of modules are replaced too, and so are their
    bound methods; other objects and closures keep the old layer. Weights inside lists and the like
    stay, which the log says. Registered feed-forward parts are fused.

    ``replacements`` has new layers by the ``id`` of the old; with ``biases`` a new layer gets the
    old one's bias. Models of transformers inside are prepared for ``save_pretrained``, see
    :func:`~comera.integrations.transformers.attach_`. Returns the model, or the layer that replaces
    it.
    """
    named = dict(model.named_modules())
    pairs = [(n, old, replacements[id(old)]) for n, old in named.items() if id(old) in replacements]

    def has_own_forward(old: Any) -> bool:
        is_ours = type(old).forward.__module__.startswith("comera.")
        return "forward" in vars(old) or (isinstance(old, TensorTrainModule) and not is_ours)

    if lost := [name for name, old, _ in pairs if has_own_forward(old)]:
        log.warning(
            "%s: the forward pass of its own, put on the layer or written in its class, is lost: "
            "what takes its place computes with the weight and the bias alone. Hooks are taken "
            "over, see register_forward_hook; those of accelerate must be put on anew",
            listed(lost),
        )  # fmt: skip
    lost = [f"{name}.{what}".lstrip(".") for name, *pair in pairs for what in _carry_over(*pair)]
    if lost and biases:  # else the layer is to be run, not trained
        log.warning(
            "%s cannot go along: cores have gradients of other shapes than the weight, and new "
            "layers have attributes of their own",
            listed(lost),
        )
    if id(model) in replacements:
        return _with_hooks_of(model, replacements[id(model)])
    seen: set[int] = set()
    for parent in list(model.modules()):
        if id(parent) not in replacements:  # else it stays whole: it may be put back
            _swap_parts_(parent, replacements, biases, seen)
    gone = seen - set(map(id, (None, *model.parameters())))
    if stale := [name for name, old, _ in pairs if id(old._parameters.get("weight")) in gone]:
        log.warning(
            "the weight of %s is also in a list or another object of the model, where the old one "
            "stays, which nothing trains any more", listed(stale),
        )  # fmt: skip
    fuse_feed_forwards_(model)
    rename_tied_weights_(model)
    for part in model.modules():
        bases = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(part).__mro__}
        if bases & _LOADS_DENSE and tensor_trains(part):
            say_once(log, logging.WARNING, _RANDOM_FOLDER, type(part).__name__)
    for hook in after_swap:
        hook(model)
    return model


def _swap_parts_(
    parent: nn.Module, replacements: Mapping[int, nn.Module], biases: bool, seen: set[int]
) -> None:
    for name, child in parent._modules.items():
        if child is None or id(child) not in replacements:
            continue
        new = _with_hooks_of(child, replacements[id(child)])
        if biases and child._parameters.get("bias") is not None:
            new.bias = child.bias  # it may be another module's too
        setattr(parent, name, new)
        if name == "base_layer":  # of PEFT, whose adapters merge into (out, in) unless told
            for part in parent.modules():
                if hasattr(part, "fan_in_fan_out"):
                    vars(part)["fan_in_fan_out"] = type(new).__name__ == "Conv1D"
    for name, value in vars(parent).items():
        if name != "_modules":
            vars(parent)[name] = _swapped(value, replacements, seen)


def _swapped(value: Any, replacements: Mapping[int, nn.Module], seen: set[int]) -> Any:
    """Return a value with its layers replaced; containers except tuples change in place."""
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in replacements:
        return getattr(replacements[id(value.__self__)], value.__name__, value)
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        func, args, keywords = new = _swapped(parts, replacements, seen)
        return value if new is parts else type(value)(func, *args, **keywords)
    if isinstance(value, tuple):
        made = [_swapped(each, replacements, seen) for each in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, set):
        for each in [each for each in value if id(each) in replacements]:
            value.remove(each)
            value.add(replacements[id(each)])
    elif isinstance(value, (list, deque, dict)):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new = _swapped(each, replacements, seen)
            if new is not each:
                value[key] = new
    elif is_dataclass(value) and not isinstance(value, (type, nn.Module)):
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
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _with_hooks_of(old: nn.Module, new: nn.Module) -> nn.Module:
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))  # the same dicts: handles still remove from them
    if "bias" in vars(old) and "bias" in new._parameters:  # a hook of nn.utils.prune computes it
        del new.bias
        vars(new)["bias"] = old.bias
    return new


_OF_OTHERS = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward", "_is_hf_initialized"}
"""Attributes that stay behind: those of every module, and what accelerate and transformers set."""


@functools.cache
def _own_names(kind: type) -> set[str]:
    names = {"weight", "bias"}
    for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        names |= {*vars(cls).get("__annotations__", ())}
        for function in map(inspect.unwrap, vars(cls).values()):
            if code := getattr(function, "__code__", None):
                names |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    return names


def _carry_over(old: Any, new: Any) -> list[str]:
    """Give a new layer what others put on the old one and on its weight; return what is lost."""
    if not any(isinstance(layer, WeightByAssignment) for layer in (old, new)):
        return []
    known = _OF_OTHERS | _own_names(old.__class__)
    lost = ["load_state_dict's pre-hooks"] * bool(old._load_state_dict_pre_hooks)  # bound to it
    inside = {} if isinstance(old, nn.Sequential) else old._modules
    parts = (vars(old), old._parameters, old._buffers, inside)
    is_foreign = not isinstance(old, WeightByAssignment)
    for name in dict.fromkeys(itertools.chain(*parts)):
        value = getattr(old, name)
        plain = isinstance(value, int | float | str | tuple | None)
        if name in known:  # its settings are read by others: those of a convolution by FNO
            if plain and is_foreign and name not in _OF_OTHERS and not hasattr(new, name):
                setattr(new, name, value)
            continue
        is_own = name == "parametrizations" or getattr(value, "__self__", None) is old
        if is_own or hasattr(new, name):
            there = getattr(new, name, None)
            lost += [] if there is value or (plain and there == value) else [name]
        elif name in old._buffers:
            new.register_buffer(name, value, name not in old._non_persistent_buffers_set)
        else:
            setattr(new, name, value)
    before, after = (
        [param for name, param in layer.named_parameters() if name != "bias"]
        for layer in (old, new)
    )
    if any(param._backward_hooks or param._post_accumulate_grad_hooks for param in before):
        lost.append("weight's hooks")
    for name, value in vars(before[0]).items() if before else ():
        for param in after if name not in _OF_OTHERS else ():
            setattr(param, name, value)
    return lost


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
            owner = layers.get(name.removesuffix(".weight").removesuffix(".bias"))
            converted = owner is not None and params.keys().isdisjoint((name, f"{name}.weight"))
            return converted or (name not in params and not _PARTS.isdisjoint(name.split(".")))

        for key, names in kept.items():
            still = {a: b for a, b in names.items() if not (is_gone(a) or is_gone(b))}
            setattr(module, key, {**still, **tied})


@contextmanager
def naming_old_optimizers(model: nn.Module) -> Iterator[None]:
    """Log which optimizers among the attributes of a model hold parameters replaced meanwhile."""
    before = set(map(id, model.parameters()))
    yield
    gone = before - set(map(id, model.parameters()))
    for name, module in model.named_modules() if gone else ():
        for key, value in vars(module).items():
            for each in value if isinstance(value, list | tuple) else [value]:
                groups = each.param_groups if isinstance(each, Optimizer) else ()
                if any(id(param) in gone for group in groups for param in group["params"]):
                    log.warning(
                        "%s holds parameters that are gone, and none of those in their place: "
                        "build it anew", f"{name}.{key}".lstrip("."),
                    )  # fmt: skip


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model: a mapping gives its keywords, a tuple or list its arguments, else one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def evaluation_mode(model: nn.Module, caches: bool = True) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module afterwards.

    Without ``caches`` transformers' are off, which are written in place, as no gradient allows.
    """
    training = {module: module.training for module in model.modules()}
    configs = [] if caches else [getattr(module, "config", None) for module in training]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    model.eval()
    try:
        for config in caching:
            object.__setattr__(config, "use_cache", False)  # it may be frozen
        yield
    finally:
        for config in caching:
            object.__setattr__(config, "use_cache", True)
        for module, was in training.items():
            module.training = was


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context without compiled code, which does not run hooks that layers have later."""
    is_used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Disable the fast path of ``nn.TransformerEncoder``, which skips layers and zeroes padding."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
