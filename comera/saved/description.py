"""What a model is, beside its tensors, in numbers, strings and lists that JSON can hold.

A registry has the classes of layers by the names that files use. Each describes a layer by its
``config()`` and makes one again by ``from_config()``.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from comera import __version__
from comera.nn.block_linear import BTTLinear
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.nn.forms import split_names
from comera.nn.linear import TTLinear, TTPointwise
from comera.nn.module import TensorTrainModule
from comera.nn.targets import TTConfig
from comera.nn.tied import TiedTTLinear
from comera.serving.freeze import refuses_training
from comera.serving.layers import FactoredEmbedding, FactoredEmbeddingBag, FactoredHead, ThinLinear

Entry = Mapping[str, Any]
"""The description of one layer: its ``kind``, its ``config()`` and the layer it ``works_on``."""

_CLASSES: dict[str, Any] = {}


def register_kind(name: str, layer_class: type[nn.Module]) -> None:
    """Register a class of layers with :func:`~comera.save_model` and :func:`~comera.load_model`.

    The class has a method ``config()``, which returns a dict of what JSON can hold, and a class
    method ``from_config(config, lead)``, which makes such a layer on the ``meta`` device. ``lead``
    is the layer whose parameters it works on, or None. A class derived from a layer of comera
    inherits both, and extends them if its constructor takes more.

    Args:
        name: The name in files; it stays the same as long as files are to be read.
        layer_class: Layers of exactly this class are meant.

    Raises:
        ValueError: If the name is that of another class.
    """
    known = _CLASSES.setdefault(name, layer_class)
    if known is not layer_class:
        raise ValueError(f"{name!r} is the name of {known.__qualname__}")


for _class in (
    TTLinear, BTTLinear, TTPointwise, TTEmbedding, TTEmbeddingBag, TiedTTLinear,
    ThinLinear, FactoredEmbedding, FactoredEmbeddingBag, FactoredHead,
):  # fmt: skip
    register_kind(_class.__name__, _class)


def class_of_kind(name: Any) -> Any:
    """Return the class that a file names.

    Raises:
        ValueError: If no class of that name is registered.
    """
    if not isinstance(name, str) or name not in _CLASSES:
        raise ValueError(
            f"layers of kind {name!r} are not known here, only {', '.join(_CLASSES)}: import what "
            "registers them, or a newer comera"
        )
    return _CLASSES[name]


def _kind_of(layer: nn.Module) -> str | None:
    """Return the name of a layer's class in files; None of a layer that needs no description.

    Raises:
        ValueError: If its class is not registered, and derived from one that needs a description.
    """
    for name, layer_class in _CLASSES.items():
        if type(layer) is layer_class:
            return name
    if isinstance(layer, (TensorTrainModule, *_CLASSES.values())):
        raise ValueError(
            f"{type(layer).__qualname__} has no form in a file: give it one with "
            "comera.saved.description.register_kind"
        )
    return None


FORMAT = "comera-model"
VERSION = 1
"""The newest version of the format that is read and written here."""


def describe(model: nn.Module, config: TTConfig | None = None) -> dict[str, Any]:
    """Describe a model so that its layers can be made again without any setting.

    Args:
        model: Its tensor-train layers are described one by one.
        config: How it was compressed, to be kept for people; nothing is made of it.

    Returns:
        What JSON can hold: ``layers`` by name; of each tensor that has several names the others in
        ``tied``; the names of ``frozen`` parameters, of experts that have been taken apart
        (``split_experts``) and of models given to :func:`~comera.freeze_` (``served``); and of the
        dense model its class and, of a model of transformers, its configuration. Classes are
        named, as text; nothing is ever imported or called by these names.

    Raises:
        ValueError: If a layer is of a class that has no form in a file, or works on the parameters
            of a layer outside the model.
    """
    served = [name for name, part in model.named_modules() if refuses_training(part)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "comera": __version__,
        "model": _origin(model),
        "tensorized": None if config is None else config.to_dict(),
        "layers": describe_layers(model),
        "tied": tied_names(model),
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        "split_experts": split_names(model),
        "served": served,
    }


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe the tensor-train layers of a model by name, see :func:`describe`."""
    found = dict(_layers(model))
    name_of = {id(layer): name for name, layer in found.items()}
    leads: dict[int, str] = {}
    described = {}
    for name, layer in found.items():
        entry = {"kind": _kind_of(layer), **layer.config()}
        if isinstance(layer, (TiedTTLinear, FactoredHead)):
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
    """Yield layers that need a description by their first names; nothing inside of such a layer."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if _kind_of(module) is not None:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _layers(child, f"{name}.{key}".lstrip("."), seen)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return, of each tensor of the state dict that has several names, the later ones to the first.

    A name inside a layer that works on another one's parameters is never the first.
    """
    inside = tuple(
        f"{name}.".lstrip(".")
        for name, entry in describe_layers(model).items()
        if "works_on" in entry
    )
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name.startswith(inside)):
        if isinstance(state[name], Tensor):
            first.setdefault(id(state[name]), name)
    return {
        name: first[id(tensor)]
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and first[id(tensor)] != name
    }


def _origin(model: nn.Module) -> dict[str, Any]:
    """Say of which class a model is and, where it has a configuration to be written, which."""
    origin: dict[str, Any] = {"class": _path_of(model)}
    config = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        plain = json.loads(json.dumps(config.to_dict(), default=str))  # type: ignore[union-attr]
        origin |= {"config_class": _path_of(config), "config": plain}
    return origin


def _path_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def origin_in_words(description: Mapping[str, Any]) -> str:
    """Say what kind of model a description is of, for a message."""
    origin = description.get("model")
    name = origin.get("class") if isinstance(origin, Mapping) else None
    return str(name) if name else "a model of a class that was not noted"


def check_description(described: Any, where: str) -> dict[str, Any]:
    """Return a description that this version can read.

    Args:
        described: What was read.
        where: The file, for the message.

    Raises:
        ValueError: If it is something else, damaged or of a later version.
    """
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
    parts = {"layers": dict, "tied": dict, "frozen": list}
    for part, plain in parts.items():
        if not isinstance(described.get(part), plain):
            raise ValueError(f"{where} is damaged: {part} must be a {plain.__name__}")
    if not all(isinstance(entry, dict) for entry in described["layers"].values()):
        raise ValueError(f"{where} is damaged: every layer must be a dict")
    for part in ("split_experts", "served"):
        names = described.get(part)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where} is damaged: {part} must be a list of names")
    return described


def works_on_of(entry: Entry) -> str | None:
    """Return the name of the layer whose parameters a described layer works on, if any."""
    name = entry.get("works_on")
    return name if isinstance(name, str) else None
