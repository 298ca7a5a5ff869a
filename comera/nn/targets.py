"""The layers of a model that a configuration means, and the weights they share."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from comera.names import listed
from comera.nn.config import TTConfig
from comera.nn.forms import as_torch, form_of
from comera.nn.module import TensorTrainModule, tensor_trains

log = logging.getLogger("comera")

_WORTH_SAYING = 0.1
"""Share of a model's parameters in layers that cannot be converted above which they are named."""

_NAMED_TARGETS: dict[str, tuple[type[nn.Module], ...]] = {
    "all": (nn.Linear, nn.Embedding, nn.EmbeddingBag),
    "all-linear": (nn.Linear,),
    "all-embedding": (nn.Embedding, nn.EmbeddingBag),
}


def find_targets(
    model: nn.Module,
    config: TTConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    caller: str | None,
) -> dict[str, nn.Module]:
    """Find the modules to convert by name, each once however many names it has.

    What was asked for and stays dense is named in the log, so that nobody takes it for compressed,
    as left so by ``caller``, the function that the user called; nothing is said without one.

    Raises:
        ValueError: If there is none.
    """
    inside_attention = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for part in module.modules()
    }
    known, chosen, attention, subclasses, made, small = [], {}, [], [], [], []
    for name, module in model.named_modules():
        layer = as_torch(module)
        if not isinstance(layer, _NAMED_TARGETS["all"]):
            continue
        known.append(name)
        if not _selected(name, layer, config) or (filter_fn and not filter_fn(module, name)):
            continue
        if id(module) in inside_attention:
            attention.append(name)
        elif type(layer) not in _NAMED_TARGETS["all"]:
            subclasses.append(name)
        elif _is_made(module):
            made.append(name)
        elif module.weight.numel() < config.min_size:  # type: ignore[operator,union-attr]
            small.append(name)
        else:
            chosen[name] = module
    for names, reason in (
        (
            attention,
            "nn.MultiheadAttention reads its weight directly, and its in_proj_weight, which is no "
            "layer and stays dense too",
        ),
        (subclasses, "a subclass of the torch layer may do more than the layer"),
        (
            made,
            "the weight or the bias is made from others, such as by weight_norm, spectral_norm or "
            "prune",
        ),
    ):
        if names and caller:
            log.warning("%s leaves %s dense: %s", caller, listed(names), reason)
    if caller:
        _warn_of_unused_exclusions(config.exclude_modules, known, caller)
    if caller and config.target_modules in ("all", "all-linear"):
        _name_other_kinds(model, caller)
    if not chosen:
        already = list(tensor_trains(model))
        raise ValueError(
            f"target_modules={config.target_modules!r} with "
            f"exclude_modules={config.exclude_modules!r}"
            f"{' and filter_fn' if filter_fn else ''} matches no layer that can be converted"
            f"{f' and has min_size={config.min_size} entries' if small else ''}; "
            f"the model's linear and embedding layers are {listed(known) or 'none at all'}"
            f"{f', and {listed(already)} are tensor trains already' if already else ''}"
        )
    return chosen


def _is_made(module: nn.Module) -> bool:
    """Say whether the weight or the bias is no parameter, but computed from some."""
    if isinstance(getattr(module, "bias", None), Tensor) and "bias" not in module._parameters:
        return True
    return "weight" not in module._parameters


def _name_other_kinds(model: nn.Module, caller: str) -> None:
    """Warn of what no target can be and yet is much of the model, as experts in one parameter."""
    skip = {
        id(part)
        for module in model.modules()
        if isinstance(module, (*_NAMED_TARGETS["all"], TensorTrainModule, nn.MultiheadAttention))
        or form_of(module)
        for part in module.modules()
    }
    kinds: Counter[str] = Counter()
    size = 0
    for module in model.modules():
        params = [param for param in module.parameters(recurse=False) if not is_lazy(param)]
        matrices = [param for param in params if param.dim() > 1]
        if matrices and id(module) not in skip:
            kinds[type(module).__name__] += 1
            size += sum(param.numel() for param in matrices)
    whole = sum(param.numel() for param in model.parameters() if not is_lazy(param))
    share = size / max(1, whole)
    if share > _WORTH_SAYING:
        found = listed([f"{count} {kind}" for kind, count in kinds.most_common()])
        log.warning(
            "%s leaves %s dense, with %.0f %% of all parameters: they are no nn.Linear, "
            "nn.Embedding or nn.EmbeddingBag, nor known by comera.register_layer",
            caller, found, 100 * share,
        )  # fmt: skip


def check_patterns(config: TTConfig, targets: Iterable[str]) -> None:
    """Check that every pattern fits a target: one that does not is most likely misspelt.

    Raises:
        ValueError: If one does not.
    """
    names = list(targets)
    for setting in ("rank_pattern", "shape_pattern", "hot_pattern"):
        for pattern in getattr(config, setting):
            if not any(matches(name, pattern) for name in names):
                raise ValueError(
                    f"{setting} {pattern!r} matches none of the targeted layers {listed(names)}"
                )
    if isinstance(config.target_modules, list):
        for end in config.target_modules:
            if not any(matches(name, [end]) for name in names):
                raise ValueError(
                    f"target_modules entry {end!r} matches no layer that can be converted; "
                    f"the others match {listed(names)}"
                )


def _warn_of_unused_exclusions(
    exclude: str | list[str] | None, known: Sequence[str], caller: str
) -> None:
    """Warn of exclusions that fit no layer; one configuration may serve models that lack it."""
    entries = [exclude] if isinstance(exclude, str) else [[end] for end in exclude or ()]
    for entry in entries:
        if not any(matches(name, entry) for name in known):
            log.warning(
                "%s: exclude_modules %r matches no linear or embedding layer: %s",
                caller,
                entry if isinstance(entry, str) else entry[0],
                listed(known) or "there is none",
            )


def _selected(name: str, module: nn.Module, config: TTConfig) -> bool:
    wanted = config.target_modules
    if isinstance(wanted, str) and wanted in _NAMED_TARGETS:
        hit = isinstance(module, _NAMED_TARGETS[wanted])
    else:
        hit = matches(name, wanted)
    return hit and not (config.exclude_modules and matches(name, config.exclude_modules))


def matches(name: str, pattern: str | Sequence[str]) -> bool:
    """Match a regular expression with the whole name, or any of a list of names or their ends."""
    if isinstance(pattern, str):
        return _regex(pattern).fullmatch(name) is not None
    return any(name == end or name.endswith(f".{end}") for end in pattern)


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"{pattern!r} is not a regular expression: {problem}") from None


def tied_groups(
    targets: Mapping[str, nn.Module],
) -> list[tuple[list[str], list[nn.Module]]]:
    """Group targets by the weight they hold, in order; most groups have one member."""
    groups: dict[int, tuple[list[str], list[nn.Module]]] = {}
    for name, module in targets.items():
        weight: object = module.weight
        names, modules = groups.setdefault(id(weight), ([], []))
        names.append(name)
        modules.append(module)
    return list(groups.values())


def other_holders(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """Find the names under which modules other than these hold the weight that these share."""
    weight: object = modules[0].weight
    return [
        f"{name}.{key}".lstrip(".")
        for name, other in model.named_modules()
        if not any(other is module for module in modules)
        for key, param in other._parameters.items()
        if param is weight
    ]
