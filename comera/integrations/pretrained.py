"""Save and load compressed models by ``save_pretrained`` and ``from_pretrained`` of transformers.

The description of a model's layers is the ``quantization_config`` in ``config.json``; a registered
quantizer builds the layers before the weights are loaded.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from comera.extras import listed, needed_by
from comera.files import local_folder
from comera.nn.convert import densify_, tensorize_
from comera.nn.embedding import TableHead, TiedTTLinear
from comera.nn.forms import experts_apart
from comera.nn.linear import FORMATS, CompressedLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.swap import rename_tied_weights_
from comera.nn.table import TTTable
from comera.nn.targets import TTConfig
from comera.saved.description import Entry, check_description, describe, rebuild_, tie_
from comera.serving.freeze import refuse_training_
from comera.serving.layers import FactoredTable
from comera.surgery.rows import append_rows_

with needed_by("comera.integrations.transformers"):
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming
    from transformers.quantizers import (
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin

log = logging.getLogger("comera")

METHOD = "comera"
"""Name in ``config.json``."""


def attach_parts_(model: nn.Module) -> None:
    """Call :func:`attach_` of every compressed model of transformers within a model."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and tensor_trains(part):
            try:
                attach_(part)
            except ValueError as problem:
                log.warning("save_pretrained cannot describe the new layers: %s", problem)


