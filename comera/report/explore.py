"""Measure a trained model at many sizes, on copies of it; show a table, Pareto front and plot."""

import copy
import dataclasses
import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from comera.compress.compress import check_unused, compress_, measured
from comera.compress.layer_moments import LossFn, linear_targets
from comera.compress.sensitivity import Sensitivity, look_at
from comera.extras import listed
from comera.files import write_text
from comera.nn.convert import tensorize_
from comera.nn.forms import as_torch, experts_apart
from comera.nn.linear import FORMATS, CompressedLinear
from comera.nn.module import check_model, tensor_trains
from comera.nn.table import TTTable
from comera.nn.targets import TTConfig, find_targets
from comera.params import checksum, model_size
from comera.planning import printing
from comera.planning.printing import with_bar
from comera.report.model_plan import plan
from comera.report.pictures import Dot, Panel, draw
from comera.shapes import check_whole_numbers

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("comera")

_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)

Evaluate = Callable[[nn.Module], float]
Make = Callable[[nn.Module], float | None]
"""Makes a model smaller, and returns the predicted rise of the loss, if any."""

WHOLE = "whole model"
"""The layer of a point at which all targeted layers are made smaller."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A model at one setting; attributes that are not known are None.

    Attributes:
        setting: ``budget=0.8``, ``order=1, compression=4``, or ``dense``.
        layer: The only layer that was made smaller, as in ``named_modules``, or ``whole model``.
        order: Modes that each side of a weight is split into, if that is the same in all layers.
        ranks: Ranks of the layers if all have the same; else the smallest and the largest of all,
            or one number if these are equal.
        ratio: How many times fewer parameters the whole model has than the dense one.
        params: Parameters of the whole model.
        bytes: Bytes of these parameters.
        error: Relative Frobenius error of all replaced weights together: 0 is exact, 1 as far off
            as zeros. It does not depend on data.
        predicted_loss: Rise of the loss that the calibration data predict, to second order.
        loss: The result of ``evaluate``.
        predicted_seconds: Time of the replaced layers, forward and backward, by ``comera.plan``.
        predicted_ratio: This time divided by that of the dense layers.
        tokens: Rows of the batch for which these are predicted; an expert gets its share.
        measured_seconds: Time of the call of ``evaluate``.
        note: Why there is no loss; or what was logged while the model was made smaller.
    """

    setting: str
    layer: str = WHOLE
    order: int | None = None
    ranks: str = ""
    ratio: float | None = None
    params: int | None = None
    bytes: int | None = None
    error: float | None = None
    predicted_loss: float | None = None
    loss: float | None = None
    predicted_seconds: float | None = None
    predicted_ratio: float | None = None
    tokens: int | None = None
    measured_seconds: float | None = None
    note: str = ""

    @property
    def kind(self) -> str:
        """Kind of point in the plot: dense, by budget, tensor trains of an order, or blocks."""
        if self.setting == "dense":
            return "dense"
        first, _, number = self.setting.partition(",")[0].partition("=")
        how = {"budget": "budget", "order": f"order {number}"}.get(first, "blocks")
        return how if self.layer == WHOLE else f"{how}, one layer"


