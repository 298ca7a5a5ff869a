"""A trained model measured at many sizes, on copies of it."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from comera.compress.compress import check_unused, compress_
from comera.compress.layer_moments import LossFn, linear_targets
from comera.compress.sensitivity import Sensitivity, look_at
from comera.nn.convert import tensorize_
from comera.nn.module import check_model
from comera.nn.targets import TTConfig, find_targets
from comera.report.exploration import WHOLE, Exploration, Explorer, Make

log = logging.getLogger("comera")

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the parameters that are tried where nothing is said."""


def explore(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    calibration: Iterable[Any] | Sensitivity | None = None,
    *,
    budgets: Sequence[float | str] | None = None,
    configs: Sequence[TTConfig] | None = None,
    each_layer: bool = False,
    loss_fn: LossFn | None = None,
    target_modules: str | list[str] = "all-linear",
    exclude_modules: str | list[str] | None = None,
    tokens: int = 4096,
    keep: str | Path | None = None,
    progress: bool = False,
) -> Exploration:
    """Measure a trained model at many sizes, each on a copy of it; the model is not changed.

    With calibration data each budget is spent as :func:`~comera.compress_` does, the data read
    once. Each configuration converts the model as :func:`~comera.tensorize_` does, with
    ``init="svd"``, tables included unless its ``target_modules`` says otherwise. Ctrl-C ends it
    early and what was measured is returned. What fails at one point, as a budget that is out of
    reach, is noted there, and the others go on.

    Args:
        model: Any trained model.
        evaluate: Takes a model and returns its loss on data of your choice, in the mode that it
            puts the model into; lower is better. It is called once a point, without gradients.
        calibration: Batches as :func:`~comera.compress_` takes them, or what
            :func:`~comera.sensitivity` found; ``loss_fn`` and the layers were then said to it.
        budgets: For :func:`~comera.compress_`: shares of parameters, or bytes with a unit. Seven
            from 0.9 to 0.3 if None and there is calibration data.
        configs: For :func:`~comera.tensorize_`. If None and there is no calibration data, orders 1
            to 3 at 2, 4 and 8 times fewer parameters a layer. An ``init`` of None is ``"svd"``
            here; say it, so that :func:`~comera.tensorize_` makes the same of the one you choose.
        each_layer: Also make each targeted layer smaller alone; budgets, shares then, are of that
            layer. A model of many layers then has many points.
        loss_fn: As :func:`~comera.compress_` has it.
        target_modules: The same, and of the configurations where ``configs`` is None.
        exclude_modules: Likewise.
        tokens: Rows of the batch that times are predicted for.
        keep: A JSON file for the points, written after each. A call that finds it measures only
            those that are missing or failed. Calibration is not in it: for that, give what
            ``sensitivity(..., keep=...)`` found.
        progress: Whether to show a bar.

    Returns:
        A point for each setting, with table, Pareto front and plot.

    Raises:
        ValueError: If there is nothing to try, a setting is wrong, ``evaluate`` gives no finite
            number for the dense model, or what is kept is of another model or of other ``tokens``.
        TypeError: If an argument is of the wrong kind.

    Example::

        explored = comera.explore(model, evaluate, loader, loss_fn=loss_fn)
        explored.pareto().to_pandas()
        explored.plot()
    """
    check_model(model)
    if not callable(evaluate):
        raise TypeError(
            f"evaluate={evaluate!r} must be a function of the model that gives its loss"
        )
    _check(calibration, budgets, configs, loss_fn, tokens)
    if isinstance(calibration, Sensitivity):
        check_unused(loss_fn, target_modules, exclude_modules)
    if budgets is None and calibration is not None:
        budgets = BUDGETS
    if configs is None:
        configs = [] if calibration is not None else _grid(target_modules, exclude_modules)
    if not budgets and not configs:
        raise ValueError("neither budgets nor configs: there is nothing to try")
    store = Explorer(keep, model, tokens)
    dense = store.dense(evaluate)
    points = [dense]
    planned = 1
    try:
        found = None
        if budgets:
            found = _look(model, calibration, loss_fn, target_modules, exclude_modules, progress)
        if isinstance(calibration, Sensitivity):
            target_modules = _targets_of(model, calibration)
        which = _settings(TTConfig(target_modules=target_modules, exclude_modules=exclude_modules))
        tries = _tries(model, found, budgets or (), which, configs, each_layer)
        planned += len(tries)
        for setting, layer, make in _shown(tries, progress):
            points.append(store.point(setting, layer, make, evaluate, dense))
    except KeyboardInterrupt:
        log.warning("explore: broken off; %d points are measured", len(points))
    return Exploration(tuple(points), planned)


