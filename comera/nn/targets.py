"""Define the settings of a conversion; find the layers they select and weights they share."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from comera.extras import check_known, error_prefix, listed, names_misspelt, say_once
from comera.nn.feed_forward_parts import path_of
from comera.nn.forms import as_torch, form_of
from comera.nn.init import Init
from comera.nn.linear import FORMATS
from comera.nn.module import PRUNE_BELOW, TensorTrainModule, tensor_trains
from comera.params import is_sharded
from comera.shapes import check_tolerance, check_whole_numbers, is_number, only_one, whole_ranks

log = logging.getLogger("comera")

Rank = int | list[int]

_CHOICES = {
    "init": ("orthogonal", "normal", "svd"), "tied": ("skip", "share", "untie"),
    "linear_format": FORMATS,
}  # fmt: skip
_LEAST = {
    "order": 1, "embedding_order": 2, "hot_rows": 0, "hot_rank": 1, "min_size": 0, "tokens": 1,
}  # fmt: skip
"""Whole numbers, and how small each may be."""


@names_misspelt
@dataclass
class TTConfig:
    """Settings of :func:`tensorize_`: which layers it converts, and to which shapes.

    Args:
        rank: Bound on the bonds of linear layers: one int, or a list of all inner bonds that every
            targeted one must fit. 32 if neither this nor ``compression`` is given, of blocks 2.
        embedding_rank: Bound on the bonds of embeddings, in place of ``compression`` and
            ``tolerance`` too; if None, ``rank`` if that is an int, but 32 with
            ``linear_format="btt"``.
        compression: Ratio of each weight's entries to those of its cores, without gates and hot
            rows; replaces ``rank``.
        tolerance: Relative Frobenius error of each weight, with ``init="svd"``; replaces ``rank``
            and ``compression``.
        linear_format: ``"tt"`` makes linear layers tensor trains (``comera.TTLinear``), whose
            weights have low rank; ``"btt"`` makes them block tensor trains
            (``comera.BTTLinear``), whose blocks have low rank, 2 by default.
        order: How many modes each side of a linear layer is split into, with ``"tt"``.
        embedding_order: How many cores an embedding has.
        target_modules: ``"all"``, ``"all-linear"`` or ``"all-embedding"``; any other string is a
            regular expression that must match the whole module name; a list holds names or ends
            of names (``"fc1"`` takes ``layers.0.fc1``). Adapters of PEFT are taken only if named.
        exclude_modules: Modules to leave out: a regular expression or a list, as above.
        rank_pattern: Maps regular expressions over whole module names to ranks that replace
            ``rank`` in modules that match. The first match counts.
        shape_pattern: Maps regular expressions to pairs of mode lists, like ``rank_pattern``.
        hot_rows: How many of the first rows of every targeted embedding stay dense.
        hot_rank: Hold each hot row as so many coordinates in a shared basis, instead of densely.
        hot_pattern: Maps regular expressions over whole module names to ``[hot_rows, hot_rank]``,
            which replace both settings, like ``rank_pattern``; the rank may be null.
        scatter_rows: Whether embeddings put neighbouring indices far apart, see
            ``comera.TTEmbedding``; by default those without hot rows do, unless ``init="svd"``.
        min_size: Layers whose weight has fewer entries stay dense.
        init: ``"orthogonal"`` draws cores that give the dense weight its present root mean square
            and equal singular values, ``"normal"`` draws independent normal entries of that root
            mean square; for a weight of zeros only the last core is zero. ``"svd"`` approximates
            the present weight by TT-SVD. None is ``"orthogonal"`` and warns of lost weights.
        tied: How to convert a weight that two targeted modules share: ``"skip"`` leaves both
            dense, ``"share"`` makes them share one set of cores, ``"untie"`` converts each.
        prune_below: A gate at or below this is a pruned rank.
        tokens: Rows of a training batch, that is batch size times length; None is 4096, and in a
            run that run's rows. The log names layers predicted to be slower or larger than dense
            at this batch, with a rank that would be faster.
    """

    rank: Rank | None = None
    embedding_rank: Rank | None = None
    compression: float | None = None
    tolerance: float | None = None
    linear_format: Literal["tt", "btt"] = "tt"
    order: int = 3
    embedding_order: int = 4
    target_modules: str | list[str] = "all"
    exclude_modules: str | list[str] | None = None
    rank_pattern: dict[str, Rank] = field(default_factory=dict)
    shape_pattern: dict[str, list[list[int]]] = field(default_factory=dict)
    hot_rows: int = 0
    hot_rank: int | None = None
    hot_pattern: dict[str, list[int | None]] = field(default_factory=dict)
    scatter_rows: bool | None = None
    min_size: int = 0
    init: Init | Literal["svd"] | None = None
    tied: Literal["skip", "share", "untie"] = "skip"
    prune_below: float = PRUNE_BELOW
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "init" and value is None):
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{name}={value!r} must be one of {choices}")
        linear = FORMATS[self.linear_format]
        if not linear._shapes.orders and self.order != type(self).order:
            raise ValueError(
                f'order={self.order}: linear layers of linear_format="{self.linear_format}" have '
                "none; shape_pattern says how a side is split"
            )
        for name in ("target_modules", "exclude_modules"):
            given = getattr(self, name)
            if name == "exclude_modules" and given is None:
                continue
            if not isinstance(given, Collection) or any(not isinstance(end, str) for end in given):
                raise ValueError(
                    f"{name}={given!r} must be a string or a list of names of layers; kinds of "
                    'layers are "all-linear" and "all-embedding"'
                )
        for name in ("rank_pattern", "shape_pattern", "hot_pattern"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be a dict of patterns; {{}} for none"
                )
        ranks = {name: getattr(self, name) for name in ("rank", "embedding_rank")}
        ranks |= {f"rank_pattern[{key!r}]": rank for key, rank in self.rank_pattern.items()}
        for name, rank in ranks.items():
            if rank is not None or name.startswith("rank_pattern"):
                whole_ranks(name, rank)
        for pattern, hot in self.hot_pattern.items():
            if not isinstance(hot, Sequence) or len(hot) != 2 or hot[0] is None:
                raise ValueError(
                    f"hot_pattern[{pattern!r}]={hot!r} must be two numbers, hot_rows and hot_rank"
                )
        times, gate = self.compression, self.prune_below
        if times is not None and not (is_number(times) and times > 1):
            raise ValueError(
                f"compression={times!r} must be above 1: 10 means ten times fewer parameters"
            )
        if not (is_number(gate) and 0 <= gate < 1):
            raise ValueError(f"prune_below={gate!r} must be in [0, 1): gates start at 1")
        check_tolerance(self.tolerance)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None:
                check_whole_numbers(least, **{name: value})
        if self.scatter_rows and self.init == "svd":
            raise ValueError('scatter_rows=True: with init="svd" every row keeps its place')
        if self.tolerance is not None and self.init != "svd":
            raise ValueError(
                f"tolerance={self.tolerance} is an error against the present weight: "
                f'it needs init="svd", not init={self.init or "orthogonal"!r}'
            )
        only_one(rank=self.rank, compression=self.compression, tolerance=self.tolerance)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a configuration from settings by name; raise ``ValueError`` for an unknown name."""
        known = [each.name for each in fields(cls)]
        for name in settings:
            check_known(name, known, f"{name!r} is not a setting of {cls.__name__}")
        return cls(**settings)


