"""Register feed-forward parts of models, to run each as one operation if it has tensor trains.

A part that runs layer by layer saves three or four tensors of the hidden width for backward; one
operation saves none. :func:`~comera.tensorize_` finds the registered parts of a model; other models
call the functions of :mod:`comera.nn.fused`.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from comera.extras import listed, say_once
from comera.nn.fused import feed_forward, format_of, gated_feed_forward, is_plain
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_concrete, is_traced

log = logging.getLogger("comera")

_FEWEST_ROWS = 16
"""Rows below which layers by themselves are faster."""

_FUNCTIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
_ACTIVATIONS: dict[Any, str] = {
    nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.SiLUActivation": "silu",
}  # fmt: skip


class Layout(NamedTuple):
    """Names of the modules of a registered class, see :func:`register_feed_forward`."""

    layers: tuple[str, ...]
    activation: str | Callable[[Tensor], Tensor]
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str | None, ...]
    inside: dict[str, str]
    method: str


class _Part(NamedTuple):
    """The modules of one part of a model, see :func:`register_feed_forward`."""

    layers: Sequence[Any]
    activation: str
    before: Sequence[Any]
    between: Sequence[Any]
    after: Sequence[Any]


LAYOUTS: dict[str, Layout] = {}
"""Registered layouts, by module and name of the class."""


def register_feed_forward(
    kind: type[nn.Module] | str,
    layers: Sequence[str],
    activation: str | Callable[[Tensor], Tensor],
    *,
    before: Sequence[str] = (),
    between: Sequence[str] = (),
    after: Sequence[str | None] = (),
    inside: Mapping[str, type[nn.Module] | str] | None = None,
    method: str = "forward",
) -> None:
    """Register a class of modules with one input that compute a feed-forward.

    :func:`~comera.tensorize_` then runs these modules as one operation, which computes
    ``after(second(between(activation(first(before(x))))))``, or with three layers
    ``after(down(silu(gate(before(x))) * up(before(x))))``. All names are attributes, with dots for
    modules inside modules. Subclasses count if they inherit the method.

    Args:
        kind: The class, or its module and name joined by a dot.
        layers: Names of the first and the second layer, or of gate, up and down projection.
        activation: Name of the activation's attribute; or ``F.gelu``, ``F.relu`` or ``F.silu`` if
            the method calls that. If the attribute is none of these, the part is not fused.
        before: Names of modules called on the input, such as a norm.
        between: Names of ``nn.Dropout`` on the hidden activation; active ones prevent fusing.
        after: Names of modules called on the result, such as dropout; None adds the input.
        inside: Names and classes of modules that hold these modules; their ``forward`` is skipped.
        method: Name of the method that computes the part.

    Example::

        register_feed_forward(MyMLP, ["up", "down"], F.gelu, before=["norm"], after=[None])
    """
    if isinstance(layers, str) or len(layers) not in (2, 3):
        raise ValueError(f"layers={layers!r} must be two names, or those of gate, up and down")
    if not isinstance(activation, str) and activation not in _FUNCTIONS.values():
        names = ", ".join(f"F.{name}" for name in _FUNCTIONS)
        raise ValueError(f"activation={activation!r} must be the name of an attribute, or {names}")
    skipped = {name: path_of(each) for name, each in (inside or {}).items()}
    if any(isinstance(names, str) for names in (before, between, after)):
        raise ValueError("before, between and after must be lists of names, not strings")
    sequences = tuple(before), tuple(between), tuple(after)
    LAYOUTS[path_of(kind)] = Layout(tuple(layers), activation, *sequences, skipped, method)
    _layout_of.cache_clear()


def path_of(kind: type | str) -> str:
    """Return the module and name of a class, joined by a dot; ``TypeError`` if it is no class."""
    if isinstance(kind, str):
        return kind
    if not isinstance(kind, type):
        raise TypeError(f"{kind!r} must be a class, or its module and name")
    return f"{kind.__module__}.{kind.__qualname__}"


def fuse_feed_forwards_(model: nn.Module) -> list[str]:
    """Run the registered feed-forward parts of a model as one operation each, in place.

    Parts are modules of registered classes whose layers are compressed, all in one format, and each
    ``nn.Sequential`` with two such layers around an activation. The new method is an attribute of
    the module, with the same outputs and gradients. It still runs layer by layer for fewer than 16
    rows, under ``torch.compile``, ``torch.func`` and other tracing, while dropout acts on the
    hidden activation, and if a hook or patch inside would be skipped. Returns the parts' names.
    """
    unfuse_feed_forwards_(model)
    names = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        layout, _ = _layout_of(kind)
        method = "forward" if layout is None else layout.method
        part = None if method in vars(module) else _part_of(module)
        if part is not None and format_of(part.layers) is not None:
            _bind(module, method)
            names.append(name or "the model")
    if names:
        said = "keep nothing of their hidden width, as one operation each: %s"
        say_once(log, logging.INFO, said, listed(names))
    return names


def unfuse_feed_forwards_(model: nn.Module) -> None:
    """Undo :func:`fuse_feed_forwards_`, so that each part runs layer by layer again."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, _Bound):
                del vars(module)[name]


