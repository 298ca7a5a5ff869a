"""Describe models as JSON, and rebuild them from descriptions and tensors.

A registry maps names in files to classes of layers. A layer describes itself by ``config()``, and
its class rebuilds it by ``from_config()``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comera import __version__
from comera.extras import listed
from comera.nn.embedding import TableHead, TiedTTLinear, TTEmbedding, TTEmbeddingBag
from comera.nn.feed_forward_parts import path_of
from comera.nn.forms import as_torch, split_names
from comera.nn.linear import FORMATS, TTPointwise
from comera.nn.module import TensorTrainModule
from comera.nn.swap import swap_layers_
from comera.nn.targets import TTConfig
from comera.serving.freeze import refuses_training
from comera.serving.layers import FactoredHead, FactoredTable, ThinLinear

Entry = Mapping[str, Any]
"""The description of one layer: its ``kind``, its ``config()`` and the layer it ``works_on``."""

FORMAT = "comera-model"
VERSION = 1
"""The newest version of the format that is read and written here."""

_CLASSES: dict[str, Any] = {
    layer_class.__name__: layer_class
    for layer_class in (
        TTPointwise, TTEmbedding, TTEmbeddingBag, TiedTTLinear,
        ThinLinear, FactoredTable, FactoredHead,
    )
}  # fmt: skip

_DAMAGE = (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""Errors that constructors raise for impossible sizes."""


def register_kind(name: str, layer_class: type[nn.Module]) -> None:
    """Register a class of layers under a name in files, for ``save_model`` and ``load_model``.

    The layer's method ``config()`` returns a dict for JSON. The class method
    ``from_config(config, lead)`` makes a layer on the ``meta`` device; ``lead`` is the layer whose
    parameters it shares, or None. Subclasses of comera's layers inherit both methods, and extend
    them for other arguments. Do not change the name while files with it are to be read. Raises
    ``ValueError`` if another class has the name.
    """
    known = _classes().get(name) or _CLASSES.setdefault(name, layer_class)
    if known is not layer_class:
        raise ValueError(f"{name!r} is the name of {known.__qualname__}")


def _classes() -> dict[str, Any]:
    return {each.__name__: each for each in FORMATS.values()} | _CLASSES


def _kind_of(layer: nn.Module) -> str | None:
    """Return the registered name of a layer's class; None if it needs no description."""
    classes = _classes()
    for name, layer_class in classes.items():
        if type(layer) is layer_class:
            return name
    if isinstance(layer, (TensorTrainModule, *classes.values())):
        raise ValueError(
            f"{type(layer).__qualname__} has no form in a file: give it one with "
            "comera.saved.description.register_kind"
        )
    return None