_LARGE_SHARE = 0.1
"""Layers that cannot be converted are named above this share of all parameters."""

_NAMED_TARGETS: dict[str, tuple[type[nn.Module], ...]] = {
    "all": (nn.Linear, nn.Embedding, nn.EmbeddingBag),
    "all-linear": (nn.Linear,),
    "all-embedding": (nn.Embedding, nn.EmbeddingBag),
}

_IN_ATTENTION = (
    "nn.MultiheadAttention reads its weight directly, and its in_proj_weight, which is no layer "
    "and stays dense too"
)
_ADAPTER = "adapters of PEFT stay what they are unless target_modules names them, as lora_A"
_SUBCLASS = (
    "a subclass may do more than its torch layer (if not, call comera.register_layer for it)"
)
_QUANTIZED = "its weight is quantized, or another tensor that is not one of torch's own"
_COMPUTED = (
    "the weight or the bias is made from others, such as by weight_norm, spectral_norm or prune"
)
_RESCALED = (
    "the model divides its weight in place once it is evaluated, which cores do not allow "
    "(rescale_every=0 in the config of the model, before it is evaluated, lets it be converted)"
)


def find_targets(
    model: nn.Module,
    config: TTConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    caller: str | None,
) -> dict[str, nn.Module]:
    """Return the modules to convert by name, each once.

    The log names ``caller`` and selected layers that stay dense, unless ``caller`` is None. Raises
    ``ValueError`` if there is no module to convert, or if ``caller``'s patterns match none.
    """
    wanted, excluded = config.target_modules, config.exclude_modules
    known: list[str] = []
    chosen: dict[str, nn.Module] = {}
    dense = defaultdict[str, list[str]](list)
    parts = _parts_left_dense(model, wanted)
    rescales = any(getattr(getattr(m, "config", 0), "rescale_every", 0) for m in model.modules())
    small = False
    for name, module in model.named_modules():
        layer = as_torch(module)
        if not isinstance(layer, _NAMED_TARGETS["all"]):
            continue
        known.append(name)
        if isinstance(wanted, str) and wanted in _NAMED_TARGETS:
            selected = isinstance(layer, _NAMED_TARGETS[wanted])
        else:
            selected = matches(name, wanted)
        if not selected or (excluded and matches(name, excluded)):
            continue
        if filter_fn and not filter_fn(module, name):
            continue
        rescaled = rescales and matches(name, ["attention.output", "feed_forward.value"])  # of RWKV
        reason = parts.get(id(module)) or _why_dense(module, layer, rescaled)
        if reason is not None:
            dense[reason].append(name)
        elif module.weight.numel() < config.min_size:  # type: ignore[operator,union-attr]
            small = True
        else:
            chosen[name] = module
    for reason, names in dense.items() if caller else ():
        say_dense(str(caller), model, names, reason)
    entries = [excluded] if isinstance(excluded, str) else [[end] for end in excluded or ()]
    for entry in entries:  # one configuration may serve models that lack a layer
        if caller and not any(matches(name, entry) for name in known):
            log.warning(
                "%s: exclude_modules %r matches no linear or embedding layer: %s",
                caller, entry if isinstance(entry, str) else entry[0],
                listed(known) or "there is none",
            )  # fmt: skip
    if caller and wanted in ("all", "all-linear"):
        _warn_of_other_kinds(model, caller)
    if not chosen:
        already = list(tensor_trains(model))
        raise ValueError(
            f"target_modules={wanted!r} with exclude_modules={excluded!r}"
            f"{' and filter_fn' if filter_fn else ''} matches no layer that can be converted"
            f"{f' and has min_size={config.min_size} entries' if small else ''}; "
            f"the model's linear and embedding layers are {listed(known) or 'none at all'}"
            f"{f', and {listed(already)} are tensor trains already' if already else ''}"
        )
    if caller:
        check_patterns(config, chosen)
    return chosen


