"""Replace layers of an existing model by tensor-train layers, and back."""

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from comera.extras import error_prefix, listed, say_once
from comera.nn import forms
from comera.nn.embedding import TiedTTLinear, TTEmbedding, TTEmbeddingBag
from comera.nn.linear import FORMATS, CompressedLinear, TTPointwise
from comera.nn.module import TensorTrainModule, check_model, check_unsharded
from comera.nn.swap import (
    call,
    evaluation_mode,
    every_layer_called,
    naming_old_optimizers,
    swap_layers_,
    uncompiled,
)
from comera.nn.table import TTTable
from comera.nn.targets import TTConfig, find_targets, matches, other_holders, say_dense, tied_groups
from comera.params import is_sharded, renew_wrappers_
from comera.planning.planner import Plan, plan_layer

log = logging.getLogger("comera")

_LOSES = (
    "tensorize_: %d of %d layers are slower or larger than dense, %s most: %s; predicted for "
    "TTConfig(tokens=%d)%s; see comera.plan(model)"
)
_ALL_ROWS = (
    "tensorize_ plans each expert of %s with all %d rows of a batch: no module around them or "
    "config of theirs says how many experts a row goes to (%s)"
)
_GUESS = " by a default profile (`comera calibrate --device {}` measures)"
_ON_A_CARD = (
    "on a GPU compressed layers are many small calls: train by comera.TrainStep, which replays a "
    'step as one CUDA graph, or compile the model, by torch.compile(mode="reduce-overhead")'
)

Model = TypeVar("Model", bound=nn.Module)

_WORST_RATIO = 1.1
"""Predicted time or memory, in units of dense's, above which a layer is named."""

_NO_SMALLER = "as a {} it would hold no fewer numbers ({}, or more compression, would)"

_TOKENS = 4096
"""Rows of a training batch by default."""


def tensorize_(
    model: Model,
    config: TTConfig | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    calibration: Iterable[Any] | None = None,
) -> Model:
    """Replace the targeted linear and embedding layers by tensor trains, in place.

    Build the optimizer afterwards: the parameters are new. Cores are random unless ``init="svd"``
    approximates the present weights. The ``comera`` logger names, once in a process,
    layers that stay dense (unsupported, frozen or not smaller) or may be slower or larger than it.
    Registered feed-forward parts are fused, see :mod:`comera.nn.feed_forward_parts`. If experts of
    transformers in one parameter are converted, each gets a layer, such as ``experts.up.0``.

    Args:
        model: Any model; on the ``meta`` device nothing is allocated.
        config: Which layers, and how; ``TTConfig()`` if None.
        filter_fn: Called with each targeted module and its name; returns whether to convert it.
        calibration: With ``init="svd"``, batches on which errors of linear layers' outputs are
            measured and logged. A mapping gives the model's keywords, a tuple or list its
            arguments; anything else is its only argument. :func:`~comera.compress_` makes better
            use of such data.

    Returns:
        The model, or the layer that replaces it.

    Raises:
        ValueError: If no module matches, or a rank or shape does not fit one, which is named; or if
            ``calibration`` is given without ``init="svd"``, is empty, or misses a targeted layer.
            The model is then unchanged.
        TypeError: If ``model`` is no module, or ``config`` no :class:`~comera.TTConfig`.
    """
    check_model(model)
    config = TTConfig() if config is None else config
    if not isinstance(config, TTConfig):
        raise TypeError(f"config={config!r} must be a comera.TTConfig")
    if calibration is not None and config.init != "svd":
        raise ValueError(
            f'calibration says what init="svd" does to outputs; init={config.init!r} draws new '
            "cores"
        )
    with naming_old_optimizers(model), forms.experts_apart(model):
        return _tensorized(model, config, filter_fn, calibration)