@dataclasses.dataclass(frozen=True, repr=False)
class Exploration(printing.Report):
    """Result of :func:`comera.explore`; prints itself, also in Jupyter.

    The table fits the terminal and names hidden columns; :meth:`to_pandas` has them all.

    The dense model is first of the ``points``. After Ctrl-C they are fewer than were ``planned``.
    """

    points: tuple[Point, ...]
    planned: int

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each :class:`Point`. Needs pandas."""
        return printing.data_frame(map(vars, self.points))

    def pareto(self) -> "Exploration":
        """Return the Pareto front by parameters and loss; of equal points only the first."""
        best: list[Point] = []
        for point in sorted(self._measured, key=lambda point: (point.params, point.loss)):
            if not best or _loss(point) < _loss(best[-1]):
                best.append(point)
        return dataclasses.replace(
            self, points=tuple(point for point in self.points if point in best)
        )

    def plot(self, library: Literal["matplotlib", "plotly"] = "matplotlib") -> Any:
        """Draw losses over sizes, and a line through the points of :meth:`pareto`.

        Args:
            library: ``"matplotlib"`` draws a still picture, with names of settings where there
                is room; ``"plotly"`` one to zoom into, with a point's setting under the pointer.

        Returns:
            A figure of that library.

        Raises:
            ValueError: If ``library`` is neither of the two, or no point has a loss.
            MissingPackageError: If the library is not installed.
        """
        if not self._measured:
            raise ValueError(f"none of {len(self.points)} points has a loss: nothing can be drawn")
        best = sorted(self.pareto().points, key=lambda point: point.params or 0)
        named = [each for each in self._measured if each.layer == WHOLE or each in best]
        dots: dict[str, list[Dot]] = {}
        for point in self._measured:
            hover = [f"<b>{point.setting}</b>", point.layer, f"loss {point.loss:.5g}"]
            hover.append(f"{point.params:,} parameters, {point.ratio:.2f}x smaller")
            hover += [f"ranks {point.ranks}"] * bool(point.ranks)
            if point.error is not None:
                hover.append(f"error of the weights {point.error:.3f}")
            name = re.sub(r"^(order=\d+, |budget=)", "", point.setting)
            name += "" if point.layer == WHOLE else f", {point.layer}"
            name = name if point in named and point.setting != "dense" else ""
            dot = Dot(point.params or 0, _loss(point), name, tuple(hover))
            dots.setdefault(point.kind, []).append(dot)
        line = [(point.params or 0, _loss(point)) for point in best]
        label = "parameters of the whole model"
        return draw([Panel(label, "loss", dots, {"Pareto front": line})], library)

    def tables(self) -> list[printing.Table]:
        """Return a table with a row for each point; points of :meth:`pareto` have a star."""
        best = self.pareto().points
        shown = printing.show_column([point.loss for point in self.points], 4)
        losses = dict(zip(self.points, shown, strict=True))
        columns: dict[str, Callable[[Point], str]] = {
            "setting": lambda each: ("* " if each in best else "") + each.setting,
            "layer": lambda each: each.layer,
            "order": lambda each: _text(each.order, "{}".format),
            "ranks": lambda each: each.ranks,
            "smaller": lambda each: _text(each.ratio, "{:.2f}x".format),
            "parameters": lambda each: _text(each.params, "{:,}".format),
            "bytes": lambda each: _text(each.bytes, printing.show_bytes),
            "error": lambda each: _text(each.error, "{:.3f}".format),
            "loss": lambda each: losses[each] or "failed",
            "predicted time / dense": lambda each: _text(each.predicted_ratio, "{:.2f}x".format),
            "evaluate took": lambda each: _text(each.measured_seconds, printing.show_seconds),
        }
        spare = ["evaluate took", "bytes", "order", "parameters", "predicted time / dense"]
        if all(point.layer == WHOLE for point in self.points):
            spare.insert(0, "layer")
        batches = sorted({point.tokens for point in self.points if point.tokens})
        at = f", times at {listed(list(map(str, batches)))} rows a batch" * bool(batches)
        how: Any = {"left": (0, 1, 3), "names": 1, "spare": spare}
        return [printing.table_of(f"explored{at}", columns, self.points, **how)]

    def summary(self) -> str:
        """Return lines that count the points and say why points failed."""
        failed = [point for point in self.points if point.loss is None]
        text = (
            f"{len(self._measured)} of {self.planned} points have a loss"
            f"{f', {len(failed)} failed' if failed else ''}; * no other is as small and as good"
        )
        dense = next((point for point in self._measured if point.setting == "dense"), None)
        if dense is not None:
            bound = _loss(dense) + 0.01 * abs(_loss(dense))
            near = [point for point in self._measured if point.params and _loss(point) <= bound]
            least = min(near, key=lambda point: point.params or 0, default=dense)
            if least != dense:
                text += (
                    f"\nsmallest within a hundredth of the dense loss ({dense.loss:.4g}): "
                    f"{least.setting}, {least.layer}, {least.ratio:.2f}x smaller, {least.loss:.4g}"
                )
        for point in failed:
            where = "" if point.layer == WHOLE else f", {point.layer}"
            text += f"\nfailed: {point.setting}{where}: {point.note}"
        return text

    @property
    def _measured(self) -> list[Point]:
        return [point for point in self.points if point.loss is not None]


def _loss(point: Point) -> float:
    assert point.loss is not None, "only points with a loss are compared"
    return point.loss


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def explore(
    model: nn.Module,
    evaluate: Evaluate,
    calibration: Iterable[Any] | Sensitivity | None = None,
    *,
    budgets: Sequence[float | str] | None = None,
    configs: Sequence[TTConfig] | None = None,
    each_layer: bool = False,
    loss_fn: LossFn | None = None,
    target_modules: str | list[str] = "all-linear",
    exclude_modules: str | list[str] | None = None,
    tokens: int | None = None,
    keep: str | Path | None = None,
    progress: bool = False,
) -> Exploration:
    """Measure a trained model at many sizes, each on a copy of it; the model is not changed.

    For each budget :func:`~comera.compress_` makes a copy smaller; the calibration data are read
    once. For each configuration a copy is made smaller by :func:`~comera.tensorize_` with
    ``init="svd"``, tables included unless ``target_modules`` excludes them. Ctrl-C returns the
    points measured so far. An error at a point, such as a budget out of reach, becomes its note.

    Args:
        model: Any trained model.
        evaluate: Function that puts a model into a mode of your choice and returns its loss on data
            of your choice; lower is better. It is called once for each point, without gradients.
        calibration: Batches as for :func:`~comera.compress_`, or the result of
            :func:`~comera.sensitivity`, to which ``loss_fn`` and the layers were then given.
        budgets: For :func:`~comera.compress_`: shares of parameters, or bytes with a unit. If None
            and there is calibration data, seven shares from 0.9 to 0.3.
        configs: For :func:`~comera.tensorize_`. If None and there is no calibration data, orders 1
            to 3 at 2, 4 and 8 times fewer parameters a layer. ``init`` is ``"svd"`` even if None;
            give it to :func:`~comera.tensorize_` to make the same model.
        each_layer: Whether to make each targeted layer smaller alone, too; a budget is then a share
            of that layer. A model of many layers gets many points.
        loss_fn: As for :func:`~comera.compress_`.
        target_modules: As for :func:`~comera.compress_`; also used if ``configs`` is None.
        exclude_modules: Layers to leave out, given like ``target_modules``.
        tokens: Rows of the batch for which times are predicted; if None those of a batch of
            calibration, or 4096 without any.
        keep: A JSON file for the points, written after each. If it exists, only points that are
            missing or failed are measured; give another ``evaluate`` or other data another file.
            To keep the calibration, which is not in it, give ``sensitivity(..., keep=...)``.
        progress: Whether to show a progress bar.

    Returns:
        A point for each setting, with table, Pareto front and plot.

    Raises:
        ValueError: If there is nothing to try, a setting is wrong, ``evaluate`` gives no finite
            number for the dense model, or the file belongs to another model or other ``tokens``.
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
    if tokens is not None:
        check_whole_numbers(1, tokens=tokens)
    if isinstance(budgets, str | Real):
        raise TypeError(f"budgets={budgets!r} must be a list of such, as [{budgets!r}]")
    if budgets is None:
        budgets = () if calibration is None else _BUDGETS
    budgets = [budget if isinstance(budget, str) else float(budget) for budget in budgets]
    configs = None if configs is None else list(configs)
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
    if isinstance(calibration, Sensitivity):
        check_unused(loss_fn, target_modules, exclude_modules)
    if configs is None:
        targets: Any = {"target_modules": target_modules, "exclude_modules": exclude_modules}
        configs = [
            TTConfig(compression=compression, order=order, **targets)
            for order in (1, 2, 3)
            for compression in (2, 4, 8)
            if calibration is None
        ]
    if not budgets and not configs:
        raise ValueError("neither budgets nor configs: there is nothing to try")
    kept = _Kept(keep, model, tokens)
    dense = kept.known("dense", WHOLE)
    if dense is None:
        small = copy.deepcopy(model)  # evaluate may put it into another mode
        params, size = model_size(small)
        dense = Point("dense", ratio=1.0, params=params, bytes=size)
        dense = kept.add(dataclasses.replace(dense, **_evaluated(evaluate, small)))
    points, planned = [dense], 1
    try:
        found: Any = None
        with experts_apart(model):
            if isinstance(calibration, Sensitivity):
                found = calibration
                target_modules = _targets_of(model, found)
            elif budgets and calibration is not None:
                layers = linear_targets(model, target_modules, exclude_modules, "explore")
                found = look_at(model, layers, calibration, loss_fn, progress=progress)
            targets = {"target_modules": target_modules, "exclude_modules": exclude_modules}
            which = _settings(TTConfig(**targets))
            tries = _tries(model, found, budgets, which, configs, each_layer)
        rows = tokens or (found.batch_rows if found else None) or 4096
        planned += len(tries)
        for setting, layer, make in with_bar(tries, "exploring", progress, len(tries)):
            point = kept.known(setting, layer)
            if point is None:
                point = kept.add(_measure(model, Point(setting, layer), make, evaluate, rows))
            points.append(point)
    except KeyboardInterrupt:
        log.warning("explore: broken off; %d points are measured", len(points))
    return Exploration(tuple(points), planned)