def _parts_left_dense(model: nn.Module, wanted: str | list[str]) -> dict[int, str]:
    """Return why modules stay dense for what they are a part of, by their ids."""
    reasons = {
        id(module): _ADAPTER
        for layer in model.modules()
        if any(cls.__name__ == "BaseTunerLayer" for cls in type(layer).__mro__)
        for part, child in layer.named_children()
        if part != "base_layer" and part not in str(wanted)
        for module in child.modules()
    }
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            reasons |= {id(part): _IN_ATTENTION for part in module.modules()}
    return reasons


def _why_dense(module: nn.Module, layer: nn.Module, rescaled: bool) -> str | None:
    """Return why a module, a ``layer`` in torch's form, cannot be converted; None if it can."""
    params: dict[str, Any] = module._parameters
    biased = isinstance(getattr(module, "bias", None), Tensor)
    if "weight" not in params or (biased and "bias" not in params):
        return _COMPUTED
    if rescaled:
        return _RESCALED
    if is_sharded(params["weight"]):
        return None
    if type(layer) not in _NAMED_TARGETS["all"]:
        return _SUBCLASS
    return _QUANTIZED if hasattr(params["weight"], "__tensor_flatten__") else None


def _warn_of_other_kinds(model: nn.Module, caller: str) -> None:
    """Warn of large modules that cannot be converted, such as experts in one parameter."""
    skip = {
        id(part)
        for module in model.modules()
        if isinstance(module, (*_NAMED_TARGETS["all"], TensorTrainModule, nn.MultiheadAttention))
        or form_of(module)
        for part in module.modules()
    }
    kinds: Counter[str] = Counter()
    left: list[nn.Parameter] = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        matrices = [k for k, p in own.items() if not is_lazy(p) and sum(n > 1 for n in p.shape) > 1]
        if id(module) not in skip:
            kind, alone = type(module).__name__, len(own) == len(list(module.parameters()))
            if not type(module).__module__.startswith("torch.nn."):
                kind = path_of(type(module))
            kinds.update({kind if alone else f"{kind}.{key}" for key in matrices})
            left += [own[key] for key in matrices]
    share = _share(model, left)
    if share > _LARGE_SHARE:
        found = listed([f"{count} {kind}" for kind, count in kinds.most_common()])
        say_once(
            log, logging.WARNING,
            "%s leaves %s dense, with %.0f %% of all parameters: they are none of torch's linear "
            "layers and tables (comera.register_layer teaches classes that compute the same)",
            caller, found, 100 * share,
        )  # fmt: skip