def _tensorized(
    model: Model,
    config: TTConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    calibration: Iterable[Any] | None,
) -> Model:
    targets = find_targets(model, config, filter_fn, "tensorize_")
    replacements: dict[int, nn.Module] = {}
    skipped: dict[str, list[str]] = {}
    for names, modules in tied_groups(targets):
        outside = other_holders(model, modules)
        found: dict[int, nn.Module] | str = {}
        if outside and config.tied != "untie":
            found = f'{listed(outside)} holds the same weight and is no target (tied="untie"?)'
        elif len(modules) > 1 and config.tied == "skip":
            found = 'they share a weight (TTConfig(tied="share") or tied="untie" converts them)'
        elif len(modules) > 1 and config.tied == "share":
            found = _convert_tied(names, modules, config)
        else:
            for name, module in zip(names, modules, strict=True):
                new = _convert(name, module, config)
                if isinstance(new, str):
                    skipped.setdefault(new, []).append(name)
                else:
                    replacements[id(module)] = new
        if isinstance(found, str):
            skipped.setdefault(found, []).extend(names)
        else:
            replacements |= found
    for reason, names in skipped.items():
        nothing = "" if replacements else " converts nothing: it"
        say_dense(f"tensorize_{nothing}", model, names, reason)
    name_of = {id(module): name for name, module in targets.items()}
    made = {name_of[key]: new for key, new in replacements.items()}
    lost = [name for name, new in made.items() if _holds_numbers(new)]
    if config.init != "svd":
        _copy_copies_({name: targets[name] for name in lost}, made)
    if config.init is None and lost:
        log.warning(
            "tensorize_ draws new cores for %s; the weights that were there are gone "
            '(init="svd" approximates them instead, init="orthogonal" says that this is meant)',
            listed(lost, most=2),
        )
    elif config.init == "svd":
        _warn_of_approximations(model, targets, made, calibration)
    if dense_now := [name for name, new in made.items() if getattr(new, "dense_sparse", False)]:
        log.warning(
            "tensorize_: %s had sparse gradients (sparse=True); those of cores are dense, and "
            "small: train by AdamW or SGD, not SparseAdam",
            listed(dense_now),
        )
    _name_those_that_lose(model, made, config.tokens or _TOKENS)
    converted = swap_layers_(model, replacements)
    renew_wrappers_(converted.modules())
    if any(new.cores[0].is_cuda for new in made.values() if isinstance(new, TensorTrainModule)):
        say_once(log, logging.WARNING, _ON_A_CARD)
    return cast(Model, converted)  # or the layer in its place


def densify_(model: nn.Module) -> nn.Module:
    """Replace every tensor-train layer by the torch layer with the same weight, in place.

    Build the optimizer afterwards: the parameters are new. Layers that share cores share the dense
    weight, unless their padding rows differ, which are zero in it. Returns the model or the layer
    that replaces it. Raises ``TypeError`` if ``model`` is no module, ``ValueError`` if a tensor
    train is sharded.
    """
    check_unsharded(model, "densify_")
    replacements: dict[int, nn.Module] = {}
    weights: dict[Any, Any] = {}
    for module in model.modules():
        if isinstance(module, (CompressedLinear, TTTable)):
            dense = module.to_dense()
            key = id(module.cores), getattr(module, "padding_idx", None)
            dense.weight = weights.setdefault(key, dense.weight)
            replacements[id(module)] = forms.from_torch(dense, module.dense_form)
    for head in model.modules():
        if isinstance(head, TiedTTLinear):
            table = replacements[id(head.embedding)]
            replacements[id(head)] = head.to_dense(table.weight)  # type: ignore[arg-type]
    with naming_old_optimizers(model):
        model = forms.fuse_experts_(swap_layers_(model, replacements))
    renew_wrappers_(model.modules())
    return model