def attach_(model: PreTrainedModel, config: TTConfig | None = None) -> PreTrainedModel:
    """Prepare a compressed model of transformers for ``save_pretrained``, in place.

    Whatever replaces layers, such as :func:`~comera.tensorize_`, calls this.
    ``AutoModel.from_pretrained(folder)`` then loads it with the ranks it was saved with, if
    ``comera.integrations.transformers`` is imported; ``resize_token_embeddings`` appends rows to
    tensor-train tables, ``tie_weights`` ties to another table, and ``num_parameters`` knows tables.

    ``config`` says how the model was compressed, for readers of ``config.json``. Returns the model.
    Raises ``TypeError`` for other models, and ``ValueError`` if another method quantized weights.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"attach_ takes a PreTrainedModel of transformers, not a {type(model).__qualname__}: "
            "comera.save_model saves any model"
        )
    known = getattr(model, "hf_quantizer", None)
    if known is not None and not isinstance(known, TensorTrainQuantizer):
        raise ValueError(
            f"its weights are quantized by {type(known).__qualname__}, and a folder says once how "
            "weights are held: compress a model that is not quantized"
        )
    if known is None or config is not None:
        held = TensorTrainConfig(config, {})
        model.hf_quantizer = TensorTrainQuantizer(held)  # type: ignore[assignment]
        _set_methods_(model)
    return model


@register_quantization_config(METHOD)
class TensorTrainConfig(QuantizationConfigMixin):
    """Description of a model of transformers with tensor trains: a ``quantization_config``.

    ``AutoModel.from_pretrained(name, quantization_config=TensorTrainConfig(config))`` compresses a
    dense model once it is loaded.

    Args:
        config: How to compress a dense model; ``TTConfig(init="svd")`` if neither argument is
            given. An unknown setting raises ``ValueError``.
        described: Description of a compressed model, see :func:`comera.saved.description.describe`.
        quant_method: Always ``"comera"``.
    """

    def __init__(
        self,
        config: TTConfig | Mapping[str, Any] | None = None,
        described: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        if config is None and described is None:
            config = TTConfig(init="svd")
        self.config = TTConfig.from_dict(config) if isinstance(config, Mapping) else config
        self.described = described

    def to_dict(self) -> dict[str, Any]:
        """Return the ``quantization_config`` of ``config.json``."""
        config = None if self.config is None else self.config.to_dict()
        held = {"quant_method": METHOD, "config": config, "described": self.described}
        return {key: value for key, value in held.items() if value is not None}


@register_quantizer(METHOD)
class TensorTrainQuantizer(HfQuantizer):
    """Quantizer that transformers calls while it loads and saves a model with tensor trains.

    A loaded model counts as not quantized, so that it can be trained, cast and moved.
    """

    quantization_config: TensorTrainConfig
    _dtype: torch.dtype | None = None
    given: Mapping[str, Any] | None = None

    is_trainable = True  # type: ignore[assignment]
    is_compileable = True  # type: ignore[assignment]

    def is_serializable(self) -> bool:
        """Return True: the model can be saved."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Record the dtype to load in, which transformers tells no other method."""
        self._dtype = dtype
        return dtype

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the state dict, and put the description of the layers into ``model.config``."""
        described = describe(model)
        del described["model"]  # config.json is about it
        # Further names of a layer too, of which a resized table in T5 has two.
        layers = dict(described["layers"])
        name_of = {id(model.get_submodule(name)): name for name in layers}
        inside = tuple(f"{name}." for name in layers)
        for name, module in model.named_modules(remove_duplicate=False):
            lead = name_of.get(id(module))
            if lead is not None and name not in layers and not name.startswith(inside):
                described["layers"][name] = {**layers[lead], "works_on": lead}
        self.quantization_config.described = described
        # also for those who load a tower, of which transformers reads the settings alone
        towers = (getattr(model.config, key, None) for key in model.config.sub_configs)
        for settings in (model.config, *filter(None, towers)):
            if described["layers"] or described["split_experts"]:
                settings.quantization_config = self.quantization_config.to_dict()
            else:
                vars(settings).pop("quantization_config", None)
        # Parameters of several names are written once and tied when loaded, but transformers ties
        # no buffers, such as the row order of a tied table.
        state = model.state_dict() if self.given is None else self.given
        buffers = dict(model.named_buffers(remove_duplicate=False))
        apart = {name: state[name].clone() for name in buffers if name in state}
        return {**state, **apart}, {}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            where = f"quantization_config of {model.config.name_or_path}"
            described = check_description(self.quantization_config.described, where)
            files = [str(path) for path in kwargs.get("checkpoint_files") or ()]
            tensors = [safe_open(path, "pt") for path in files if path.endswith(".safetensors")]
            keys = set[str]().union(*(file.keys() for file in tensors))
            if _is_dense(described, keys):
                log.warning("%s speaks of layers that its weights do not have: it is dense", where)
                described |= {"layers": {}, "split_experts": [], "served": []}
            apart = _names_in(model, described["split_experts"])
            with experts_apart(model, apart.values()):
                layers = _as_in(model, described["layers"], where, keys)
            dtype = str(self._dtype).removeprefix("torch.")  # that of the whole model
            for name, entry in layers.items():
                if entry.get("dtype") is not None:  # else an output layer without a bias
                    layers[name] = {**entry, "dtype": dtype}
                layers[name] = _in_size_of(model.get_submodule(name), layers[name])
            rebuild_(model, layers)
            _tie_(model, described["tied"])
            # buffers of an output layer's table under its name; the places of rows in older files
            of_head = r"\.embedding\.(rows_(scattered|in_order)|row_order)$|\._extra_state$"
            model._keys_to_ignore_on_load_unexpected.add(of_head)
            for name in _names_in(model, described["served"]).values():
                refuse_training_(model.get_submodule(name))
            for part in model.modules():
                if isinstance(part, PreTrainedModel):
                    vars(part)["_init_weights"] = partial(_init_weights, part)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            tensorize_(model, self.quantization_config.config)
        _set_methods_(model)
        model.is_quantized = False  # else it could not be cast, nor trained without adapters
        del model.quantization_method
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = False
                vars(module).pop("_init_weights", None)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        for key in model.config.sub_configs:
            vars(getattr(model.config, key)).pop("quantization_config", None)
        # that of the model's config, which save_pretrained has made a string
        return densify_(model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def _set_methods_(model: Any) -> None:
    model.save_pretrained = partial(_save_pretrained, model)
    model._get_resized_embeddings = partial(_resized_table, model)
    model._get_resized_lm_head = partial(_resized_head, model)
    model.num_parameters = partial(_num_parameters, model)
    model.tie_weights = partial(_tie_weights, model)
    layers = [m for m in model.modules() if isinstance(m, (TensorTrainModule, TableHead))]
    whole = {type(layer).__name__ for layer in layers}
    model._no_split_modules = whole.union(model._no_split_modules or ())


def _tie_(model: Any, tied: Mapping[str, str]) -> None:
    """Tie those parameters that are in this model as they were saved: files hold them once."""
    owner = {name: name.rpartition(".")[0] for name in (*tied.values(), *tied)}
    here = _names_in(model, owner.values())
    new = {name: here[of] + name.removeprefix(of) for name, of in owner.items() if of in here}
    tie_(model, {new[name]: new[of] for name, of in tied.items() if name in new and of in new})
    rename_tied_weights_(model)


def _is_dense(described: Mapping[str, Any], keys: set[str]) -> bool:
    """Return whether files with these tensors hold of all layers dense weights alone."""
    parts = [key.split(".") for key in keys]
    experts = {name.rpartition(".")[2] for name in described["split_experts"]}
    fused = {b for each in parts for a, b in pairwise(each) if a in experts} - {"up", "down"}
    dense = fused or any(key.removesuffix(".weight") in described["layers"] for key in keys)
    return bool(dense) and not any(map({"cores", "left", "right"}.intersection, parts))


def _init_weights(model: Any, layer: nn.Module) -> None:
    """Initialise what a file lacks as transformers does a fresh layer, not as the memory lay."""
    type(model)._init_weights(model, layer)
    if not isinstance(layer, (TensorTrainModule, TableHead, FactoredTable)):
        return
    std = _std(model)
    lost = {
        name.split(".")[0]: tensor
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        if not getattr(tensor, "_is_hf_initialized", False)
    }
    if isinstance(layer, TensorTrainModule) and not lost.keys().isdisjoint(("cores", "gates")):
        layer._init_cores_(std, "orthogonal")
    for name in lost.keys() & layer._parameters.keys():
        nn.init.normal_(lost[name], std=0.0 if name == "bias" else std)
    if "row_order" in lost:
        torch.arange(len(lost["row_order"]), out=lost["row_order"])


def _std(model: Any) -> float:
    return getattr(model.config.get_text_config(), "initializer_range", 0.02)


def _num_parameters(
    model: Any, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count parameters; transformers takes no tensor-train table for an embedding."""
    tables = nn.ModuleList(m for m in model.modules() if isinstance(m, TTTable))
    counted = [p for p in tables.parameters() if p.requires_grad or not only_trainable]
    whole = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    return whole - exclude_embeddings * sum(param.numel() for param in counted)