class _Kept:
    """The points measured so far, also written to the file ``keep`` if given."""

    def __init__(self, keep: str | Path | None, model: nn.Module, tokens: int | None) -> None:
        self.path = None if keep is None else Path(keep).expanduser()
        digest = 0
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            digest = checksum(tensor, zlib.crc32(name.encode(), digest))
        self.about = {"comera_exploration": 1, "weights": digest, "tokens": tokens}
        self.points: dict[tuple[str, str], Point] = {}
        if self.path is None or not self.path.exists():
            return
        try:
            there = json.loads(self.path.read_text())
            about = {key: there[key] for key in self.about}
            points = [Point(**point) for point in there["points"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"keep={str(keep)!r} is no file of explore: remove it, or name another"
            ) from None
        if about["weights"] != digest:
            what = "another model or other weights"
        elif tokens not in (None, about["tokens"]):
            what = f"tokens={about['tokens']}, not {tokens}"
        else:
            self.points = {(point.setting, point.layer): point for point in points}
            return
        raise ValueError(f"keep={str(keep)!r} is of {what}: remove it, or name another file")

    def known(self, setting: str, layer: str) -> Point | None:
        point = self.points.get((setting, layer))
        return None if point is None or point.loss is None else point

    def add(self, point: Point) -> Point:
        self.points[point.setting, point.layer] = point
        if self.path is not None:
            points = [dataclasses.asdict(point) for point in self.points.values()]
            write_text(self.path, json.dumps({**self.about, "points": points}, indent=1))
        return point


def _measure(model: nn.Module, point: Point, make: Make, evaluate: Evaluate, tokens: int) -> Point:
    """Measure one point on a copy of the model; an error or logged messages become its note."""
    small = copy.deepcopy(model)
    notes: list[str] = []

    def gather(record: logging.LogRecord) -> bool:
        notes.append(record.getMessage())
        return False

    log.addFilter(gather)
    try:
        predicted = make(small)
        point = dataclasses.replace(point, predicted_loss=predicted, **_facts(model, small, tokens))
        point = dataclasses.replace(point, **_evaluated(evaluate, small))
    except Exception as problem:  # of whatever kind: the others are still worth measuring
        return dataclasses.replace(point, note=f"{type(problem).__name__}: {problem}")
    finally:
        log.removeFilter(gather)
    return dataclasses.replace(point, note="; ".join(dict.fromkeys(notes)))


def _evaluated(evaluate: Evaluate, model: nn.Module) -> dict[str, Any]:
    begun = time.perf_counter()
    loss = measured(evaluate, model)
    return {"loss": loss, "measured_seconds": time.perf_counter() - begun}


def _facts(model: nn.Module, small: nn.Module, tokens: int) -> dict[str, Any]:
    params, size = model_size(small)
    ratio = model_size(model).params / params
    facts: dict[str, Any] = {"params": params, "bytes": size, "ratio": ratio}
    layers = {
        name: layer
        for name, layer in tensor_trains(small).items()
        if isinstance(layer, CompressedLinear | TTTable)
    }
    if not layers:
        return facts
    orders = {
        (len(layer.shape.in_modes) if layer.shape.orders else None)
        if isinstance(layer, CompressedLinear) else len(layer.cores)
        for layer in layers.values()
    }  # fmt: skip
    ranks = [layer.ranks for layer in layers.values()]
    bonds = sorted({bond for each in ranks for bond in each})
    between = str(bonds[0]) if len(bonds) == 1 else f"{bonds[0]} to {bonds[-1]}"
    planned: Any = plan(small, tokens=tokens)  # of a layer inside a model
    return facts | {
        "order": orders.pop() if len(orders) == 1 else None,
        "ranks": " ".join(map(str, ranks[0])) if len(set(ranks)) == 1 else between,
        "error": _error(model, layers),
        "tokens": tokens,
        "predicted_seconds": planned.seconds,
        "predicted_ratio": planned.seconds / planned.dense_seconds,
    }


@torch.no_grad()
def _error(model: nn.Module, layers: Mapping[str, CompressedLinear | TTTable]) -> float | None:
    """Return the relative error of replaced weights, without experts that share a parameter."""
    off = whole = 0.0
    for name, layer in layers.items():
        try:
            old = as_torch(model.get_submodule(name)).weight
        except AttributeError:  # an expert, which is no layer in the dense model
            continue
        off += float((layer.to_dense().weight - old).double().square().sum())
        whole += float(old.double().square().sum())
    return (off / whole) ** 0.5 if whole else None


def _targets_of(model: nn.Module, found: Sensitivity) -> str | list[str]:
    names = [layer.name for layer in found.layers]
    for targets in ("all-linear", "all"):
        with suppress(ValueError):  # there are none of this kind
            if set(linear_targets(model, targets, None, None)) == set(names):
                return targets
    return names


def _tries(
    model: nn.Module,
    found: Any,
    budgets: Sequence[float | str],
    which: str,
    configs: Sequence[TTConfig],
    each_layer: bool,
) -> list[tuple[str, str, Make]]:
    """List the points to measure: setting in words, layer, and function that changes a copy.

    ``found`` is a :class:`Sensitivity` if there are budgets. ``which`` is a text to add to them if
    they are not for all layers.
    """
    tries: list[tuple[str, str, Make]] = [
        (f"budget={budget!r}{which}", WHOLE, partial(_by_data, found, budget)) for budget in budgets
    ]
    tries += [(_in_words(config), WHOLE, partial(_converted, config)) for config in configs]
    if not each_layer:
        return tries
    for budget in (share for share in budgets if isinstance(share, float)):  # others are of all
        for layer in found.layers:
            alone = dataclasses.replace(found, layers=(layer,), model_params=layer.params(None))
            make = partial(_by_data, alone, budget)
            tries.append((f"budget={budget!r}{which}", layer.name, make))
    for config in configs:
        for name in find_targets(model, config, None, None):
            one = dataclasses.replace(config, target_modules=re.escape(name))
            tries.append((_in_words(config), name, partial(_converted, one)))
    return tries


def _by_data(found: Sensitivity, budget: float | str, model: nn.Module) -> float:
    return sum(layer.loss for layer in compress_(model, found, budget=budget).layers)


def _converted(config: TTConfig, model: nn.Module) -> None:
    if tensorize_(model, dataclasses.replace(config, init="svd")) is not model:
        raise ValueError("the model is itself the layer: put it into a module to replace it")


def _in_words(config: TTConfig) -> str:
    if not FORMATS[config.linear_format]._shapes.orders:
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