def describe(model: nn.Module, config: TTConfig | None = None) -> dict[str, Any]:
    """Describe a model, compressed or not, so that its layers can be rebuilt without any setting.

    Returns a dict that JSON can hold: ``layers`` by name; for each later name of a tied tensor its
    first name (``tied``); the names of ``frozen`` parameters, of experts that were split
    (``split_experts``) and of modules given to :func:`~comera.freeze_` (``served``); the class of
    the dense model and, from transformers, its configuration (``model``); and ``config``, for
    people (``tensorized``). Raises ``ValueError`` if a layer's class is not registered, or a layer
    shares the parameters of a layer outside the model.
    """
    origin: dict[str, Any] = {"class": path_of(type(model))}
    settings: Any = getattr(model, "config", None)
    if callable(getattr(settings, "to_dict", None)):
        plain = json.loads(json.dumps(settings.to_dict(), default=str))
        plain.pop("quantization_config", None)  # which save_pretrained has left, of these layers
        origin |= {"config_class": path_of(type(settings)), "config": plain}
    layers = describe_layers(model)
    return {
        "format": FORMAT,
        "version": VERSION,
        "comera": __version__,
        "model": origin,
        "tensorized": None if config is None else config.to_dict(),
        "layers": layers,
        "tied": _tied_names(model, layers),
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        "split_experts": split_names(model),
        "served": [name for name, part in model.named_modules() if refuses_training(part)],
    }


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe the tensor-train layers of a model by name, see :func:`describe`."""
    found = dict(_layers(model))
    name_of = {id(layer): name for name, layer in found.items()}
    leads: dict[int, str] = {}
    described = {}
    for name, layer in found.items():
        entry = {"kind": _kind_of(layer), **layer.config()}
        if isinstance(layer, TableHead):
            other = layer.embedding
            if id(other) not in name_of:
                raise ValueError(
                    f"{name} works on the parameters of a {type(other).__name__} that is no layer "
                    "of the model: hand over the model that holds both"
                )
            entry["works_on"] = name_of[id(other)]
        elif isinstance(layer, TensorTrainModule):
            lead = leads.setdefault(id(layer.cores), name)
            if lead != name:
                entry["works_on"] = lead
        described[name] = entry
    return described


def _layers(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the outermost layers that need a description, each with its first name."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if _kind_of(module) is not None:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _layers(child, f"{name}.{key}".lstrip("."), seen)


def _tied_names(model: nn.Module, layers: Mapping[str, Entry]) -> dict[str, str]:
    """Map each later name of a tensor in the state dict to the first name, that of its owner."""
    inside = tuple(f"{name}.".lstrip(".") for name, entry in layers.items() if "works_on" in entry)
    state = {n: x for n, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    first: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name.startswith(inside)):
        first.setdefault(id(state[name]), name)
    return {name: first[id(x)] for name, x in state.items() if first[id(x)] != name}


def check_description(described: Any, where: str) -> dict[str, Any]:
    """Check and return a description; ``ValueError``, naming ``where``, if it is unreadable."""
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ValueError(f"{where} is no description of a model by comera.save_model")
    version = described.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{where} is damaged: version={version!r} is no version of the format")
    if version > VERSION:
        raise ValueError(
            f"{where} is of version {version} of the format, written by comera "
            f"{described.get('comera')}; this one, {__version__}, reads up to {VERSION}: "
            "install a newer comera"
        )
    for part, plain in {"layers": dict, "tied": dict}.items():
        if not isinstance(described.get(part), plain):
            raise ValueError(f"{where} is damaged: {part} must be a {plain.__name__}")
    for entry in described["layers"].values():
        if not isinstance(entry, dict) or not isinstance(entry.get("works_on", ""), str):
            raise ValueError(f"{where} is damaged: every layer must be a dict, works_on a name")
    for part in ("split_experts", "served", "frozen", "tied"):
        names = described.get(part)
        names = [*names, *names.values()] if isinstance(names, dict) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where} is damaged: {part} must be names")
    return described


def rebuild_(
    model: nn.Module,
    layers: Mapping[str, Entry],
    tensors: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Replace layers of a dense model by ``layers`` of :func:`describe`, in place.

    The model, possibly on ``meta``, is made like the dense model before compression. Returns the
    model, or the layer that replaces it; new layers are on ``meta``. Raises ``ValueError``, which
    names the entry, if an entry is damaged or has no layer to replace, or if the result could not
    hold these ``tensors`` by name; the model is then unchanged.
    """
    made = _build_layers(layers)
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_places(modules, made)
    replacements = {id(modules[name]): new for name, new in made.items()}
    if tensors is not None:
        _check_tensors(model, modules, replacements, tensors)
    for name, new in made.items():
        new.train(modules[name].training)
    return swap_layers_(model, replacements, biases=False)


def _build_layers(layers: Mapping[str, Entry]) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}

    def build(name: str, above: tuple[str, ...] = ()) -> nn.Module:
        """Make a layer, after the layer whose parameters it shares, if any."""
        if name in made:
            return made[name]
        entry = layers[name]
        other, kind = entry.get("works_on"), entry.get("kind")
        if other is not None and (other not in layers or other in (*above, name)):
            raise ValueError(
                f"{name or 'the model'}: it works on {other!r}, which is no other layer"
            )
        lead = None if other is None else build(other, (*above, name))
        classes = _classes()
        if not isinstance(kind, str) or kind not in classes:
            raise ValueError(
                f"layers of kind {kind!r} are not known here, only {', '.join(classes)}: import "
                "what registers them, or a newer comera"
            )
        try:
            made[name] = classes[kind].from_config(entry, lead)
        except _DAMAGE as problem:
            what = f"{kind} is described wrongly: {type(problem).__name__}: {problem}"
            raise ValueError(f"{name or 'the model'}: {what}") from problem
        return made[name]

    return {name: build(name) for name in layers}