def _check(
    calibration: object,
    budgets: Sequence[float | str] | None,
    configs: Sequence[TTConfig] | None,
    loss_fn: object,
    tokens: int,
) -> None:
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    if isinstance(budgets, str | Real):
        raise TypeError(f"budgets={budgets!r} must be a list of such, as [{budgets!r}]")
    if calibration is None and (budgets or loss_fn is not None):
        what = f"budgets={budgets!r}" if budgets else f"loss_fn={loss_fn!r}"
        raise ValueError(f"{what} needs calibration: batches, or what sensitivity found")
    for config in configs or ():
        if not isinstance(config, TTConfig):
            raise TypeError(f"configs holds {config!r}, which is no comera.TTConfig")
        if config.init not in (None, "svd"):
            raise ValueError(
                f'init={config.init!r} draws new weights in the place of trained ones: "svd" '
                "approximates them"
            )


def _grid(targets: str | list[str], exclude: str | list[str] | None) -> list[TTConfig]:
    return [
        TTConfig(compression=compression, order=order, target_modules=targets,
                 exclude_modules=exclude)
        for order in (1, 2, 3)
        for compression in (2, 4, 8)
    ]  # fmt: skip


def _look(
    model: nn.Module,
    calibration: Any,
    loss_fn: LossFn | None,
    targets: str | list[str],
    exclude: str | list[str] | None,
    progress: bool,
) -> Sensitivity:
    """Read the calibration data, unless that was done before."""
    if isinstance(calibration, Sensitivity):
        return calibration
    layers = linear_targets(model, targets, exclude, "explore")
    return look_at(model, layers, calibration, loss_fn, progress=progress)


def _targets_of(model: nn.Module, found: Sensitivity) -> str | list[str]:
    """Return the ``target_modules`` by which ``sensitivity`` has found its layers."""
    names = [layer.name for layer in found.layers]
    for targets in ("all-linear", "all"):
        with suppress(ValueError):  # there are none of this kind
            if set(linear_targets(model, targets, None, None)) == set(names):
                return targets
    return names


def _tries(
    model: nn.Module,
    found: Sensitivity | None,
    budgets: Sequence[float | str],
    which: str,
    configs: Sequence[TTConfig],
    each_layer: bool,
) -> list[tuple[str, str, Make]]:
    """List what is to be made: the setting in words, the layer, and what makes it.

    ``which`` says of budgets which layers they are for, where these are not all.
    """
    tries: list[tuple[str, str, Make]] = []
    if found is not None:
        tries += [
            (f"budget={budget!r}{which}", WHOLE, _by_data(found, budget)) for budget in budgets
        ]
    tries += [(_in_words(config), WHOLE, _converted(config)) for config in configs]
    if not each_layer:
        return tries
    for budget in budgets:
        if found is None or isinstance(budget, str):  # bytes of all parameters
            continue
        for layer in found.layers:
            alone = dataclasses.replace(found, layers=(layer,))
            share = 1 - (1 - budget) * layer.params(None) / found.model_params
            tries.append((f"budget={budget!r}{which}", layer.name, _by_data(alone, share)))
    for config in configs:
        for name in find_targets(model, config, None, None):
            one = dataclasses.replace(config, target_modules=re.escape(name))
            tries.append((_in_words(config), name, _converted(one)))
    return tries


def _by_data(found: Sensitivity, budget: float | str) -> Make:
    def make(model: nn.Module) -> float:
        return sum(layer.loss for layer in compress_(model, found, budget=budget).layers)

    return make


def _converted(config: TTConfig) -> Make:
    def make(model: nn.Module) -> None:
        if tensorize_(model, dataclasses.replace(config, init="svd")) is not model:
            raise ValueError("the model is itself the layer: put it into a module to replace it")

    return make


def _in_words(config: TTConfig) -> str:
    """Write the settings that are not as usual, by which a point is found again."""
    if config.linear_format == "btt":  # which has no order
        return _settings(config).removeprefix(", ")
    return f"order={config.order}{_settings(dataclasses.replace(config, order=3))}"


def _settings(config: TTConfig) -> str:
    usual = TTConfig(target_modules="all-linear")
    return "".join(
        f", {field.name}={value!r}"
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != getattr(usual, field.name)
        if field.name not in ("init", "tokens")
    )


def _shown(
    tries: Sequence[tuple[str, str, Make]], progress: bool
) -> Iterable[tuple[str, str, Make]]:
    """Pass settings on, with a bar if one is wanted."""
    if not progress:
        return tries
    from rich.progress import track  # not needed without a bar

    return track(tries, "exploring")
