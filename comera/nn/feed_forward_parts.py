"""Run feed-forward parts that others have written as one operation.

A part is a module that computes a tensor-train layer, an activation and another such layer, or a
gated pair of layers and a third one. Layer by layer autograd keeps three or four tensors of the
hidden width for it; as one operation nothing (:mod:`comera.nn.fused`). What a module computes is
read off its source, so that its class may be anybody's: MLPs of transformers' models and of one's
own, ``nn.Sequential``, ``nn.TransformerEncoderLayer``.

Read off the source of a module's method whether it computes a feed-forward part, and of what.

Nothing of the source is run. It must consist of assignments to names and a return, of calls of
modules and activations on one tensor, products and sums: a branch, a context, a decorator or
anything else that could mean more makes the method unreadable, and it is left alone.
"""

import ast
import dis
import functools
import inspect
import logging
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from comera.extras import listed
from comera.nn.fused import feed_forward, gated_feed_forward, is_as_noted, is_hooked, passes_of
from comera.nn.linear import TTLinear
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_concrete, is_traced

_ACTIVATIONS: dict[Any, str] = {
    nn.GELU: "gelu", F.gelu: "gelu",
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu",
    nn.SiLU: "silu", F.silu: "silu",
}  # fmt: skip

_PASSES = passes_of(nn.GELU, nn.ReLU, nn.SiLU, nn.Identity, nn.Dropout)
_FUNCTIONS = {name: getattr(F, name) for name in _ACTIVATIONS.values()}
"""The function of torch that the modules among them call, by the name of the activation."""


class _UnreadableError(Exception):
    """The source does more than a feed-forward part, or something else."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A module whose own pass is left out, as its parts are called instead.

    Attributes:
        name: Its name; empty for the whole.
        kind: Its class; None for the whole, whose class is derived from it.
        method: Name of the method that was read.
        function: That method, of the class.
        children: Names of the modules inside, where the method calls all of them.
        functions: Activations that it holds as functions, by name.
        outside: Activations that the method calls by names outside of it, by these.
    """

    name: str
    kind: Any
    method: str
    function: Any
    children: tuple[str, ...] | None = None
    functions: tuple[tuple[str, Any], ...] = ()
    outside: tuple[tuple[tuple[str, ...], Any], ...] = ()

    def is_there(self, whole: Any) -> bool:
        module = inside(whole, self.name)
        if module is None:
            return False
        kind = self.kind
        if kind is None:
            kind, _ = module.made_of
        elif type(module) is not kind or is_hooked(module):
            return False
        held = vars(module)
        return (
            getattr(kind, self.method) is self.function
            and (self.children is None or self.children == tuple(module._modules))
            and all(held.get(name) is function for name, function in self.functions)
            and all(_outside(self.function, path) is found for path, found in self.outside)
        )


