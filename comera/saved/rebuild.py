"""Make the layers that a description speaks of, and put tensors into them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comera.extras import listed
from comera.nn.forms import as_torch
from comera.nn.swap import swap_layers_
from comera.nn.tied import rename_tied_weights_
from comera.saved.description import Entry, class_of_kind, works_on_of

_DAMAGE = (
    AttributeError, KeyError, NotImplementedError, OverflowError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What constructors raise for numbers that no layer was ever made of."""


def rebuild_(model: nn.Module, layers: Mapping[str, Entry]) -> nn.Module:
    """Replace layers of a dense model by those that a description has, in place.

    Args:
        model: As the one was before it was compressed; it may be on the ``meta`` device.
        layers: Of a description, see :func:`~comera.saved.description.describe`.

    Returns:
        The model, the new layers on the ``meta`` device; if it is itself replaced, its layer.

    Raises:
        ValueError: If an entry is damaged, or there is no such layer to replace; the message names
            it. The model is then unchanged.
    """
    made = build_layers(layers)
    check_places(model, made)
    return put_in_place_(model, made)


def build_layers(layers: Mapping[str, Entry]) -> dict[str, nn.Module]:
    """Make all layers of a description by name, on the ``meta`` device."""
    made: dict[str, nn.Module] = {}
    for name in layers:
        _build(name, layers, made, ())
    return {name: made[name] for name in layers}


def _build(
    name: str, layers: Mapping[str, Entry], made: dict[str, nn.Module], above: tuple[str, ...]
) -> nn.Module:
    """Make a layer, after the one whose parameters it works on."""
    if name in made:
        return made[name]
    entry = layers[name]
    other = works_on_of(entry)
    if other is not None and (other not in layers or other in (*above, name)):
        raise ValueError(f"{name or 'the model'}: it works on {other!r}, which is no other layer")
    lead = None if other is None else _build(other, layers, made, (*above, name))
    layer_class = class_of_kind(entry.get("kind"))
    try:
        made[name] = layer_class.from_config(entry, lead)
    except _DAMAGE as problem:
        what = f"{entry['kind']} is described wrongly: {type(problem).__name__}: {problem}"
        raise ValueError(f"{name or 'the model'}: {what}") from problem
    return made[name]


def check_places(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """Check that a model has a layer of the same size wherever one is to be put.

    Raises:
        ValueError: If not.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
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
        if not fits or (_is_table(old) != _is_table(new)):
            raise ValueError(
                f"{name or 'the model'} is a {kind} of size {wanted} in the saved model, and a "
                f"{type(old).__name__} of size {size} in the model given"
            )
        if _has_bias(old) != _has_bias(new):
            has, lacks = ("one", "none") if _has_bias(new) else ("none", "one")
            where = name or "the model"
            raise ValueError(
                f"the bias of {where}: the saved model has {has}, the one given {lacks}"
            )


def _has_bias(layer: nn.Module) -> bool:
    return getattr(layer, "bias", None) is not None


def _size(layer: Any) -> tuple[int, ...] | None:
    """Return the shape of a layer's dense weight, if it has or stands for one."""
    layer = as_torch(layer)
    if _is_table(layer):
        return layer.num_embeddings, layer.embedding_dim
    if hasattr(layer, "in_features"):
        return layer.out_features, layer.in_features
    weight = layer._parameters.get("weight")
    return None if weight is None else tuple(weight.shape)


def _is_table(layer: nn.Module) -> bool:
    return hasattr(layer, "num_embeddings")


def put_in_place_(model: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """Put layers in the places of a model that have their names, see :func:`check_places`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, new in made.items():
        new.train(modules[name].training)
    model = swap_layers_(
        model, {id(modules[name]): new for name, new in made.items()}, biases=False
    )
    rename_tied_weights_(model)
    return model


def check_tensors(
    model: nn.Module, made: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a model, once layers are in place, has just the tensors that there are.

    Args:
        model: Before the layers are put in place.
        made: The layers by name.
        shapes: Of all tensors by name.

    Raises:
        ValueError: If one is missing, superfluous or of another shape.
    """
    wanted = _shapes_after(model, made)
    wrong = {
        "the model given has no": sorted(shapes.keys() - wanted.keys()),
        "the saved one has no": sorted(wanted.keys() - shapes.keys()),
    }
    parts = [f"{what} {listed(names)}" for what, names in wrong.items() if names]
    for name in sorted(shapes.keys() & wanted.keys()):
        if shapes[name] != wanted[name]:
            parts.append(f"{name} is {shapes[name]} in the file and {wanted[name]} in the model")
    if parts:
        raise ValueError(f"the model given is not made as the saved one: {'; '.join(parts[:4])}")


def _shapes_after(model: nn.Module, made: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's state dict as it will be with layers in place."""
    modules = dict(model.named_modules(remove_duplicate=False))
    new_at = {id(modules[name]): new for name, new in made.items()}
    inside = {name: new_at[id(old)] for name, old in modules.items() if id(old) in new_at}
    state = {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if not any(key.startswith(f"{name}.".lstrip(".")) for name in inside)
    }
    for name, new in inside.items():
        state |= {
            f"{name}.{key}".lstrip("."): value
            for key, value in new.state_dict(keep_vars=True).items()
        }
    return {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def fill_(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    frozen: Iterable[str],
) -> None:
    """Let a model have tensors as they are, dtypes included, in place.

    Args:
        model: Its parameters become new ones.
        tensors: A whole state dict.
        tied: Names of tensors, to the name of the tensor that each is to be the same as.
        frozen: Names of parameters that are not trained; all others are.
    """
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    for name, first in tied.items():
        _tie_(model, name, first)
    still = set(frozen)
    for name, param in model.named_parameters():
        param.requires_grad_(
            name not in still and (param.is_floating_point() or param.is_complex())
        )


def _tie_(model: nn.Module, name: str, first: str) -> None:
    """Register a parameter or buffer under another name too."""
    owner, _, key = name.rpartition(".")
    source, _, source_key = first.rpartition(".")
    module, other = model.get_submodule(owner), model.get_submodule(source)
    for kind in ("_parameters", "_buffers"):
        known = getattr(other, kind)
        if source_key in known and key in getattr(module, kind):
            getattr(module, kind)[key] = known[source_key]
