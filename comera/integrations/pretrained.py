"""Compressed models in the folders of transformers: ``save_pretrained`` and ``from_pretrained``.

The description of a model's layers is the ``quantization_config`` in ``config.json``, the place
where transformers keeps how weights are held; a registered quantizer puts the layers in place
before the weights are loaded. ``resize_token_embeddings`` works on tables that are tensor trains.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comera.extras import listed, needed_by
from comera.nn.convert import densify_, tensorize_
from comera.nn.forms import experts_apart
from comera.nn.linear import CompressedLinear
from comera.nn.table import TTTable
from comera.nn.targets import TTConfig
from comera.nn.tied import TiedTTLinear, rename_tied_weights_
from comera.saved.description import Entry, check_description, describe, rebuild_
from comera.serving.freeze import refuse_training_
from comera.surgery.rows import append_rows_

with needed_by("comera.integrations.transformers"):
    from transformers import PreTrainedModel
    from transformers.quantizers import (
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "comera"
"""Name in ``config.json``."""


def attach_(model: PreTrainedModel, config: TTConfig | None = None) -> PreTrainedModel:
    """Prepare a compressed model of transformers for ``save_pretrained``, in place.

    Its ``resize_token_embeddings`` can then append rows to tables that are tensor trains.
    ``AutoModel.from_pretrained(folder)`` and its like then make it again, with the ranks that it
    has when it is saved, where ``comera.integrations.transformers`` is imported.
    :func:`~comera.integrations.transformers.learn_ranks_` calls this too.

    Args:
        model: With its tensor-train layers in place.
        config: How it was compressed, kept in ``config.json`` for people.

    Returns:
        The model.

    Raises:
        TypeError: If it is no model of transformers.
        ValueError: If its weights are quantized by another method.
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
        held = TensorTrainConfig(config, describe(model))
        model.config.quantization_config = held
        model.hf_quantizer = TensorTrainQuantizer(held)  # type: ignore[assignment]
        _set_methods_(model)
    return model


@register_quantization_config(METHOD)
class TensorTrainConfig(QuantizationConfigMixin):
    """Description of a model of transformers with tensor trains: a ``quantization_config``.

    ``AutoModel.from_pretrained(name, quantization_config=TensorTrainConfig(config))`` compresses a
    dense model once it is loaded.

    Args:
        config: How to compress it; ``TTConfig(init="svd")`` if neither is given.
        described: Of a model that is compressed already: what its layers are, see
            :func:`comera.saved.description.describe`.
        quant_method: That of the file, always ``"comera"``.

    Raises:
        ValueError: If a setting in ``config`` is none.
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
        """Return what ``config.json`` holds of it."""
        config = None if self.config is None else self.config.to_dict()
        held = {"quant_method": METHOD, "config": config, "described": self.described}
        return {key: value for key, value in held.items() if value is not None}


@register_quantizer(METHOD)
class TensorTrainQuantizer(HfQuantizer):
    """Quantizer that transformers calls while it loads and saves a model with tensor trains.

    Loaded, it counts as a model that is not quantized: it is trained, cast and moved like others.
    """

    quantization_config: TensorTrainConfig
    _dtype: torch.dtype | None = None
    given: Mapping[str, Any] | None = None

    @property
    def is_trainable(self) -> bool:
        """All of it is trained."""
        return True

    def is_serializable(self) -> bool:
        """It can be saved."""
        return True

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Take note of the dtype to load in, which is told nowhere else."""
        self._dtype = dtype
        return dtype

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Describe layers as they are now: ``save_pretrained`` writes ``config.json`` after this.

        Of a model that is dense again nothing is said.
        """
        described = describe(model)
        del described["model"]  # config.json is about it
        described["layers"] |= _other_names(model, described["layers"])
        self.quantization_config.described = described
        if described["layers"]:
            model.config.quantization_config = self.quantization_config
        else:
            vars(model.config).pop("quantization_config", None)
        return _buffers_apart(model, self.given), {}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            where = f"quantization_config of {model.config.name_or_path}"
            described = check_description(self.quantization_config.described, where)
            apart = _names_in(model, described["split_experts"])
            with experts_apart(model, apart.values()):
                layers = _as_in(model, described["layers"], where)
            rebuild_(model, {name: _cast(entry, self._dtype) for name, entry in layers.items()})
            for name in _names_in(model, described["served"]).values():
                refuse_training_(model.get_submodule(name))
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
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # that of the model's config, which save_pretrained has made a string
        return densify_(model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def _other_names(model: PreTrainedModel, layers: Mapping[str, Entry]) -> dict[str, Entry]:
    """Describe layers that have several names by the others too.

    T5 puts a table that was resized where it has two more; made anew, the model has three.
    """
    name_of = {id(model.get_submodule(name)): name for name in layers}
    inside = tuple(f"{name}." for name in layers)
    return {
        name: {**layers[name_of[id(module)]], "works_on": name_of[id(module)]}
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in name_of and name not in layers and not name.startswith(inside)
    }


def _set_methods_(model: Any) -> None:
    """Set methods of a model that save the state they are given, and let tensor trains grow."""
    model.save_pretrained = partial(_save_pretrained, model)
    model._get_resized_embeddings = partial(_resized_table, model)
    model._get_resized_lm_head = partial(_resized_head, model)


def _save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Do what the method does, which asks the quantizer for a state and forgets the given one."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, TensorTrainQuantizer):
        quantizer.given = state_dict
    try:
        save = type(model).save_pretrained
        save(model, save_directory, is_main_process, state_dict, *args, **kwargs)
    finally:
        if isinstance(quantizer, TensorTrainQuantizer):
            quantizer.given = None


def _buffers_apart(model: PreTrainedModel, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state of the model with a copy of each buffer for each of its names.

    Parameters that have several are written once, and tied when they are loaded. transformers ties
    no buffers, such as where a tied table keeps its rows.
    """
    state = model.state_dict() if given is None else given
    buffers = dict(model.named_buffers(remove_duplicate=False))
    apart = {name: state[name].clone() for name in buffers if name in state}
    return {**state, **apart}


