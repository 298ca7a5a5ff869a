"""Run feed-forward parts that others have written as one operation.

A part is a module that computes a tensor-train layer, an activation and another such layer, or a
gated pair of layers and a third one. Layer by layer autograd keeps three or four tensors of the
hidden width for it; as one operation nothing (:mod:`comera.nn.fused`). What a module computes is
read off a trace of it, so that its class may be anybody's: MLPs of transformers' models and of
one's own, ``nn.Sequential``, ``nn.TransformerEncoderLayer``.
"""

import dis
import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from comera.nn.fused import feed_forward, gated_feed_forward
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, is_hooked
from comera.ops.dispatch import is_eager

_METHODS = "forward", "feed_forward_chunk", "_ff_block"
"""What may be a part: a module's whole pass, or that share of it in BERT's and torch's layers."""

_ACTIVATIONS: dict[Any, str] = {
    nn.GELU: "gelu", F.gelu: "gelu",
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", "relu": "relu",
    nn.SiLU: "silu", F.silu: "silu",
}  # fmt: skip
_PLAIN = bool, int, float, str, type(None)
_SUMS = operator.add, torch.add
_PRODUCTS = operator.mul, torch.mul


def fuse_feed_forwards_(model: nn.Module) -> None:
    """Let the feed-forward parts of a model keep nothing of the hidden width, in place.

    Outputs and gradients stay the same. A part whose layers are all :class:`~comera.TTLinear` gets
    a class derived from its own, of the same name. It goes layer by layer as before under
    ``torch.compile`` and ``torch.func``, while dropout acts on the hidden activation, and where a
    hook or a module that has been put into it would go unnoticed.
    :func:`~comera.tensorize_` calls this.
    """
    unfuse_feed_forwards_(model)
    for module in model.modules():
        for method in _METHODS:
            part = _recognised(module, method)
            if part is not None:
                held: Any = module
                first: Any = type(held)
                held.__class__ = _fused_class(first, method)
                held._feed_forward_part = part
                break


def unfuse_feed_forwards_(model: nn.Module) -> None:
    """Undo :func:`fuse_feed_forwards_`: each part goes layer by layer again."""
    for module in model.modules():
        held: Any = module
        if isinstance(held, _Fused) and type(held) is _fused_class(*held.made_of):
            held.__class__, _ = held.made_of
            del held._feed_forward_part


@dataclass(frozen=True, slots=True)
class _Part:
    """What a module computes, or has computed so far, by names of modules inside it.

    ``after(second(activation(first(before(x)))))``, or with a gate
    ``after(down(silu(gate(before(x))) * up(before(x))))``.

    Attributes:
        layers: The tensor-train layers in this order.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        is_gated: Whether the second layer's output passes a gate.
        before: Modules that are called on the input.
        between: Dropout of the hidden activation.
        after: Modules that are called on the result; None adds the input.
        skipped: All other modules that the module calls, and the class of each.
        held: What else the module and those skipped hold, on which their code may branch.
    """

    layers: tuple[str, ...] = ()
    activation: str | None = None
    is_gated: bool = False
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str | None, ...] = ()
    skipped: tuple[tuple[str, Any], ...] = ()
    held: tuple[dict[str, Any], ...] = ()

    @property
    def is_wide(self) -> bool:
        """Whether it is the output of one layer."""
        return len(self.layers) == 1 and self.activation is None

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == (3 if self.is_gated else 2)

    def is_there(self, module: nn.Module) -> bool:
        """Say whether the module still computes this, and nobody would miss what is skipped."""
        if not is_eager() or torch._C._are_functorch_transforms_active():
            return False
        if torch_module._has_any_global_hook():
            return False
        looked_at = iter(self.held)
        if next(looked_at) != _held(module):
            return False
        for (name, kind), held in zip(self.skipped, looked_at, strict=True):
            found = _inside(module, name)
            if type(found) is not kind or is_hooked(found) or _held(found) != held:
                return False
        dropouts: list[Any] = [_inside(module, name) for name in self.between]
        return not any(dropout.training and dropout.p for dropout in dropouts)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        y = x
        for name in self.before:
            y = _inside(module, name)(y)
        layers = [_inside(module, name) for name in self.layers]
        if self.is_gated:
            y = gated_feed_forward(y, *layers)
        else:
            first, second = layers
            y = feed_forward(y, first, second, str(self.activation))
        for step in self.after:
            y = y + x if step is None else _inside(module, step)(y)
        return y


def _inside(module: Any, name: str) -> Any:
    """Return a module inside another, quicker than by ``get_submodule``."""
    found = module
    for part in name.split("."):
        found = found._modules[part]
    return found


def _held(module: nn.Module) -> dict[str, Any]:
    """Return what a module's code may branch on, but for whether it trains; see _recognised.

    Numbers and words, the names of the modules inside it, and whether it was given another pass.
    """
    held = vars(module)
    found = {name: value for name, value in held.items() if type(value) in _PLAIN}
    del found["training"]
    return found | {"_modules": tuple(held["_modules"]), "forward": held.get("forward")}


