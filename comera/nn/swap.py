"""Layers in the place of others, in a model that exists."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from comera.nn.feed_forward_parts import fuse_feed_forwards_
from comera.nn.forward_sharing import share_in_forward_


def swap_layers_(
    model: nn.Module, replacements: Mapping[int, nn.Module], *, biases: bool = True
) -> nn.Module:
    """Put layers in the place of others, whose hooks they take over, in place.

    Lists, tuples and dicts that a module of the model keeps as attributes hold the new ones, too.
    Linear tensor trains among them contract their cores together from then on, and their
    feed-forward parts keep nothing of the hidden width.

    Args:
        model: The model.
        replacements: New layers by the ``id`` of those that they replace.
        biases: Whether they take over the biases too.

    Returns:
        The model; if it is itself replaced, the layer that replaces it.
    """
    if id(model) in replacements:
        return _with_hooks_of(model, replacements[id(model)])
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
        for name, value in vars(parent).items():
            if name != "_modules":
                vars(parent)[name] = _swapped(value, replacements)
    share_in_forward_(model)
    fuse_feed_forwards_(model)
    return model


def _swapped(value: Any, replacements: Mapping[int, nn.Module]) -> Any:
    """Return what a module is to keep as an attribute: lists and dicts are changed in place."""
    if type(value) is tuple and any(id(each) in replacements for each in value):
        return tuple(replacements.get(id(each), each) for each in value)
    if isinstance(value, (list, dict)):
        for key, each in enumerate(value) if isinstance(value, list) else value.items():
            if id(each) in replacements:
                value[key] = replacements[id(each)]
    return replacements.get(id(value), value)


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def _with_hooks_of(old: nn.Module, new: nn.Module) -> nn.Module:
    """Return the new layer with the hooks of the old one."""
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))  # the same dicts: handles still remove from them
    return new