def plans_of(
    layers: Mapping[str, nn.Module], shares: Mapping[str, float | None], tokens: int, **setting: Any
) -> list[tuple[tuple[str, ...], Plan]]:
    """Plan layers at a batch, those of equal cost once; return their names and plan.

    ``shares`` are the :func:`~comera.nn.forms.expert_shares` of their model.
    """
    alike: dict[tuple[object, int], list[tuple[str, TensorTrainModule]]] = {}
    for name, layer in layers.items():
        if isinstance(layer, TensorTrainModule):
            kind = layer.kind() if isinstance(layer, CompressedLinear) else name
            alike.setdefault((kind, forms.rows_at(tokens, name, shares)), []).append((name, layer))
    found = []
    for (_, rows), members in alike.items():
        names, (layer, *_) = zip(*members, strict=True)
        work: Any = layer.at(rows, together=len(names))
        if work is not None:
            at = layer.planner_setting() | setting
            if at["machine"].kind == "cpu" and forms.are_grouped(names[0], rows, layer, shares):
                work = replace(work, grouped=True)
            found.append((names, plan_layer(work, **at)))
    return found


def _name_those_that_lose(model: nn.Module, made: Mapping[str, nn.Module], tokens: int) -> None:
    shares = forms.expert_shares(model)
    plans = plans_of(made, shares, tokens)
    losing = [(names, plan) for names, plan in plans if plan.worst_ratio > _WORST_RATIO]
    if losing:
        slower = any(max(plan.time_ratio, plan.eager_ratio or 0.0) > 1 for _, plan in losing)
        names, plan = max(losing, key=lambda each: each[1].worst_ratio)
        text = plan.sentence()
        if plan.layer.tokens != tokens:
            text += f" at an expert's {plan.layer.tokens} rows"
        guess = "" if plan.machine.measured else _GUESS.format(plan.machine.kind)
        level = logging.WARNING if slower else logging.INFO
        counts = (sum(len(names) for names, _ in each) for each in (losing, plans))
        say_once(log, level, _LOSES, *counts, names[0] or "it", text, tokens, guess)
    for held, share in shares.items():
        if share is None and any(name.startswith(f"{held}.") for name in made):
            say_once(log, logging.WARNING, _ALL_ROWS, held, tokens, forms.PER_TOKEN[0])


@torch.no_grad()
def _copy_copies_(old: Mapping[str, Any], made: Mapping[str, nn.Module]) -> None:
    """Copy cores between new layers whose old weights were equal, as those of target networks.

    Layers that are told apart by numbers alone are no copies to keep: torch's encoders begin with
    equal ones.
    """
    known: dict[Any, list[str]] = {}
    for name, module in old.items():
        weight = module.weight
        start = weight.detach().flatten()[:8].tolist()
        if len(set(start)) < 2:  # a constant, such as zeros
            continue
        alike = known.setdefault((weight.shape, weight.dtype, *start), [])
        for other in alike:
            pairs = zip(name.split("."), other.split("."), strict=False)
            apart = [a for a, b in pairs if a != b and not (a.isdigit() and b.isdigit())]
            new, first = made[name], made[other]
            sizes = [[p.shape for p in each.parameters()] for each in (new, first)]
            if apart and sizes[0] == sizes[1] and torch.equal(weight, old[other].weight):
                for param, source in zip(new.parameters(), first.parameters(), strict=True):
                    param.copy_(source)
                break
        alike.append(name)


def _holds_numbers(layer: nn.Module) -> bool:
    return not any(param.is_meta for param in layer.parameters())