def say_dense(caller: str, model: nn.Module, names: Sequence[str], reason: str) -> None:
    """Warn that layers stay dense, and of their share of all parameters if that is large."""
    ends = [name.rpartition(".")[0] if reason is _IN_ATTENTION else name for name in names]
    share = _share(model, [p for end in ends for p in model.get_submodule(end).parameters()])
    much = f"; that is {100 * share:.0f} % of all parameters" * (share > _LARGE_SHARE)
    text = "%s leaves %s dense: %s%s"
    say_once(log, logging.WARNING, text, caller, listed(names), reason, much)


def _share(model: nn.Module, params: Iterable[nn.Parameter]) -> float:
    known = {id(param): 0 if is_lazy(param) else param.numel() for param in model.parameters()}
    return sum(known[key] for key in {id(param) for param in params}) / max(1, sum(known.values()))


def check_patterns(config: TTConfig, targets: Iterable[str]) -> None:
    """Raise ``ValueError`` if a pattern matches no target, as it is most likely misspelt."""
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


def matches(name: str, pattern: str | Sequence[str]) -> bool:
    """Return whether a regular expression matches a whole name, or a list has the name's end."""
    if not isinstance(pattern, str):
        return any(name == end or name.endswith(f".{end}") for end in pattern)
    with error_prefix(f"{pattern!r} is not a regular expression: ", re.error):
        return re.fullmatch(pattern, name) is not None


def tied_groups(targets: Mapping[str, nn.Module]) -> list[tuple[list[str], list[nn.Module]]]:
    """Group targets that hold the same weight; return names and modules of each group, in order."""
    groups: dict[int, tuple[list[str], list[nn.Module]]] = {}
    for name, module in targets.items():
        names, modules = groups.setdefault(id(module.weight), ([], []))
        names.append(name)
        modules.append(module)
    return list(groups.values())


def other_holders(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """Return the names of parameters in other modules that are the weight these modules share."""
    weight: object = modules[0].weight
    return [
        f"{name}.{key}".lstrip(".")
        for name, other in model.named_modules()
        if not any(other is module for module in modules)
        for key, param in other._parameters.items()
        if param is weight
    ]