def _cast(entry: Entry, dtype: torch.dtype | None) -> Entry:
    """Describe the same layer in the dtype of the whole model; gates stay wide by themselves."""
    if entry.get("dtype") is None:  # an output layer without a bias
        return entry
    return {**entry, "dtype": str(dtype).removeprefix("torch.")}


def _as_in(model: Any, layers: Mapping[str, Entry], where: str) -> dict[str, Entry]:
    """Return layers by the names that they have in a model with or without the saved one's head.

    ``bert.encoder`` of a classifier is ``encoder`` of the model beneath, and the other way round.
    Layers that the model has not, such as those of a head, are left out.
    """
    new_name = _names_in(model, layers)
    if layers and not new_name:
        raise ValueError(
            f"{where} speaks of {listed(list(layers))}, and a {type(model).__qualname__} has none "
            "of them: load it as the kind of model that was saved"
        )
    found = {}
    for name, mine in new_name.items():
        lead = layers[name].get("works_on")
        if lead is None:
            found[mine] = layers[name]
        elif lead in new_name:
            found[mine] = {**layers[name], "works_on": new_name[lead]}
    return found


def _names_in(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return, of each name that a module has with or without the model's prefix, that name."""
    there = dict(model.named_modules(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."
    found, taken = {}, set[int]()
    for name in names:
        for maybe in (name, name.removeprefix(prefix), prefix + name):
            if maybe in there:
                if id(there[maybe]) not in taken:  # else it is one layer, of two names
                    found[name] = maybe
                    taken.add(id(there[maybe]))
                break
    return found


# ── tables that grow ─────────────────────────────────────────────────────────────────────────────


def _resized_table(
    model: Any,
    old: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Replace transformers' ``_get_resized_embeddings``: append rows to a tensor-train table,
    and leave dense ones to the original.
    """
    if not isinstance(old, TTTable):
        dense = type(model)._get_resized_embeddings
        return dense(model, old, new_num_tokens, pad_to_multiple_of, mean_resizing)
    wanted = old.num_embeddings if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    more = wanted - old.num_embeddings
    if more < 0:
        raise ValueError(
            f"resize_token_embeddings({wanted}) would take rows from a table of "
            f"{old.num_embeddings}, whose rows share their cores: leave them, or make the model "
            "dense first with comera.densify_(model)"
        )
    if more:
        append_rows_(old, _new_rows(model, old, more, mean_resizing))
        rename_tied_weights_(model)
    return old


@torch.no_grad()
def _new_rows(model: Any, table: TTTable, more: int, mean_resizing: bool) -> Tensor:
    if mean_resizing:
        return table.dense_weight().float().mean(0).expand(more, -1)
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    return std * torch.randn(more, table.embedding_dim, device=table.cores[0].device)


def _resized_head(
    model: Any,
    old: nn.Module,
    new_num_tokens: int | None = None,
    transposed: bool = False,
    mean_resizing: bool = True,
) -> nn.Module:
    """Do what the method does; a head on the cores of a table has grown with it but for its bias.

    The new entries of that are the mean of the others.
    """
    if isinstance(old, CompressedLinear) and new_num_tokens not in (None, old.out_features):
        raise ValueError(
            f"the output layer is a tensor train of {old.out_features} rows that share their "
            'cores: leave it dense, or tie it to the embedding with TTConfig(tied="share")'
        )
    if not isinstance(old, TiedTTLinear):
        dense = type(model)._get_resized_lm_head
        return dense(model, old, new_num_tokens, transposed, mean_resizing)
    more = old.embedding.num_embeddings - old.out_features
    old.out_features += more
    if old.bias is not None and more:
        mean = old.bias.detach().mean()
        bias = torch.cat([old.bias.detach(), mean.expand(more)])
        old.bias = nn.Parameter(bias, requires_grad=old.bias.requires_grad)
    return old
