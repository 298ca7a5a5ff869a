"""Swap the layers of an existing model for tensor-train layers, and back."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera.nn.embedding import TTEmbedding
from comera.nn.embedding_bag import TTEmbeddingBag
from comera.nn.linear import TTLinear
from comera.nn.module import PRUNE_BELOW, TensorTrainModule
from comera.nn.table import TTTable
from comera.nn.tied import TiedTTLinear
from comera.ops.machine import machine_of
from comera.planning.break_even import break_even

log = logging.getLogger("comera")

_NAMED_TARGETS: dict[str, tuple[type[nn.Module], ...]] = {
    "all": (nn.Linear, nn.Embedding, nn.EmbeddingBag),
    "all-linear": (nn.Linear,),
    "all-embedding": (nn.Embedding, nn.EmbeddingBag),
}

_WORTH_SAYING = 1.1
"""Predicted time or memory, in units of dense's, above which a layer is named."""

Rank = int | list[int]
Modes = Sequence[Sequence[int]]


@dataclass
class TTConfig:
    """How :func:`tensorize_` picks layers and shapes them.

    Args:
        rank: Bound on the bonds of linear layers: one int, or a list of all inner bonds, which
            every targeted linear layer must then fit. 32 if neither this nor ``compression`` is
            given.
        embedding_rank: The same for embeddings; ``rank`` where that is an int and this is None.
        compression: Instead of ``rank``: how many times smaller each layer becomes.
        tolerance: Instead of both, with ``init="svd"``: relative Frobenius error of each weight.
        order: Modes a side of a linear layer.
        embedding_order: Cores of an embedding.
        target_modules: ``"all"``, ``"all-linear"`` or ``"all-embedding"``; any other string is a
            regular expression that must match the whole module name; a list holds names or ends
            of names (``"fc1"`` takes ``layers.0.fc1``).
        exclude_modules: A regular expression or a list, like ``target_modules``; wins over it.
        rank_pattern: Regular expression over the whole module name, to a rank that replaces
            ``rank`` there. The first match counts.
        shape_pattern: Regular expression to a pair of mode lists, like ``rank_pattern``.
        hot_rows: Rows of every targeted embedding that stay dense, counted from row 0.
        init: ``"fresh"`` draws new cores that give the dense weight the standard deviation it has
            now; ``"svd"`` approximates the present weight by TT-SVD.
        tied: What to do with a weight that two targeted modules share: ``"skip"`` leaves both
            dense, ``"share"`` keeps them tied over one set of cores, ``"untie"`` converts each.
        prune_below: A gate at or below this is a pruned rank.
        tokens: Rows of a training batch, that is batch size times length. Layers that are
            predicted to be slower or larger than dense at this batch are named in the log, with a
            rank that would not be.
    """

    rank: Rank | None = None
    embedding_rank: Rank | None = None
    compression: float | None = None
    tolerance: float | None = None
    order: int = 3
    embedding_order: int = 4
    target_modules: str | list[str] = "all"
    exclude_modules: str | list[str] | None = None
    rank_pattern: dict[str, Rank] = field(default_factory=dict)
    shape_pattern: dict[str, list[list[int]]] = field(default_factory=dict)
    hot_rows: int = 0
    init: Literal["fresh", "svd"] = "fresh"
    tied: Literal["skip", "share", "untie"] = "skip"
    prune_below: float = PRUNE_BELOW
    tokens: int = 4096

    def __post_init__(self) -> None:
        _one_of("init", self.init, ("fresh", "svd"))
        _one_of("tied", self.tied, ("skip", "share", "untie"))
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be at least 1")
        if self.tolerance is not None and self.init != "svd":
            raise ValueError(
                f"tolerance={self.tolerance} is an error against the present weight: "
                f'it needs init="svd", not init={self.init!r}'
            )