@dataclass(frozen=True, slots=True)
class Part:
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
        opened: Modules whose own pass is left out.
        skipped: Modules that are the activation, or nothing, and the class of each.
    """

    layers: tuple[str, ...] = ()
    activation: str | None = None
    is_gated: bool = False
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str | None, ...] = ()
    opened: tuple[_Opened, ...] = ()
    skipped: tuple[tuple[str, Any], ...] = ()

    @property
    def is_wide(self) -> bool:
        """Whether it is the output of one layer."""
        return len(self.layers) == 1 and self.activation is None

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == (3 if self.is_gated else 2)

    @property
    def names(self) -> set[str | None]:
        """Names of all modules that it is made of."""
        skipped = [name for name, _ in self.skipped]
        opened = [each.name for each in self.opened]
        return {*self.before, *self.layers, *self.between, *self.after, *skipped, *opened}

    def is_there(self, module: nn.Module) -> bool:
        """Say whether the module still computes this, and no hook or change goes unnoticed."""
        if getattr(F, str(self.activation)) is not _FUNCTIONS[str(self.activation)]:
            return False
        for name, kind in self.skipped:
            found = inside(module, name)
            if type(found) is not kind or not is_as_noted(found, _PASSES) or not _is_exact(found):
                return False
        for name in self.between:
            found = inside(module, name)
            if type(found) is not nn.Dropout or not is_as_noted(found, _PASSES):
                return False
            if found.training and found.p:
                return False
        called = (*self.before, *self.layers, *(step for step in self.after if step is not None))
        return all(inside(module, name) is not None for name in called) and all(
            opened.is_there(module) for opened in self.opened
        )


def inside(module: Any, name: str) -> Any:
    """Return a module inside another, quicker than by ``get_submodule``; None if it is gone."""
    found = module
    for part in name.split(".") if name else ():
        found = found._modules.get(part)
        if found is None:
            return None
    return found


def read(module: nn.Module, method: str, function: Any) -> Part | None:
    """Return what a method of a module computes of its input, if it is a feed-forward part.

    Args:
        module: The module.
        method: Name of the method.
        function: The method as its class has it.
    """
    reader = _Reader(module)
    try:
        part = reader.passed("", module, method, function, [Part()])
    except _UnreadableError:
        return None
    part = replace(part, opened=tuple(reader.opened), skipped=tuple(reader.skipped))
    # One whose result comes to nothing may be called for what else it does, as running means.
    return part if part.is_whole and reader.called <= part.names else None


def _is_exact(module: nn.Module) -> bool:
    """Say whether a module is not GELU by its approximation, which is another function."""
    return getattr(module, "approximate", "none") == "none"


class _Reader:
    """Follows what is computed of the input through the source of a module and those inside."""

    def __init__(self, whole: nn.Module) -> None:
        self.whole = whole
        self.called: set[str] = set()
        self.opened: list[_Opened] = []
        self.skipped: list[tuple[str, Any]] = []

    def passed(
        self, name: str, module: nn.Module, method: str, function: Any, given: Sequence[Part]
    ) -> Part:
        """Return what a method of a module makes of its inputs."""
        opened = _Opened(name, type(module) if name else None, method, function)
        if type(module) is nn.Sequential and function is nn.Sequential.forward:
            children = tuple(module._modules)
            self.opened.append(replace(opened, children=children))
            (value,) = _exactly(1, given)
            for child in children:
                value = self.called_on(_below(name, child), [value])
            return value
        source = _source(function)
        if source is None:
            raise _UnreadableError
        names = [arg.arg for arg in source.args.args]
        frame = _Frame(self, name, module, function, names[0])
        frame.known = dict(zip(names[1:], _exactly(len(names) - 1, given), strict=True))
        result = frame.result(source.body)
        functions, outside = tuple(frame.functions), tuple(frame.outside)
        self.opened.append(replace(opened, functions=functions, outside=outside))
        return result

    def called_on(self, name: str, given: Sequence[Part]) -> Part:
        """Return what a module inside makes of its inputs."""
        module = inside(self.whole, name)
        if module is None or name in self.called:
            raise _UnreadableError
        self.called.add(name)
        part = given[0]
        kind = type(module)
        if kind is TTLinear:
            (part,) = _exactly(1, given)
            if part.is_wide or part.is_whole:
                raise _UnreadableError
            return replace(part, layers=(*part.layers, name))
        if kind is nn.Identity:
            self.skipped.append((name, kind))
            return part
        if kind in _ACTIVATIONS and _is_exact(module):
            self.skipped.append((name, kind))
            return _activated(_ACTIVATIONS[kind], given)
        if part.is_wide or any(type(each) is TTLinear for each in module.modules()):
            if kind.__call__ is not nn.Module.__call__:
                raise _UnreadableError
            return self.passed(name, module, "forward", kind.forward, given)
        (part,) = _exactly(1, given)
        if not part.layers:
            return replace(part, before=(*part.before, name))
        if part.is_whole:
            return replace(part, after=(*part.after, name))
        if kind is nn.Dropout:
            return replace(part, between=(*part.between, name))
        raise _UnreadableError


class _Frame:
    """The names in one method, as its source is followed."""

    def __init__(
        self,
        reader: _Reader,
        name: str,
        module: nn.Module,
        function: Any,
        own: str,
    ) -> None:
        self.reader, self.name, self.module = reader, name, module
        self.function, self.own = function, own
        self.known: dict[str, Part] = {}
        self.functions: list[tuple[str, Any]] = []
        self.outside: list[tuple[tuple[str, ...], Any]] = []

    def result(self, body: Sequence[ast.stmt]) -> Part:
        for statement in body[:-1]:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise _UnreadableError
            (target,) = statement.targets
            if not isinstance(target, ast.Name) or target.id == self.own:
                raise _UnreadableError
            self.known[target.id] = self.value(statement.value)
        last = body[-1]
        if not isinstance(last, ast.Return) or last.value is None:
            raise _UnreadableError
        return self.value(last.value)

    def value(self, node: ast.expr) -> Part:
        if isinstance(node, ast.Name) and node.id in self.known:
            return self.known[node.id]
        if isinstance(node, ast.BinOp):
            a, b = self.value(node.left), self.value(node.right)
            if isinstance(node.op, ast.Add):
                return _sum(a, b)
            if isinstance(node.op, ast.Mult):
                return _product(a, b)
        if isinstance(node, ast.Call) and node.args and not node.keywords:
            return self.call(node.func, [self.value(arg) for arg in node.args])
        raise _UnreadableError

    def call(self, function: ast.expr, given: Sequence[Part]) -> Part:
        path = _path(function)
        root, *rest = path
        if root == self.own and (not rest or hasattr(type(self.module), rest[0])):
            raise _UnreadableError
        if root != self.own:
            found = None if root in self.known else _outside(self.function, path)
            activation = _activation_of(found)
            self.outside.append((tuple(path), found))
            return _activated(activation, given)
        if len(rest) == 1 and rest[0] in vars(self.module):  # a function that the module holds
            found = vars(self.module)[rest[0]]
            self.functions.append((rest[0], found))
            return _activated(_activation_of(found), given)
        return self.reader.called_on(_below(self.name, ".".join(rest)), given)


def _activated(activation: str, given: Sequence[Part]) -> Part:
    """Return an activation of the output of one layer."""
    (part,) = _exactly(1, given)
    if not part.is_wide:
        raise _UnreadableError
    return replace(part, activation=activation)


def _activation_of(found: Any) -> str:
    if not isinstance(found, types.FunctionType | types.BuiltinFunctionType):
        raise _UnreadableError
    if found not in _ACTIVATIONS:
        raise _UnreadableError
    return _ACTIVATIONS[found]


def _sum(a: Part, b: Part) -> Part:
    """Add the input to what is whole."""
    whole, added = (a, b) if a.is_whole else (b, a)
    if not whole.is_whole or added != Part():
        raise _UnreadableError
    return replace(whole, after=(*whole.after, None))


def _product(a: Part, b: Part) -> Part:
    """Let the output of one layer pass the gate that another opens."""
    gate, passing = (a, b) if b.is_wide else (b, a)
    opens = gate.activation == "silu" and len(gate.layers) == 1 and not gate.between
    if not opens or not passing.is_wide or gate.before != passing.before:
        raise _UnreadableError
    return replace(gate, layers=(*gate.layers, *passing.layers), is_gated=True)


def _exactly(count: int, given: Sequence[Part]) -> Sequence[Part]:
    if len(given) != count:
        raise _UnreadableError
    return given


def _outside(function: Any, path: Sequence[str]) -> Any:
    """Return what a function gets at by ``a.b.c`` outside of it; None if nothing is there."""
    root, *rest = path
    try:
        return functools.reduce(getattr, rest, function.__globals__[root])
    except (KeyError, AttributeError):
        return None


def _below(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _path(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``."""
    if isinstance(node, ast.Attribute):
        return [*_path(node.value), node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    raise _UnreadableError


@functools.cache
def _source(function: Any) -> ast.FunctionDef | None:
    """Return a function of plain arguments as its source has it, if the source can be trusted."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return None
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    args = found.args
    more = args.posonlyargs, args.kwonlyargs, args.defaults, args.vararg, args.kwarg
    if any(more) or len(args.args) < 2 or not _is_of(function.__code__, text):
        return None
    return found


def _is_of(code: types.CodeType, text: str) -> bool:
    """Say whether code was made of a text: a file may have been edited since it was imported."""
    made = compile(text, "", "exec", dont_inherit=True).co_consts
    return any(isinstance(each, types.CodeType) and _steps(each) == _steps(code) for each in made)


def _steps(code: types.CodeType) -> list[Any]:
    """Return what code does. By which step it gets at a method depends on imports around it."""
    steps = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    found = [("LOAD_ATTR" if name == "LOAD_METHOD" else name, value) for name, value in steps]
    return [code.co_name, *(step for step in found if step[0] not in ("PUSH_NULL", "PRECALL"))]


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