def _check_places(modules: Mapping[str, nn.Module], made: Mapping[str, nn.Module]) -> None:
    taken: dict[int, str] = {}
    for name, new in made.items():
        old = modules.get(name)
        kind = type(new).__name__
        if old is None:
            raise ValueError(
                f"the saved model has a {kind} at {name!r}, where the model given has nothing: "
                "make it as the one that was saved"
            )
        if taken.setdefault(id(old), name) != name:
            raise ValueError(
                f"{taken[id(old)]} and {name} are two layers of the saved model and one of the "
                "model given"
            )
        size, wanted = _size(old), _size(new)
        fits = not (size and wanted) or sorted(size) == sorted(wanted)  # Conv1D has it turned
        if not fits or hasattr(old, "num_embeddings") != hasattr(new, "num_embeddings"):
            raise ValueError(
                f"{name or 'the model'} is a {kind} of size {wanted} in the saved model, and a "
                f"{type(old).__name__} of size {size} in the model given"
            )
        had, has = ("none" if getattr(m, "bias", None) is None else "one" for m in (old, new))
        if had != has:
            where = name or "the model"
            raise ValueError(f"the bias of {where}: the saved model has {has}, the one given {had}")


def _size(layer: Any) -> tuple[int, ...] | None:
    layer = as_torch(layer)
    if hasattr(layer, "num_embeddings"):
        return layer.num_embeddings, layer.embedding_dim
    if hasattr(layer, "in_features"):
        return layer.out_features, layer.in_features
    weight = layer._parameters.get("weight")
    return None if weight is None else tuple(weight.shape)


def _check_tensors(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    replacements: Mapping[int, nn.Module],
    tensors: Mapping[str, Tensor],
) -> None:
    inside = {
        f"{name}.".lstrip("."): replacements[id(old)]
        for name, old in modules.items()
        if id(old) in replacements
    }
    state = {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if not key.startswith(tuple(inside))
    }
    for prefix, new in inside.items():
        state |= {f"{prefix}{key}": x for key, x in new.state_dict(keep_vars=True).items()}
    wanted = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    places = "rows_scattered", "rows_in_order", "_extra_state"  # the last in older files
    saved, made = ({k for k in keys if not k.endswith(places)} for keys in (tensors, wanted))
    wrong = {
        "the model given has no": sorted(saved - made),
        "the saved one has no": sorted(made - saved),
    }
    parts = [f"{what} {listed(names)}" for what, names in wrong.items() if names]
    for name in sorted(tensors.keys() & wanted.keys()):
        found, here = tensors[name], wanted[name]
        if found.shape != here.shape or found.is_floating_point() != here.is_floating_point():
            one, other = (f"{tuple(each.shape)}, {each.dtype}" for each in (found, here))
            parts.append(f"{name} is {one}, in the file and {other}, in the model")
    if parts:
        raise ValueError(f"the model given is not made as the saved one: {'; '.join(parts[:4])}")


def tie_(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie each tensor named by a key of ``tied`` to the one named by its value, in place."""
    for name, first in tied.items():
        (owner, _, key), (source, _, source_key) = (n.rpartition(".") for n in (name, first))
        for kind in ("_parameters", "_buffers"):
            mine, known = (getattr(model.get_submodule(of), kind) for of in (owner, source))
            if key in mine and source_key in known:
                mine[key] = known[source_key]


@torch.no_grad()
def fill_(
    model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str], frozen: Iterable[str]
) -> None:
    """Assign a whole state dict to a model as new parameters with its dtypes, in place.

    ``tied`` has the first name of each tied tensor by its later names; all parameters but those
    named in ``frozen`` get ``requires_grad``.
    """
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    tie_(model, tied)
    still = set(frozen)
    for name, param in model.named_parameters():
        trains = param.is_floating_point() or param.is_complex()
        param.requires_grad_(name not in still and trains)