def _warn_of_approximations(
    model: nn.Module,
    old: Mapping[str, nn.Module],
    made: Mapping[str, nn.Module],
    batches: Iterable[Any] | None,
) -> None:
    """Warn of the errors of approximated weights, and that errors of outputs may be larger."""
    weights: dict[str, Tensor] = {
        name: layer.weight
        for name, new in made.items()
        if isinstance(new, CompressedLinear)
        and isinstance(layer := forms.as_torch(old[name]), nn.Linear)
        and _holds_numbers(new)
    }
    if not weights:
        return
    names = listed(list(weights), most=2)
    if batches is None:
        log.warning(
            "tensorize_ approximates the weights of %s; how far off that makes their outputs it "
            "cannot know without data (calibration=batches): a trained model may lose all it has "
            "learned; comera.compress_ goes by data",
            names,
        )
        return
    errors = _output_errors(
        model, {name: (old[name], weight, made[name]) for name, weight in weights.items()}, batches
    )
    log.warning(
        "tensorize_ approximates the weights of %s: their outputs will be off by %.1f %% (median; "
        "%.1f %% of %s), relative error on the calibration batches; comera.compress_ makes such "
        "errors where they do least harm",
        names, 100 * statistics.median(errors.values()), 100 * max(errors.values()),
        max(errors, key=lambda name: errors[name]),
    )  # fmt: skip


@torch.no_grad()
def _output_errors(
    model: nn.Module, layers: Mapping[str, tuple[Any, Tensor, Any]], batches: Iterable[Any]
) -> dict[str, float]:
    """Run batches in evaluation mode; return the relative Frobenius error of each layer's outputs.

    ``layers`` has by name the present layer, its dense weight and the new layer. Raises
    ``ValueError`` if there is no batch, or if a layer gets no input.
    """
    sums: dict[str, Tensor] = {}

    def watch(name: str, weight: Tensor, new: Any) -> Callable[..., None]:
        exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
        error = new.dense_weight().to(exact.dtype) - exact

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values()))).to(exact.dtype)
            x = x.movedim(getattr(new, "feature_dim", -1), -1)
            squares = [(x @ each.T).double().square().sum() for each in (error, exact)]
            sums[name] = sums.get(name, 0) + torch.stack(squares)

        return before

    count = 0
    with ExitStack() as hooks, evaluation_mode(model), every_layer_called(), uncompiled():
        for name, (old, weight, new) in layers.items():
            hook = watch(name, weight, new)
            hooks.enter_context(old.register_forward_pre_hook(hook, with_kwargs=True))
        for count, batch in enumerate(batches, start=1):  # noqa: B007
            call(model, batch)
    idle = [name for name in layers if name not in sums]
    if not count or idle:
        what = f"reaches no {', '.join(idle[:3])}" if count else "has no batch"
        raise ValueError(f"calibration {what}: the error of outputs cannot be told")
    return {
        name: float((off / whole).sqrt()) if whole > 0 else 0.0
        for name, (off, whole) in sums.items()
    }


def _convert(
    name: str, module: nn.Module, config: TTConfig, feature_dim: int = -1
) -> TensorTrainModule | str:
    """Make the layer that replaces ``module``, or return why it stays dense."""
    form = forms.form_of(module)
    if form is not None:
        made = _convert(name, form.to_torch(module), config, form.feature_dim)
        if not isinstance(made, str):
            made.dense_form = form.name
        return made
    weight: Any = module.weight
    if is_sharded(weight):
        raise ValueError(
            f"tensorize_ needs whole matrices, and {name or 'the weight'} of shape "
            f"{tuple(weight.shape)} is sharded: convert the model first, and shard it then"
        )
    if config.init != "svd" and not (weight.requires_grad or weight.is_meta):
        return 'it is frozen, and new cores would be noise (init="svd" approximates its weight)'
    if not weight.is_floating_point() or weight.itemsize < 2:
        return f"its weight is {weight.dtype}, and cores are real numbers of 16 bits or more"
    if not weight.numel():
        return "its weight is empty"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm scales single rows, and the rows of a tensor train share their cores"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq is not supported"
    if isinstance(module, nn.Linear):
        kind = FORMATS[config.linear_format]
        if feature_dim != -1 and kind.pointwise is None:
            return f'linear_format="{config.linear_format}" is for layers whose features are last'
        least = kind._shapes.fit(module.in_features, module.out_features, rank=1).num_params
        if _first(config.shape_pattern, name) is None and least >= module.weight.numel():
            return f"as a {kind.noun} it would hold no fewer numbers at any rank"
    with error_prefix(f"{name or 'the model'}: "):
        new = _build(name, module, config, feature_dim)
    if new.num_stored >= new.num_dense:
        if not isinstance(new, CompressedLinear) or new.shape.orders:
            return _NO_SMALLER.format("tensor train", "a lower rank")
        most = (new.num_dense - 1) // new.shape.with_rank(1).num_params  # all bonds are one rank
        return _NO_SMALLER.format(new.noun, f"rank={most}")
    return new