def _bind(module: Any, method: str) -> None:
    vars(module)[method] = _OneOperation(module, method)
    vars(module)["_replicate_for_data_parallel"] = _Replicate(module, method)


class _Bound:
    """A bound method with a weak reference to its module; a deep copy binds to the copy."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self._module, self._method = weakref.ref(module), method

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self._module()
        return type(self)(memo.get(id(module), module), self._method)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._method)


class _OneOperation(_Bound):
    """The method of a fused part: runs one operation if equivalent, else the class's method."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__(module, method)
        plain = getattr(type(module), method).__get__(module)
        self.__signature__ = inspect.signature(plain)  # which transformers reads, compiled or not
        self.__code__ = plain.__code__  # torch.export reads it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        part = _part_of(module) if len(args) == 1 and not kwargs and may_fuse(*args) else None
        if part is None or any(dropout.training and dropout.p for dropout in part.between):
            return getattr(type(module), self._method)(module, *args, **kwargs)
        x = y = args[0]
        for step in part.before:
            y = step(y)
        if len(part.layers) == 3:
            y = gated_feed_forward(y, *part.layers)
        else:
            first, second = part.layers
            y = feed_forward(y, first, second, part.activation)
        for step in part.after:
            y = y + x if step is None else step(y)
        return y


class _Replicate(_Bound):
    """Copies a fused module for ``nn.DataParallel``; the copy's method is bound to the copy."""

    def __call__(self) -> nn.Module:
        module: Any = self._module()
        replica = type(module)._replicate_for_data_parallel(module)
        _bind(replica, self._method)
        return replica


def may_fuse(x: Any) -> bool:
    if not is_eager() or is_traced() or not is_concrete(x) or not isinstance(x, Tensor):
        return False
    few = x.is_nested or x.dim() == 0 or x.numel() < _FEWEST_ROWS * x.shape[-1]
    return not few and not torch_module._has_any_global_hook()


def _part_of(module: nn.Module) -> _Part | None:
    """Return the part that a module computes; None if unregistered or if fusing skips a hook."""
    if type(module) is nn.Sequential:
        return _part_of_sequential(module)
    kind: Any = type(module)
    layout, function = _layout_of(kind)
    if layout is None or getattr(kind, layout.method) is not function:
        return None
    find = functools.partial(_inside, module)
    try:
        containers = {find(name): path for name, path in layout.inside.items()}
        given = layout.activation
        activation = _activation_of(find(given) if isinstance(given, str) else given)
        layers, before, between = (
            [find(name) for name in names]
            for names in (layout.layers, layout.before, layout.between)
        )
        after = [name if name is None else find(name) for name in layout.after]
    except (AttributeError, KeyError):  # one is gone
        return None
    plain = all(path_of(type(m)) == path and _is_plain(m) for m, path in containers.items())
    if not plain or activation is None or (len(layers) == 3 and activation != "silu"):
        return None
    return _Part(layers, activation, before, between, after) if _are_dropouts(between) else None


def _part_of_sequential(module: nn.Sequential) -> _Part | None:
    children = list(module)
    places = [k for k, child in enumerate(children) if "multiply" in vars(type(child))]
    if len(places) != 2 or nn.Sequential.forward is not _own(nn.Sequential, "forward"):
        return None
    first, second = places
    inner = children[first + 1 : second]
    steps = [step for step in inner if type(step) is not nn.Identity or not _is_plain(step)]
    activation = _activation_of(steps[0]) if steps else None
    if activation is None or not _are_dropouts(steps[1:]):
        return None
    layers = children[first], children[second]
    return _Part(layers, activation, children[:first], steps[1:], children[second + 1 :])


