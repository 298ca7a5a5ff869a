"""Run feed-forward parts that others have written as one operation.

A part is a module that computes a tensor-train layer, an activation and another such layer, or a
gated pair of layers and a third one. Layer by layer autograd keeps three or four tensors of the
hidden width for it; as one operation nothing (:mod:`comera.nn.fused`). What a module computes is
read off its source, by :mod:`comera.nn.read_forward`, so that its class may be anybody's: MLPs of
transformers' models and of one's own, ``nn.Sequential``, ``nn.TransformerEncoderLayer``.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from comera.names import listed
from comera.nn.fused import feed_forward, gated_feed_forward
from comera.nn.linear import TTLinear
from comera.nn.read_forward import Part, inside, read
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_concrete, is_traced

log = logging.getLogger("comera")

_METHODS = "forward", "feed_forward_chunk", "ff_chunk", "_ff_block"
"""Methods that may compute a part: a module's whole pass, or a share of it, as BERT's, DistilBERT's
and torch's layers have it."""

_FEW = 16
"""Rows below which layers by themselves are quicker, and keep next to nothing."""


def fuse_feed_forwards_(model: nn.Module) -> None:
    """Let the feed-forward parts of a model keep nothing of the hidden width, in place.

    Outputs and gradients stay the same. A part whose layers are all :class:`~comera.TTLinear` gets
    a class derived from its own, of the same name. It goes layer by layer as before for fewer than
    16 rows, under ``torch.compile``, ``torch.func`` and other tracing, while dropout acts on the
    hidden activation, and where a hook, or anything that was changed inside it, would go unnoticed.
    :func:`~comera.tensorize_` calls this. A line on the ``comera`` logger, of level INFO, names the
    parts.
    """
    unfuse_feed_forwards_(model)
    done: set[int] = set()
    names = []
    for name, module in model.named_modules():
        found = None if id(module) in done else _recognised(module)
        if found is not None:
            held: Any = module
            kind: Any = type(held)
            method, part = found
            held.__class__ = _fused_class(kind, method)
            held._feed_forward_part = part
            names.append(name or "the model")
            done.update(map(id, module.modules()))
    if names:
        log.info("keep nothing of their hidden width, as one operation each: %s", listed(names))


def unfuse_feed_forwards_(model: nn.Module) -> None:
    """Undo :func:`fuse_feed_forwards_`: each part goes layer by layer again."""
    for module in model.modules():
        held: Any = module
        if isinstance(held, _Fused) and type(held) is _fused_class(*held.made_of):
            held.__class__, _ = held.made_of
            vars(held).pop("_feed_forward_part", None)


class _Fused(nn.Module):
    """Base, beside the module's own class, of the classes that :func:`_fused_class` makes."""

    made_of: tuple[Any, str]
    _feed_forward_part: Part | None = None  # a new one of this class has none

    def __init_subclass__(cls, **settings: Any) -> None:
        """Say nothing of it to the module's class, which may count its children."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the module by its first class: this one is found by no name."""
        reduced: Any = super().__reduce_ex__(2)
        state = {name: value for name, value in reduced[2].items() if name != "_feed_forward_part"}
        return _empty, type(self).made_of, state

    def __setstate__(self, state: Any) -> None:
        """Read anew what the class computes, which may have been written anew since."""
        super().__setstate__(state)
        base, method = self.made_of
        held: Any = self
        held._feed_forward_part = read(held, method, getattr(base, method))


def _empty(base: Any, method: str) -> Any:
    kind = _fused_class(base, method)
    return kind.__new__(kind)


@functools.cache
def _fused_class(base: Any, method: str) -> Any:
    """Derive the class of modules that run one of their methods as one operation."""

    @functools.wraps(getattr(base, method))
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        part: Part | None = self._feed_forward_part
        if part is not None and len(args) == 1 and not kwargs and _may_run(part, self, *args):
            return _run(part, self, *args)
        return getattr(base, method)(self, *args, **kwargs)

    names = {"made_of": (base, method), method: fused, "__module__": base.__module__}
    return type(base.__name__, (_Fused, base), names | {"__qualname__": base.__qualname__})


def _recognised(module: nn.Module) -> tuple[str, Part] | None:
    """Return a method of a module that computes a part, and which, if there is one."""
    kind = type(module)
    is_plain = (
        type(kind) is type
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )
    if not is_plain or sum(type(each) is TTLinear for each in module.modules()) < 2:
        return None
    for method in _METHODS:
        function = None if method in vars(module) else getattr(kind, method, None)
        part = None if function is None else read(module, method, function)
        if part is not None:
            return method, part
    return None


def _may_run(part: Part, module: Any, x: Any) -> bool:
    """Say whether the module still computes a part, and nobody would miss what is left out."""
    if not is_eager() or is_traced() or not is_concrete(x) or not isinstance(x, Tensor):
        return False
    if x.dim() == 0 or x.numel() < _FEW * x.shape[-1]:
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch_module._has_any_global_hook():
        return False
    return part.is_there(module)


def _run(part: Part, module: nn.Module, x: Tensor) -> Tensor:
    y = x
    for name in part.before:
        y = inside(module, name)(y)
    layers = [inside(module, name) for name in part.layers]
    if part.is_gated:
        y = gated_feed_forward(y, *layers)
    else:
        first, second = layers
        y = feed_forward(y, first, second, str(part.activation))
    for step in part.after:
        y = y + x if step is None else inside(module, step)(y)
    return y