class _Fused:
    """What the class of a part has beside that of the module; see :func:`_fused_class`."""

    made_of: tuple[Any, str]
    _feed_forward_part: _Part

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the module by its first class: this one is found by no name."""
        reduced: Any = super().__reduce_ex__(2)
        return _empty, type(self).made_of, reduced[2]


def _empty(base: Any, method: str) -> Any:
    kind = _fused_class(base, method)
    return kind.__new__(kind)


@functools.cache
def _fused_class(base: Any, method: str) -> Any:
    """Derive the class of modules that run one of their methods as one operation."""
    by_layers = getattr(base, method)

    @functools.wraps(by_layers)
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        part: _Part = self._feed_forward_part
        if len(args) == 1 and not kwargs and part.is_there(self):
            return part(self, *args)
        return by_layers(self, *args, **kwargs)

    names = {"made_of": (base, method), method: fused, "__module__": base.__module__}
    return type(base.__name__, (_Fused, base), names | {"__qualname__": base.__qualname__})


def _recognised(module: nn.Module, method: str) -> _Part | None:
    """Return what a method of a module computes, if it is such a part, training or not."""
    function = getattr(type(module), method, None)
    if method in vars(module) or not _may_be_traced(module, method, function):
        return None
    modes = [(each, each.training) for each in module.modules()]
    found = []
    try:
        for training in (True, False):
            for each, _ in modes:
                each.training = training
            found.append(_traced(module, method))
    finally:
        for each, mode in modes:
            each.training = mode
    return found[0] if found[0] == found[1] else None


def _may_be_traced(module: nn.Module, method: str, function: Any) -> bool:
    """Say whether it has as many layers as it takes, and a trace would leave nothing behind."""
    layers = sum(type(each) is TTLinear for each in module.modules())
    if layers < 2 or (layers > 3 and method == "forward"):
        return False
    code = getattr(function, "__code__", None)
    if code is None or type(module).__reduce_ex__ is not object.__reduce_ex__:
        return False
    return "STORE_ATTR" not in {step.opname for step in dis.Bytecode(code)}


def _traced(module: nn.Module, method: str) -> _Part | None:
    tracer = _Tracer(method)
    try:
        graph = tracer.trace(module)
    except Exception:  # whatever code raises that is not made for it
        return None
    found = _read(module, graph)
    if found is None or len(set(tracer.called)) < len(tracer.called):
        return None
    run = {*found.layers, *found.before, *found.after}
    skipped = {name: _inside(module, name) for name in tracer.called if name not in run}
    kinds = tuple((name, type(each)) for name, each in skipped.items())
    return replace(found, skipped=kinds, held=tuple(map(_held, (module, *skipped.values()))))


class _Tracer(fx.Tracer):
    """Traces a method of a module, and notes which modules it calls."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.traced_func_name = method
        self.called: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, TensorTrainModule) or super().is_leaf_module(m, module_qualified_name):
            return True
        has_layers = any(isinstance(each, TensorTrainModule) for each in m.modules())
        return not has_layers and next(m.parameters(), None) is not None

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.called.append(self.path_of_module(m))
        return super().call_module(m, forward, args, kwargs)


def _read(module: nn.Module, graph: fx.Graph) -> _Part | None:
    """Read a part off its graph, node by node: what has been computed of one by then."""
    x, *nodes = graph.nodes
    known: dict[Any, _Part | None] = {x: _Part()}
    for node in nodes:
        given = [known.get(arg) if isinstance(arg, fx.Node) else None for arg in node.args]
        found = None
        if len(given) == 1:
            found = _after_one(module, node, given[0])
        elif len(given) == 2 and not node.kwargs:
            found = _after_two(node, given[0], given[1], x)
        if node.op == "output":
            return given[0] if given[0] is not None and given[0].is_whole else None
        if found is None:
            return None
        known[node] = found
    return None


def _after_one(module: nn.Module, node: fx.Node, part: _Part | None) -> _Part | None:
    """Extend a part by a module or a function of one tensor."""
    if part is None:
        return None
    activation = _activation(module, node)
    if activation is not None:
        return replace(part, activation=activation) if part.is_wide else None
    if node.op != "call_module" or node.kwargs:
        return None
    name = str(node.target)
    found = _inside(module, name)
    if type(found) is TTLinear:
        return None if part.is_wide or part.is_whole else replace(part, layers=(*part.layers, name))
    if not part.layers:
        return replace(part, before=(*part.before, name))
    if part.is_whole:
        return replace(part, after=(*part.after, name))
    if part.activation and isinstance(found, nn.Dropout):
        return replace(part, between=(*part.between, name))
    return None


def _after_two(node: fx.Node, a: _Part | None, b: _Part | None, x: fx.Node) -> _Part | None:
    """Extend a part by a gate, or by the input that is added."""
    if a is None or b is None:
        return None
    if node.target in _SUMS:
        part, added = (a, node.args[1]) if a.is_whole else (b, node.args[0])
        return replace(part, after=(*part.after, None)) if part.is_whole and added is x else None
    gate, passing = (a, b) if b.is_wide else (b, a)
    opens = gate.activation == "silu" and len(gate.layers) == 1 and not gate.between
    if node.target in _PRODUCTS and opens and passing.is_wide and gate.before == passing.before:
        return replace(gate, layers=(*gate.layers, *passing.layers), is_gated=True)
    return None


def _activation(module: nn.Module, node: fx.Node) -> str | None:
    """Name the activation that a node computes."""
    if node.kwargs.keys() - {"inplace", "approximate"}:
        return None
    if node.kwargs.get("approximate", "none") != "none":
        return None
    if node.op == "call_module":
        found = _inside(module, str(node.target))
        exact = getattr(found, "approximate", "none") == "none"
        return _ACTIVATIONS.get(type(found)) if exact else None
    return _ACTIVATIONS.get(node.target)