def _inside(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = vars(module)[part] if part in vars(module) else module._modules[part]
    return module


def _activation_of(found: Any) -> str | None:
    for name, function in _FUNCTIONS.items():
        if found is function:
            return name if getattr(F, name) is function else None  # it may be patched
    kind = type(found)
    computed = _ACTIVATIONS.get(kind) or _ACTIVATIONS.get(path_of(kind))
    is_exact = getattr(found, "approximate", "none") == "none"
    if computed is None or not is_exact or not _is_plain(found):
        return None
    return _activation_of(getattr(found, "act", _FUNCTIONS[computed]))  # GELUActivation holds it


def _are_dropouts(steps: Sequence[Any]) -> bool:
    return all(type(step) is nn.Dropout and _is_plain(step) for step in steps)


def _is_plain(module: Any) -> bool:
    return is_plain(module, _own(module.__class__, "forward"))


@functools.cache
def _own(kind: type, method: str) -> Any:
    """Return a class's method; None if the method was patched."""
    owner = next((each for each in kind.__mro__ if method in vars(each)), None)
    function: Any = getattr(owner, method, None)
    if owner is None or hasattr(function, "__wrapped__"):
        return None
    named = f"{function.__module__}.{function.__qualname__}"
    return function if named == f"{path_of(owner)}.{method}" else None


@functools.cache
def _layout_of(kind: type) -> tuple[Layout | None, Any]:
    """Return the layout registered for a class or a base of it, and that class's method."""
    for each in kind.__mro__:
        layout = LAYOUTS.get(path_of(each))
        if layout is not None:
            return layout, _own(each, layout.method)
    return None, None


def _transformers(name: str) -> str:
    folder, _, kind = name.partition(".")
    return f"transformers.models.{folder}.modeling_{folder}.{kind}"


_BERTS = """
    bert.Bert bert_generation.BertGeneration big_bird.BigBird bros.Bros camembert.Camembert
    canine.Canine electra.Electra ernie.Ernie layoutlm.LayoutLM
    layoutlmv3.LayoutLMv3 lilt.Lilt luke.Luke markuplm.MarkupLM mra.Mra
    nystromformer.Nystromformer rembert.RemBert roberta.Roberta roc_bert.RoCBert roformer.RoFormer
    splinter.Splinter tapas.Tapas visual_bert.VisualBert xlm_roberta.XLMRoberta yoso.Yoso
"""
_GATED = """
    cohere.CohereMLP cohere2.Cohere2MLP deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP
    ernie4_5.Ernie4_5MLP eurobert.EuroBertMLP exaone4.Exaone4MLP granite.GraniteMLP
    helium.HeliumMLP jamba.JambaMLP llama.LlamaMLP ministral.MinistralMLP mistral.MistralMLP
    mllama.MllamaTextMLP olmo.OlmoMLP olmo2.Olmo2MLP olmo3.Olmo3MLP olmoe.OlmoeMLP
    pixtral.PixtralMLP qwen2.Qwen2MLP qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_moe.Qwen3MoeMLP
    qwen3_next.Qwen3NextMLP smollm3.SmolLM3MLP stablelm.StableLmMLP
"""
_UNGATED = """
    audio_spectrogram_transformer.ASTMLP beit.BeitMLP blip.BlipMLP clip.CLIPMLP deit.DeiTMLP
    dinov2.Dinov2MLP phi.PhiMLP siglip.SiglipMLP siglip2.Siglip2MLP swin.SwinMLP vit.ViTMLP
    vit_mae.ViTMAEMLP vivit.VivitMLP
"""
_OTHERS: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "gpt2.GPT2MLP gpt_bigcode.GPTBigCodeMLP gpt_neo.GPTNeoMLP imagegpt.ImageGPTMLP":
        (["c_fc", "c_proj"], "act", {"after": ["dropout"]}),
    "gpt_neox.GPTNeoXMLP": (["dense_h_to_4h", "dense_4h_to_h"], "act", {}),
    "distilbert.FFN":
        (["lin1", "lin2"], "activation", {"after": ["dropout"], "method": "ff_chunk"}),
    _UNGATED: (["fc1", "fc2"], "activation_fn", {}),
    _GATED: (["gate_proj", "up_proj", "down_proj"], "act_fn", {}),
}  # fmt: skip

_TORCHS = {nn.TransformerEncoderLayer: "dropout2", nn.TransformerDecoderLayer: "dropout3"}
for _kind, _dropout in _TORCHS.items():
    register_feed_forward(
        _kind, ["linear1", "linear2"], "activation",
        between=["dropout"], after=[_dropout], method="_ff_block",
    )  # fmt: skip
for _path in map(_transformers, _BERTS.split()):
    register_feed_forward(
        f"{_path}Layer", ["intermediate.dense", "output.dense"], "intermediate.intermediate_act_fn",
        after=["output.dropout", None, "output.LayerNorm"], method="feed_forward_chunk",
        inside={"intermediate": f"{_path}Intermediate", "output": f"{_path}Output"},
    )  # fmt: skip
for _names, (_layers, _activation, _more) in _OTHERS.items():
    for _path in map(_transformers, _names.split()):
        register_feed_forward(_path, _layers, _activation, **_more)
