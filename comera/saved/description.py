"""What a model is, beside its weights, in plain numbers, strings and lists.

Which layers a description can speak of: what it says of each, and how that makes one again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera import __version__
from comera.nn.block_linear import BTTLinear
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.nn.forms import split_names
from comera.nn.linear import CompressedLinear, TTLinear, TTPointwise
from comera.nn.module import TensorTrainModule
from comera.nn.table import HotRows, TTTable
from comera.nn.targets import TTConfig
from comera.nn.tied import TiedTTLinear
from comera.serving.frozen_layers import (
    Frozen,
    FrozenEmbedding,
    FrozenEmbeddingBag,
    FrozenHead,
    FrozenLinear,
    FrozenTable,
)
from comera.shapes import BTTShape, LinearShape, TTMShape, TTShape

Entry = Mapping[str, Any]
"""What a description says of one layer: plain numbers, strings and lists."""


class Kind(NamedTuple):
    """How layers of one class are described and made.

    Attributes:
        layer_class: Layers of exactly this class.
        describe: Returns what JSON can hold and ``build`` needs; the key ``kind`` is taken.
        build: Makes such a layer on the ``meta`` device from what ``describe`` has returned and,
            of a layer that works on the parameters of another one, that layer.
        works_on: Returns the layer whose parameters it works on, or None.
    """

    layer_class: type[nn.Module]
    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[Entry, nn.Module | None], nn.Module]
    works_on: Callable[[Any], nn.Module | None] = lambda layer: None


_KINDS: dict[str, Kind] = {}


def register_kind(name: str, kind: Kind) -> None:
    """Let :func:`~comera.save_model` and :func:`~comera.load_model` know layers of another class.

    Args:
        name: What the file calls it; it stays the same as long as files are to be read.
        kind: How such layers are described and made.

    Raises:
        ValueError: If the name is that of layers of another class.
    """
    known = _KINDS.get(name)
    if known is not None and known.layer_class is not kind.layer_class:
        raise ValueError(f"{name!r} is the name of {known.layer_class.__qualname__}")
    _KINDS[name] = kind


def kind_named(name: Any) -> Kind:
    """Return the kind that a file names.

    Raises:
        ValueError: If there is none of that name here.
    """
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(
            f"layers of kind {name!r} are not known here, only {', '.join(_KINDS)}: import what "
            "registers them, or a newer comera"
        )
    return _KINDS[name]


def name_of_kind(layer: nn.Module) -> str | None:
    """Return what files call layers of this class; None of a layer that needs no description.

    Raises:
        ValueError: If it is a tensor train, or a frozen one, of a class that is not registered.
    """
    for name, kind in _KINDS.items():
        if type(layer) is kind.layer_class:
            return name
    if isinstance(layer, (TensorTrainModule, TiedTTLinear, Frozen)):
        raise ValueError(
            f"{type(layer).__qualname__} has no form in a file: give it one with "
            "comera.saved.description.register_kind"
        )
    return None


# ── tensor trains ────────────────────────────────────────────────────────────────────────────────


def _common(layer: TensorTrainModule) -> dict[str, Any]:
    return {
        "ranks": list(layer.ranks),
        "start_ranks": list(layer.start_ranks),
        "prune_below": layer.prune_below,
        "dtype": _dtype_of(layer.cores[0]),
        **({} if layer.dense_form is None else {"dense_form": layer.dense_form}),
    }


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(entry: Entry) -> torch.dtype:
    dtype = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={entry['dtype']!r} is none of torch's")
    return dtype


def _tuple(entry: Entry, key: str) -> tuple[int, ...]:
    values = entry[key]
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{key}={values!r} must be a list of whole numbers")
    return tuple(values)


def _describe_linear(layer: CompressedLinear) -> dict[str, Any]:
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias is not None,
        "in_modes": list(layer.shape.in_modes),
        "out_modes": list(layer.shape.out_modes),
        **_common(layer),
    }


def _build_linear(
    entry: Entry,
    other: nn.Module | None,
    linear_class: Callable[..., Any] = TTLinear,
    shape_class: Callable[..., LinearShape] = TTShape,
) -> Any:
    layer = linear_class(
        entry["in_features"],
        entry["out_features"],
        entry["bias"],
        "meta",
        _dtype(entry),
        shape=shape_class(*(_tuple(entry, key) for key in ("in_modes", "out_modes", "ranks"))),
        prune_below=entry["prune_below"],
    )
    return _finish(layer, entry, other)


def _build_blocks(entry: Entry, other: nn.Module | None) -> BTTLinear:
    return _build_linear(entry, other, BTTLinear, BTTShape)


def _describe_pointwise(layer: TTPointwise) -> dict[str, Any]:
    return {**_describe_linear(layer), "feature_dim": layer.feature_dim}


def _build_pointwise(entry: Entry, other: nn.Module | None) -> TTLinear:
    return _build_linear(entry, other, partial(TTPointwise, feature_dim=_feature_dim(entry)))


def _feature_dim(entry: Entry) -> int:
    dim = entry.get("feature_dim", -1)
    if type(dim) is not int or dim >= 0:
        raise ValueError(f"feature_dim={dim!r} must be a whole number below 0")
    return dim


def _describe_table(layer: TTTable) -> dict[str, Any]:
    described = {
        "num_embeddings": layer.num_embeddings,
        "embedding_dim": layer.embedding_dim,
        "padding_idx": layer.padding_idx,
        "sparse": layer.sparse,
        "hot_rows": layer.hot_rows,
        "hot_rank": layer.hot_rank,
        "scatter_rows": layer.scatter_rows,
        "row_order": layer.row_order is not None,
        "row_modes": list(layer.shape.row_modes),
        "col_modes": list(layer.shape.col_modes),
        **_common(layer),
    }
    return described | ({"hot": _common(layer.hot)} if isinstance(layer.hot, HotRows) else {})


def _describe_bag(layer: TTEmbeddingBag) -> dict[str, Any]:
    own = {"mode": layer.mode, "include_last_offset": layer.include_last_offset}
    return _describe_table(layer) | own


_OF_TABLES = ("padding_idx", "sparse", "hot_rows", "hot_rank", "scatter_rows", "prune_below")


def _build_table(
    table_class: type[TTTable], entry: Entry, other: nn.Module | None, *more: str
) -> TTTable:
    layer: Any = table_class(
        entry["num_embeddings"],
        entry["embedding_dim"],
        **{key: entry[key] for key in (*_OF_TABLES, *more)},
        shape=TTMShape(*(_tuple(entry, key) for key in ("row_modes", "col_modes", "ranks"))),
        device="meta",
        dtype=_dtype(entry),
    )
    if entry["row_order"]:
        layer.row_order = torch.empty(layer.num_embeddings, dtype=torch.int32, device="meta")
    if isinstance(layer.hot, HotRows):
        layer.hot.resize_ranks_(_tuple(entry["hot"], "ranks"))
        layer.hot.start_ranks = _tuple(entry["hot"], "start_ranks")
        layer.hot.prune_below = entry["hot"]["prune_below"]
    return _finish(layer, entry, other)


def _build_embedding(entry: Entry, other: nn.Module | None) -> TTTable:
    return _build_table(TTEmbedding, entry, other)


def _build_bag(entry: Entry, other: nn.Module | None) -> TTTable:
    return _build_table(TTEmbeddingBag, entry, other, "mode", "include_last_offset")


def _finish(layer: Any, entry: Entry, other: Any) -> Any:
    """Set what no constructor takes, and share the parameters of a layer that it was tied to."""
    layer.start_ranks = _tuple(entry, "start_ranks")
    form = entry.get("dense_form")
    layer.dense_form = None if form is None else str(form)
    if other is not None:
        layer.share_parameters_(other)
    return layer


# ── layers on a table's cores ────────────────────────────────────────────────────────────────────


def _describe_tied(layer: TiedTTLinear) -> dict[str, Any]:
    dtype = None if layer.bias is None else _dtype_of(layer.bias)
    return {"bias": layer.bias is not None, "dtype": dtype}


def _build_tied(entry: Entry, other: nn.Module | None) -> TiedTTLinear:
    if not isinstance(other, TTTable):
        raise ValueError(f"it works on the cores of a table, not of {type(other).__name__}")
    if not entry["bias"]:
        return TiedTTLinear(other)
    bias = torch.empty(other.num_embeddings, dtype=_dtype(entry), device="meta")
    return TiedTTLinear(other, nn.Parameter(bias))


# ── frozen layers ────────────────────────────────────────────────────────────────────────────────


def _describe_frozen_linear(layer: Any) -> dict[str, Any]:
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "rank": layer.rank,
        "bias": layer.bias is not None,
        "dtype": _dtype_of(layer[0].weight),
        **({} if layer.feature_dim == -1 else {"feature_dim": layer.feature_dim}),
        **({} if layer.dense_form is None else {"dense_form": layer.dense_form}),
    }


def _build_frozen_linear(entry: Entry, other: nn.Module | None) -> FrozenLinear:
    sizes = entry["in_features"], entry["out_features"], entry["rank"], entry["bias"]
    form = entry.get("dense_form")
    return FrozenLinear(
        *sizes, "meta", _dtype(entry), _feature_dim(entry), None if form is None else str(form)
    )


def _describe_frozen_table(layer: FrozenTable) -> dict[str, Any]:
    hot = None if layer.hot is None else list(layer.hot.weight.shape)
    return {
        "num_embeddings": layer.num_embeddings,
        "embedding_dim": layer.embedding_dim,
        "left": [layer.left.num_embeddings, *layer.inner[0]],
        "right": [layer.right.num_embeddings, *layer.inner[1]],
        "hot": hot,
        "basis": layer.basis is not None,
        "padding_idx": layer.padding_idx,
        "row_order": layer.row_order is not None,
        "step": layer.step,
        "dtype": _dtype_of(layer.left.weight),
    }


def _describe_frozen_bag(layer: FrozenEmbeddingBag) -> dict[str, Any]:
    own = {"mode": layer.mode, "include_last_offset": layer.include_last_offset}
    return _describe_frozen_table(layer) | own


def _of_frozen_table(entry: Entry) -> dict[str, Any]:
    """Return what a frozen table is made of, its tensors without values."""

    dtype = _dtype(entry)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, width, hot = entry["num_embeddings"], entry["embedding_dim"], entry["hot"]
    return {
        "num_embeddings": rows,
        "embedding_dim": width,
        "left": empty(*_tuple(entry, "left")),
        "right": empty(*_tuple(entry, "right")),
        "hot": None if hot is None else empty(*_tuple(entry, "hot")),
        "basis": empty(hot[1], width) if entry["basis"] else None,
        "padding_idx": entry["padding_idx"],
        "row_order": empty(rows, dtype=torch.int32) if entry["row_order"] else None,
        "step": entry["step"],
    }


def _build_frozen_embedding(entry: Entry, other: nn.Module | None) -> FrozenEmbedding:
    return FrozenEmbedding(**_of_frozen_table(entry))


def _build_frozen_bag(entry: Entry, other: nn.Module | None) -> FrozenEmbeddingBag:
    own = entry["mode"], entry["include_last_offset"]
    return FrozenEmbeddingBag(*own, **_of_frozen_table(entry))


def _describe_frozen_head(layer: FrozenHead) -> dict[str, Any]:
    return {"bias": None if layer.bias is None else _dtype_of(layer.bias)}


def _build_frozen_head(entry: Entry, other: nn.Module | None) -> FrozenHead:
    if not isinstance(other, FrozenTable):
        raise ValueError(f"it works on a frozen table, not on {type(other).__name__}")
    if entry["bias"] is None:
        return FrozenHead(other, None)
    dtype = _dtype({"dtype": entry["bias"]})
    return FrozenHead(other, torch.empty(other.num_embeddings, dtype=dtype, device="meta"))


# ─────────────────────────────────────────────────────────────────────────────────────────────────

register_kind("TTLinear", Kind(TTLinear, _describe_linear, _build_linear))
register_kind("BTTLinear", Kind(BTTLinear, _describe_linear, _build_blocks))
register_kind("TTPointwise", Kind(TTPointwise, _describe_pointwise, _build_pointwise))
register_kind("TTEmbedding", Kind(TTEmbedding, _describe_table, _build_embedding))
register_kind("TTEmbeddingBag", Kind(TTEmbeddingBag, _describe_bag, _build_bag))
register_kind(
    "TiedTTLinear",
    Kind(TiedTTLinear, _describe_tied, _build_tied, lambda layer: layer.embedding),
)
register_kind("FrozenLinear", Kind(FrozenLinear, _describe_frozen_linear, _build_frozen_linear))
register_kind(
    "FrozenEmbedding", Kind(FrozenEmbedding, _describe_frozen_table, _build_frozen_embedding)
)
register_kind(
    "FrozenEmbeddingBag", Kind(FrozenEmbeddingBag, _describe_frozen_bag, _build_frozen_bag)
)
register_kind(
    "FrozenHead",
    Kind(FrozenHead, _describe_frozen_head, _build_frozen_head, lambda layer: layer.embedding),
)


FORMAT = "comera-model"
VERSION = 1
"""The newest version of the format that is read and written here."""


def describe(model: nn.Module, config: TTConfig | None = None) -> dict[str, Any]:
    """Describe a model so that its layers can be made again without any setting.

    Args:
        model: Its tensor-train layers are described one by one.
        config: How it was compressed, to be kept for people; nothing is made of it.

    Returns:
        What JSON can hold: ``layers`` by name, of each tensor that has several names the others in
        ``tied``, the names of frozen parameters and of experts that have been taken apart
        (``split_experts``, where there are any), and of the dense model its class and, of a model
        of transformers, its configuration. Classes are named, as text; nothing is ever imported or
        called by these names.

    Raises:
        ValueError: If a layer is of a class that has no form in a file, or works on the parameters
            of a layer outside the model.
    """
    apart = split_names(model)
    return {
        "format": FORMAT,
        "version": VERSION,
        "comera": __version__,
        "model": _origin(model),
        "tensorized": None if config is None else config.to_dict(),
        "layers": describe_layers(model),
        "tied": tied_names(model),
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        **({"split_experts": apart} if apart else {}),
    }


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe the tensor-train layers of a model by name, see :func:`describe`."""
    found = dict(_layers(model))
    name_of = {id(layer): name for name, layer in found.items()}
    leads: dict[int, str] = {}
    described = {}
    for name, layer in found.items():
        kind_name = name_of_kind(layer)
        kind = kind_named(kind_name)
        entry = {"kind": kind_name, **kind.describe(layer)}
        other = kind.works_on(layer)
        if other is not None:
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
    if name_of_kind(module) is not None:
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
    apart = described.get("split_experts", [])
    if not isinstance(apart, list) or not all(isinstance(name, str) for name in apart):
        raise ValueError(f"{where} is damaged: split_experts must be a list of names")
    return described


def works_on_of(entry: Entry) -> str | None:
    """Return the name of the layer whose parameters a described layer works on, if any."""
    name = entry.get("works_on")
    return name if isinstance(name, str) else None