def tensorize_(
    model: nn.Module,
    config: TTConfig | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replace the targeted linear and embedding layers by tensor trains, in place.

    Build the optimizer afterwards: the parameters are new. What must not be swapped, or would
    not become smaller, is left alone and named in one line on the ``comera`` logger.

    Args:
        model: Any model; on the ``meta`` device nothing is allocated.
        config: Which layers, and how; ``TTConfig()`` if None.
        filter_fn: A further condition, called with each targeted module and its name.

    Returns:
        The model; if it is itself a targeted layer, the layer that replaces it.

    Raises:
        ValueError: If no module matches, or a rank or shape does not fit one; the message names
            the module. The model is then unchanged.
    """
    config = config or TTConfig()
    targets = _targets(model, config, filter_fn)
    _check_patterns(config, targets)
    groups = _tied_groups(targets)
    replacements: dict[int, nn.Module] = {}
    skipped: dict[str, list[str]] = {}
    for names, modules in groups:
        outside = _other_holders(model, modules)
        if outside and config.tied != "untie":
            reason = f'{_listed(outside)} holds the same weight and is no target (tied="untie"?)'
            skipped.setdefault(reason, []).extend(names)
            continue
        if len(modules) > 1 and config.tied == "skip":
            reason = 'they share a weight (TTConfig(tied="share") or tied="untie" converts them)'
            skipped.setdefault(reason, []).extend(names)
            continue
        if len(modules) > 1 and config.tied == "share":
            replacements |= _convert_tied(names, modules, config)
            continue
        for name, module in zip(names, modules, strict=True):
            new = _convert(name, module, config)
            if isinstance(new, str):
                skipped.setdefault(new, []).append(name)
            else:
                replacements[id(module)] = new
    for reason, names in skipped.items():
        log.warning("tensorize_ leaves %s dense: %s", _listed(names), reason)
    name_of = {id(module): name for name, module in targets.items()}
    _say_what_loses({name_of[key]: new for key, new in replacements.items()}, config.tokens)
    return _swap(model, replacements)


def densify_(model: nn.Module) -> nn.Module:
    """Replace every tensor-train layer by the torch layer it stands for, in place.

    Layers that share one set of cores share one dense weight afterwards.

    Returns:
        The model; if it is itself a tensor-train layer, the dense layer that replaces it.
    """
    replacements: dict[int, nn.Module] = {}
    heads: list[TiedTTLinear] = []
    weights: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, TensorTrainModule):
            dense = module.to_dense()
            dense.weight = weights.setdefault(id(module.cores), dense.weight)
            replacements[id(module)] = dense
        elif isinstance(module, TiedTTLinear):
            heads.append(module)
    for head in heads:
        table = replacements[id(head.embedding)]
        replacements[id(head)] = head.to_dense(table.weight)  # type: ignore[arg-type]
    return _swap(model, replacements)


def _say_what_loses(layers: Mapping[str, nn.Module], tokens: int) -> None:
    """One line for each kind of layer that is predicted to be slower or larger than dense."""
    alike: dict[object, list[tuple[str, TTLinear]]] = {}
    for name, layer in layers.items():
        if isinstance(layer, TTLinear):
            alike.setdefault((layer.kind(), layer.in_features), []).append((name, layer))
    for members in alike.values():
        layer = members[0][1]
        core = layer.cores[0]
        found = break_even(
            layer.shape,
            tokens,
            dtype=str(core.dtype).removeprefix("torch."),
            machine=machine_of(core.device),
            in_features=layer.in_features,
            out_features=layer.out_features,
            bias=layer.bias is not None,
            together=len(members),
        )
        if found.time_ratio > _WORTH_SAYING or found.memory_ratio > _WORTH_SAYING:
            names = _listed([name for name, _ in members], most=2)
            log.warning("tensorize_: %s: %s", names, found)


def _targets(
    model: nn.Module, config: TTConfig, filter_fn: Callable[[nn.Module, str], bool] | None
) -> dict[str, nn.Module]:
    """Modules to convert by name, each once however many names it has."""
    inside_attention = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for part in module.modules()
    }
    known, chosen, attention, subclasses = [], {}, [], []
    for name, module in model.named_modules():
        if not isinstance(module, _NAMED_TARGETS["all"]):
            continue
        known.append(name)
        if not _selected(name, module, config) or (filter_fn and not filter_fn(module, name)):
            continue
        if id(module) in inside_attention:
            attention.append(name)
        elif type(module) not in _NAMED_TARGETS["all"]:
            subclasses.append(name)
        else:
            chosen[name] = module
    for names, reason in (
        (attention, "nn.MultiheadAttention reads its weight directly"),
        (subclasses, "a subclass of the torch layer may do more than the layer"),
    ):
        if names:
            log.warning("tensorize_ leaves %s dense: %s", _listed(names), reason)
    if not chosen:
        raise ValueError(
            f"target_modules={config.target_modules!r} with "
            f"exclude_modules={config.exclude_modules!r}"
            f"{' and filter_fn' if filter_fn else ''} matches no layer that can be converted; "
            f"the model's linear and embedding layers are {_listed(known) or 'none at all'}"
        )
    return chosen


def _check_patterns(config: TTConfig, targets: Iterable[str]) -> None:
    """A pattern that fits no target is most likely misspelt."""
    names = list(targets)
    for setting in ("rank_pattern", "shape_pattern"):
        for pattern in getattr(config, setting):
            if not any(_matches(name, pattern) for name in names):
                raise ValueError(
                    f"{setting} {pattern!r} matches none of the targeted layers {_listed(names)}"
                )
    if isinstance(config.target_modules, list):
        for end in config.target_modules:
            if not any(_matches(name, [end]) for name in names):
                raise ValueError(
                    f"target_modules entry {end!r} matches no layer that can be converted; "
                    f"the others match {_listed(names)}"
                )


def _selected(name: str, module: nn.Module, config: TTConfig) -> bool:
    wanted = config.target_modules
    if isinstance(wanted, str) and wanted in _NAMED_TARGETS:
        hit = isinstance(module, _NAMED_TARGETS[wanted])
    else:
        hit = _matches(name, wanted)
    return hit and not (config.exclude_modules and _matches(name, config.exclude_modules))


def _matches(name: str, pattern: str | Sequence[str]) -> bool:
    """A string is a regular expression over the whole name, a list holds names or their ends."""
    if isinstance(pattern, str):
        return _regex(pattern).fullmatch(name) is not None
    return any(name == end or name.endswith(f".{end}") for end in pattern)


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"{pattern!r} is not a regular expression: {problem}") from None


def _tied_groups(
    targets: Mapping[str, nn.Module],
) -> list[tuple[list[str], list[nn.Module]]]:
    """Targets grouped by the weight they hold, in order; most groups have one member."""
    groups: dict[int, tuple[list[str], list[nn.Module]]] = {}
    for name, module in targets.items():
        weight: object = module.weight
        names, modules = groups.setdefault(id(weight), ([], []))
        names.append(name)
        modules.append(module)
    return list(groups.values())


def _other_holders(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """Names under which modules other than these hold the weight that these share."""
    weight: object = modules[0].weight
    return [
        f"{name}.{key}".lstrip(".")
        for name, other in model.named_modules()
        if not any(other is module for module in modules)
        for key, param in other._parameters.items()
        if param is weight
    ]


def _convert(name: str, module: nn.Module, config: TTConfig) -> TensorTrainModule | str:
    """The layer that replaces ``module``, or why it should not be replaced."""
    if getattr(module, "max_norm", None) is not None:
        return "max_norm scales single rows, and the rows of a tensor train share their cores"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq is not supported"
    settings = _settings(name, module, config)
    try:
        new = _build(module, settings, config.init)
        _keep_frozen(new, module)
    except ValueError as problem:
        raise ValueError(f"{name or 'the model'}: {problem}") from None
    stored = sum(param.numel() for param in [*new.cores, *new.gates])
    if stored >= new.num_dense:
        return f"a tensor train at this rank would hold {stored} numbers for {new.num_dense}"
    return new


def _settings(name: str, module: nn.Module, config: TTConfig) -> dict[str, Any]:
    """Constructor keywords for one module: the general ones, then what the patterns say."""
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    rank = config.rank
    if is_table:
        rank = config.embedding_rank
        if rank is None and isinstance(config.rank, int):
            rank = config.rank
    settings: dict[str, Any] = {
        "rank": rank,
        "shape": _first(config.shape_pattern, name),
        "order": config.embedding_order if is_table else config.order,
        "compression": config.compression,
        "prune_below": config.prune_below,
    }
    own_rank = _first(config.rank_pattern, name)
    if own_rank is not None:
        settings |= {"rank": own_rank, "compression": None}
    if is_table:
        settings["hot_rows"] = config.hot_rows
    if config.init == "svd":
        settings["tolerance"] = config.tolerance if own_rank is None else None
    return settings


def _first(patterns: Mapping[str, Any], name: str) -> Any:
    return next((value for key, value in patterns.items() if _matches(name, key)), None)


def _build(module: Any, settings: dict[str, Any], init: str) -> TensorTrainModule:
    if init == "svd" and module.weight.device.type != "meta":
        if isinstance(module, nn.Linear):
            return TTLinear.from_linear(module, **settings)
        if isinstance(module, nn.Embedding):
            return TTEmbedding.from_embedding(module, **settings)
        return TTEmbeddingBag.from_embedding_bag(module, **settings)
    settings = {key: value for key, value in settings.items() if key != "tolerance"}
    settings |= {"device": module.weight.device, "dtype": module.weight.dtype}
    new: TTLinear | TTTable
    if isinstance(module, nn.Linear):
        bias = module.bias is not None
        new = TTLinear(module.in_features, module.out_features, bias, **settings)
    else:
        settings |= {"padding_idx": module.padding_idx, "sparse": module.sparse}
        if isinstance(module, nn.Embedding):
            new = TTEmbedding(module.num_embeddings, module.embedding_dim, **settings)
        else:
            new = TTEmbeddingBag(
                module.num_embeddings,
                module.embedding_dim,
                mode=module.mode,
                include_last_offset=module.include_last_offset,
                **settings,
            )
    if module.weight.device.type != "meta":
        _take_scale(new, module)
    return new.train(module.training)


def _keep_frozen(new: nn.Module, module: Any) -> None:
    """A layer whose weight or bias does not train stays so."""
    for name, param in new.named_parameters():
        source = module.bias if name == "bias" else module.weight
        param.requires_grad_(source.requires_grad)


@torch.no_grad()
def _take_scale(new: Any, module: Any) -> None:
    """Keep the scale that the model's own initialisation gave the weight, and its bias."""
    new.reset_parameters(std=float(module.weight.float().square().mean().sqrt()))
    if isinstance(new, TTLinear) and new.bias is not None:
        new.bias.copy_(module.bias)


def _convert_tied(
    names: list[str], modules: list[nn.Module], config: TTConfig
) -> dict[int, nn.Module]:
    """Convert the table of a tied group, and let the other members work on its cores."""
    tables = [k for k, module in enumerate(modules) if not isinstance(module, nn.Linear)]
    first = tables[0] if tables else 0
    lead = _convert(names[first], modules[first], config)
    if isinstance(lead, str):
        log.warning("tensorize_ leaves %s dense: %s", _listed(names), lead)
        return {}
    made: dict[int, nn.Module] = {id(modules[first]): lead}
    for k, module in enumerate(modules):
        if k == first:
            continue
        if isinstance(module, nn.Linear) and isinstance(lead, TTTable):
            made[id(module)] = TiedTTLinear(lead, _clone(module.bias)).train(module.training)
        else:
            twin = _convert(names[first], module, config)
            assert isinstance(twin, TensorTrainModule), "the leading module of the group converted"
            twin.cores, twin.gates = lead.cores, lead.gates
            if isinstance(twin, TTTable):
                twin.hot = lead.hot  # type: ignore[assignment]
            made[id(module)] = twin
    return made


def _clone(bias: Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias.detach().clone())


def _swap(model: nn.Module, replacements: Mapping[int, nn.Module]) -> nn.Module:
    if id(model) in replacements:
        return replacements[id(model)]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])
    return model


def _listed(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