def _tie_weights(model: Any, *args: Any, **kwargs: Any) -> None:
    """Tie the weights, those of an output layer to the table that has taken another's place."""
    head = model.get_output_embeddings()
    every = [module for _, module in model.named_modules(remove_duplicate=False)]
    if isinstance(head, TiedTTLinear) and every.count(head.embedding) == every.count(head):
        table = model.get_input_embeddings()
        tied = isinstance(table, TTTable)
        new = TiedTTLinear(table, head.bias) if tied else head.to_dense(table.weight)
        model.set_output_embeddings(new.train(head.training))
        rename_tied_weights_(model)
    type(model).tie_weights(model, *args, **kwargs)


def _save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Save the given ``state_dict``, which transformers ignores if there is a quantizer."""
    local_folder(save_directory)
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, TensorTrainQuantizer):
        quantizer.given = state_dict
        changes = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
        if any("experts" not in name for each in changes for name in each.target_patterns):
            kwargs.setdefault("save_original_format", False)  # it merges layers as if dense
    try:
        save = type(model).save_pretrained
        save(model, save_directory, is_main_process, state_dict, *args, **kwargs)
    finally:
        if isinstance(quantizer, TensorTrainQuantizer):
            quantizer.given = None


def _as_in(model: Any, layers: Mapping[str, Entry], where: str, keys: set[str]) -> dict[str, Entry]:
    """Return saved layers by their names in this model, with or without the base prefix.

    Raises ``ValueError`` if the model has none of the layers with the tensors ``keys`` either.
    """
    new_name = _names_in(model, layers)
    if layers and not new_name:
        kind = type(model).__qualname__
        text = f"{where} speaks of {listed(list(layers))}, and a {kind} has none of them"
        if keys and not _names_in(model, {key.removesuffix(".weight") for key in keys}):
            raise ValueError(f"{text}, nor any other layer of the folder: take the class saved")
        log.warning(text)
    found = {}
    for name, mine in new_name.items():
        lead = layers[name].get("works_on")
        if lead is None:
            found[mine] = layers[name]
        elif lead in new_name:
            found[mine] = {**layers[name], "works_on": new_name[lead]}
    return found


def _in_size_of(dense: Any, entry: Entry) -> Entry:
    """Give a layer the output width of the model, as ``num_labels`` asks for another.

    Its cores then have other shapes than those of the file, which transformers sees.
    """
    kind: Any = {each.__name__: each for each in FORMATS.values()}.get(entry["kind"])
    if kind is None or getattr(dense, "out_features", None) in (None, entry["out_features"]):
        return entry
    order = {"order": len(entry["in_modes"])} if kind._shapes.orders else {}
    sizes = entry["in_features"], dense.out_features, entry["bias"]
    other = kind(*sizes, "meta", rank=max(entry["ranks"]), **order)
    made = {**entry, **other.config(), "dtype": entry["dtype"]}
    is_cut = made == {**entry, "out_features": dense.out_features}  # the padding would hide it
    return entry if is_cut else made


def _names_in(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Map saved names to names in this model, adding or removing the base model's prefix."""
    there = dict(model.named_modules(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."
    changes = get_model_conversion_mapping(model)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    found, taken = {}, set[int]()
    for name in names:
        new = f"{name}.weight"
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        for maybe in (name, name.removeprefix(prefix), prefix + name, new.removesuffix(".weight")):
            if maybe in there:
                if id(there[maybe]) not in taken:  # else it is one layer, of two names
                    found[name] = maybe
                    taken.add(id(there[maybe]))
                break
    return found


def _resized_table(
    model: Any,
    old: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Append rows to a tensor-train table, for ``_get_resized_embeddings``."""
    head = model.get_output_embeddings()
    wanted = old.num_embeddings if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if isinstance(head, CompressedLinear) and wanted != head.out_features:
        raise ValueError(
            f"the output layer is a tensor train of {head.out_features} rows that share their "
            'cores: leave it dense, or tie it to the embedding with TTConfig(tied="share")'
        )
    if not isinstance(old, TTTable):
        dense = type(model)._get_resized_embeddings
        return dense(model, old, new_num_tokens, pad_to_multiple_of, mean_resizing)
    more = wanted - old.num_embeddings
    if more < 0:
        raise ValueError(
            f"resize_token_embeddings({wanted}) would take rows from a table of "
            f"{old.num_embeddings}, whose rows share their cores: leave them, or make the model "
            "dense first with comera.densify_(model)"
        )
    if more:
        with torch.no_grad():
            if mean_resizing:
                rows = old.dense_weight().float().mean(0).expand(more, -1)
            else:
                rows = torch.randn(more, old.embedding_dim, device=old.cores[0].device)
                rows *= _std(model)
        append_rows_(old, rows)
        rename_tied_weights_(model)
    return old


def _resized_head(
    model: Any,
    old: nn.Module,
    new_num_tokens: int | None = None,
    transposed: bool = False,
    mean_resizing: bool = True,
) -> nn.Module:
    """Extend a tied head's bias by its mean after the table grew, for ``_get_resized_lm_head``."""
    if not isinstance(old, TiedTTLinear):
        dense = type(model)._get_resized_lm_head
        return dense(model, old, new_num_tokens, transposed, mean_resizing)
    more = old.embedding.num_embeddings - old.out_features
    old.out_features += more
    if old.bias is not None and more:
        bias = torch.cat([old.bias.detach(), old.bias.detach().mean().expand(more)])
        old.bias = nn.Parameter(bias, requires_grad=old.bias.requires_grad)
    return old