def _first(patterns: Mapping[str, Any], name: str) -> Any:
    return next((value for key, value in patterns.items() if matches(name, key)), None)


def _build(name: str, module: Any, config: TTConfig, feature_dim: int) -> TensorTrainModule:
    is_linear, linear = isinstance(module, nn.Linear), FORMATS[config.linear_format]
    own_rank = _first(config.rank_pattern, name) or (None if is_linear else config.embedding_rank)
    settings: dict[str, Any] = {
        "rank": own_rank or config.rank,
        "shape": _first(config.shape_pattern, name),
        "compression": None if own_rank else config.compression,
        "prune_below": config.prune_below,
    }
    kind: Any
    if is_linear:
        kind = linear if feature_dim == -1 else linear.pointwise
        settings |= {"order": config.order} if linear._shapes.orders else {}
    else:
        kind = TTEmbedding if isinstance(module, nn.Embedding) else TTEmbeddingBag
        rank = config.rank if isinstance(config.rank, int) and linear._shapes.orders else None
        hot = _first(config.hot_pattern, name) or (config.hot_rows, config.hot_rank)
        settings["rank"] = own_rank or rank
        settings |= {"order": config.embedding_order, "hot_rows": hot[0], "hot_rank": hot[1]}
    weight, init = module.weight, config.init or "orthogonal"
    if init == "svd" and not weight.is_meta:
        settings["tolerance"] = None if own_rank else config.tolerance
        new = (kind.from_linear if is_linear else kind.from_embedding)(module, **settings)
    else:
        settings |= {"device": weight.device, "dtype": weight.dtype}
        if is_linear:
            sizes = module.in_features, module.out_features
            settings["bias"] = module.bias is not None
        else:
            sizes = module.num_embeddings, module.embedding_dim
            own = ("padding_idx", *kind._own_settings)
            settings |= {key: getattr(module, key) for key in own}
            settings["scatter_rows"] = config.scatter_rows if init != "svd" else False
        new = kind(*sizes, **settings)
        if not weight.is_meta:
            with torch.no_grad():  # the scale that the model's own initialisation gave the weight
                new.reset_parameters(float(weight.float().square().mean().sqrt()), init)
                if is_linear and module.bias is not None:
                    new.bias.copy_(module.bias)
        new.freeze_like_(module)
        new.train(module.training)
    if isinstance(new, TTPointwise):
        new.feature_dim = feature_dim
    return new


def _convert_tied(
    names: list[str], modules: list[nn.Module], config: TTConfig
) -> dict[int, nn.Module] | str:
    tables = [k for k, module in enumerate(modules) if not isinstance(module, nn.Linear)]
    first = tables[0] if tables else 0
    lead = _convert(names[first], modules[first], config)
    if isinstance(lead, str):
        return lead
    made: dict[int, nn.Module] = {id(modules[first]): lead}
    for k, module in enumerate(modules):
        if k == first:
            continue
        if isinstance(module, nn.Linear) and isinstance(lead, TTTable):
            made[id(module)] = TiedTTLinear(lead, module.bias).train(module.training)
        else:
            twin = _convert(names[first], module, config)
            if isinstance(twin, str):
                return twin
            twin.share_parameters_(lead)
            made[id(module)] = twin
    return made
