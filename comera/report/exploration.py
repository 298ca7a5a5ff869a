"""A model measured at many sizes: the points, their table, Pareto front and plot.

:class:`Explorer` measures each point on a copy of the model and saves it in a file.
"""

import copy
import dataclasses
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from comera.compress.compress import measured
from comera.extras import needed_by
from comera.files import replacing
from comera.nn.forms import as_torch
from comera.nn.linear import CompressedLinear, TTLinear
from comera.nn.module import tensor_trains
from comera.nn.table import TTTable
from comera.params import model_size
from comera.planning.printing import (
    Report,
    Table,
    data_frame,
    empty_figure,
    show_bytes,
    show_seconds,
)
from comera.report.model_plan import ModelPlan, plan

if TYPE_CHECKING:
    import pandas as pd


WHOLE = "whole model"
"""The layer of a point at which all targeted layers are made smaller."""

_HEADER = (
    "setting", "layer", "order", "ranks", "smaller", "parameters", "bytes", "error", "loss",
    "predicted time / dense", "evaluate took",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A model at one setting; None where something is not known.

    Attributes:
        setting: What was done to it: ``budget=0.8``, ``order=1, compression=4``, or ``dense``.
        layer: The only layer it was done to, as in ``named_modules``, or ``whole model``.
        order: Modes that each side of a weight is split into.
        ranks: Bonds of the layers, where they all have the same; else the smallest and the largest
            of all, or one number where these are equal.
        ratio: How many times fewer parameters the whole model has than the dense one.
        params: Parameters of the whole model.
        bytes: Their bytes.
        error: Relative Frobenius error of the weights that were replaced, all together: 0 is exact,
            1 as far off as zeros. It knows nothing of the data.
        predicted_loss: By how much the calibration data say that the loss rises, to second order.
        loss: What ``evaluate`` gave.
        predicted_seconds: Of the replaced layers, forward and backward, as ``comera.plan`` has it.
        predicted_ratio: The same in units of the dense layers'.
        measured_seconds: What the call of ``evaluate`` took, by the clock.
        note: Why there is no loss; or what was said while the model was made smaller.
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
    measured_seconds: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Exploration(Report):
    """Result of :func:`comera.explore`; prints itself, also in Jupyter.

    The table is as wide as the terminal at most, and names the columns for which there is no room;
    :meth:`to_pandas` has them all.

    Attributes:
        points: One for each setting, the dense model first.
        planned: How many there would be if nothing had broken it off.
    """

    points: tuple[Point, ...]
    planned: int

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row a point, columns as in :class:`Point`. Needs pandas."""
        return data_frame(self.points)

    def pareto(self) -> "Exploration":
        """Return the points to which no other is equal or better in both size and loss.

        Sizes are parameters of the whole model. Of points that are alike the first is kept.
        """
        best: list[Point] = []
        for point in sorted(self._measured, key=lambda point: (point.params, point.loss)):
            if not best or _loss(point) < _loss(best[-1]):
                best.append(point)
        return replace(self, points=tuple(point for point in self.points if point in best))

    def plot(self, library: Literal["plotly", "matplotlib"] | None = None) -> Any:
        """Draw losses over sizes, and the line of :meth:`pareto` through the best of them.

        Args:
            library: ``"plotly"`` draws a picture that shows a point's setting under the pointer and
                can be zoomed, ``"matplotlib"`` a still one. If None, plotly where it is installed.

        Returns:
            A figure of that library.

        Raises:
            ValueError: If ``library`` is another one, or no point has a loss.
            MissingPackageError: If the library is not installed.
        """
        if library not in (None, "plotly", "matplotlib"):
            raise ValueError(f"library={library!r} must be 'plotly', 'matplotlib' or None")
        if not self._measured:
            raise ValueError(f"none of {len(self.points)} points has a loss: nothing can be drawn")
        if library is None:
            library = "plotly" if _has_plotly() else "matplotlib"
        best = sorted(self.pareto().points, key=lambda point: point.params or 0)
        draw = self._in_plotly if library == "plotly" else self._in_matplotlib
        return draw([(kind, self._of_kind(kind)) for kind in self._kinds], best)

    def tables(self) -> list[Table]:
        """Return one row a point; points of :meth:`pareto` have a star."""
        best = self.pareto().points
        rows = [
            (
                ("* " if point in best else "") + point.setting,
                point.layer,
                "" if point.order is None else str(point.order),
                point.ranks,
                _text(point.ratio, "{:.2f}x"),
                _text(point.params, "{:,}"),
                "" if point.bytes is None else show_bytes(point.bytes),
                _text(point.error, "{:.3f}"),
                "failed" if point.loss is None else f"{point.loss:.4g}",
                _text(point.predicted_ratio, "{:.2f}x"),
                "" if point.measured_seconds is None else show_seconds(point.measured_seconds),
            )
            for point in self.points
        ]
        spare = ["evaluate took", "bytes", "order", "parameters", "predicted time / dense"]
        if all(point.layer == WHOLE for point in self.points):
            spare.insert(0, "layer")
        return [Table("explored", _HEADER, rows, left=(0, 1, 3), names=1, spare=spare)]

    def summary(self) -> str:
        """Return lines of totals, and why points failed."""
        failed = [point for point in self.points if point.loss is None]
        text = (
            f"{len(self._measured)} of {self.planned} points have a loss"
            f"{f', {len(failed)} failed' if failed else ''}; * no other is as small and as good"
        )
        dense = next((point for point in self.points if point.setting == "dense"), None)
        near = [
            point
            for point in self._measured
            if dense and point.params and _loss(point) <= _loss(dense) + 0.01 * abs(_loss(dense))
        ]
        if dense and near and (least := min(near, key=lambda point: point.params or 0)) != dense:
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

    @property
    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(_kind(point) for point in self._measured))

    def _of_kind(self, kind: str) -> list[Point]:
        return [point for point in self._measured if _kind(point) == kind]

    def _in_matplotlib(
        self, groups: Sequence[tuple[str, list[Point]]], best: Sequence[Point]
    ) -> Any:
        figure, (axes,) = empty_figure()
        for kind, points in groups:
            axes.plot(*_sizes_and_losses(points), "o", ms=4, label=kind)
        axes.plot(*_sizes_and_losses(best), color="#8a9299", lw=0.8, zorder=0, label="Pareto front")
        axes.set(xlabel="parameters of the whole model", ylabel="loss")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params("x", labelsize="small")
        axes.legend(frameon=False, fontsize="small")
        return figure

    def _in_plotly(self, groups: Sequence[tuple[str, list[Point]]], best: Sequence[Point]) -> Any:
        with needed_by("a picture to zoom into"):
            import plotly.graph_objects as plotly

        figure = plotly.Figure()
        sizes, losses = _sizes_and_losses(best)
        line = {"color": "#8a9299", "width": 1}
        figure.add_scatter(
            x=sizes, y=losses, mode="lines", line=line, name="Pareto front", hoverinfo="skip"
        )
        for kind, points in groups:
            sizes, losses = _sizes_and_losses(points)
            figure.add_scatter(
                x=sizes, y=losses, mode="markers", name=kind, text=[_hover(one) for one in points],
                hovertemplate="%{text}<extra></extra>",
            )  # fmt: skip
        return figure.update_layout(
            xaxis_title="parameters of the whole model", yaxis_title="loss",
            template="plotly_white", width=720, height=440,
        )  # fmt: skip


def _sizes_and_losses(points: Sequence[Point]) -> tuple[list[Any], list[Any]]:
    return [point.params for point in points], [point.loss for point in points]


def _hover(point: Point) -> str:
    lines = [f"<b>{point.setting}</b>", point.layer, f"loss {point.loss:.5g}"]
    lines.append(f"{point.params:,} parameters, {point.ratio:.2f}x smaller")
    if point.ranks:
        lines.append(f"ranks {point.ranks}")
    if point.error is not None:
        lines.append(f"error of the weights {point.error:.3f}")
    return "<br>".join(lines)


def _kind(point: Point) -> str:
    """Return what a point is drawn as: dense, by data, or a tensor train of an order."""
    if point.setting == "dense":
        return "dense"
    how = "compress_" if point.setting.startswith("budget") else f"order {point.order}"
    return how if point.layer == WHOLE else f"{how}, one layer"


def _loss(point: Point) -> float:
    assert point.loss is not None, "only points with a loss are compared"
    return point.loss


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _has_plotly() -> bool:
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        return False
    return True


log = logging.getLogger("comera")

Make = Callable[[nn.Module], float | None]
"""Makes a copy of the model smaller, and returns the rise of the loss that is predicted, if any."""


class Explorer:
    """Measures points, or takes them from the file where they are there already.

    Args:
        keep: The file, if there is one.
        model: The dense model; it is copied for each point.
        tokens: Rows of the batch that times are predicted for.

    Raises:
        ValueError: If the file is none of these, or of another model or batch.
    """

    def __init__(self, keep: str | Path | None, model: nn.Module, tokens: int) -> None:
        self.path = None if keep is None else Path(keep)
        self.model, self.tokens = model, tokens
        self.about = {"comera_exploration": 1, "weights": _digest(model), "tokens": tokens}
        self.known: dict[tuple[str, str], Point] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def dense(self, evaluate: Callable[[nn.Module], float]) -> Point:
        """Measure the dense model itself."""
        if known := self._known("dense", WHOLE):
            return known
        small = copy.deepcopy(self.model)  # evaluate may put it into another mode
        loss, seconds = _timed(evaluate, small)
        params, size = model_size(small)
        return self._add(
            Point("dense", ratio=1.0, params=params, bytes=size, loss=loss,
                  measured_seconds=seconds)
        )  # fmt: skip

    def point(
        self,
        setting: str,
        layer: str,
        make: Make,
        evaluate: Callable[[nn.Module], float],
        dense: Point,
    ) -> Point:
        """Measure one setting; what it raises is its note."""
        if known := self._known(setting, layer):
            return known
        point = Point(setting, layer)
        small = copy.deepcopy(self.model)
        with _what_is_said() as said:
            try:
                predicted = make(small)
                point = dataclasses.replace(
                    point, predicted_loss=predicted, **self._facts(small, dense)
                )
                loss, seconds = _timed(evaluate, small)
                point = dataclasses.replace(point, loss=loss, measured_seconds=seconds)
            except Exception as problem:  # of whatever kind: the others are still worth measuring
                said.append(f"{type(problem).__name__}: {problem}")
                return self._add(dataclasses.replace(point, note=said[-1]))
        return self._add(dataclasses.replace(point, note="; ".join(dict.fromkeys(said))))

    def _facts(self, small: nn.Module, dense: Point) -> dict[str, Any]:
        params, size = model_size(small)
        assert dense.params is not None, "the dense model was measured"
        facts: dict[str, Any] = {"params": params, "bytes": size, "ratio": dense.params / params}
        layers = {
            name: layer
            for name, layer in tensor_trains(small).items()
            if isinstance(layer, CompressedLinear | TTTable)
        }
        if not layers:
            return facts
        orders = {_order(layer) for layer in layers.values()}
        facts["order"] = orders.pop() if len(orders) == 1 else None
        facts["ranks"] = _ranks([layer.ranks for layer in layers.values()])
        facts["error"] = _error(self.model, layers)
        planned = plan(small, tokens=self.tokens)
        assert isinstance(planned, ModelPlan), "a layer inside a model"
        facts["predicted_seconds"] = planned.seconds
        facts["predicted_ratio"] = planned.seconds / planned.dense_seconds
        return facts

    def _known(self, setting: str, layer: str) -> Point | None:
        known = self.known.get((setting, layer))
        return known if known is not None and known.loss is not None else None

    def _add(self, point: Point) -> Point:
        self.known[point.setting, point.layer] = point
        if self.path is not None:
            points = [dataclasses.asdict(point) for point in self.known.values()]
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps({**self.about, "points": points}, indent=1))
        return point

    def _read(self, path: Path) -> None:
        try:
            there = json.loads(path.read_text())
            kept = {key: there[key] for key in self.about}
            points = [Point(**point) for point in there["points"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"keep={str(path)!r} is no file of explore: remove it, or name another"
            ) from None
        for key, words in (("weights", "another model or other weights"), ("tokens", "tokens")):
            if kept[key] != self.about[key]:
                what = words if key == "weights" else f"tokens={kept[key]}, not {self.tokens}"
                raise ValueError(
                    f"keep={str(path)!r} is of {what}: remove it, or name another file"
                )
        self.known = {(point.setting, point.layer): point for point in points}


def _timed(evaluate: Callable[[nn.Module], float], model: nn.Module) -> tuple[float, float]:
    begun = time.perf_counter()
    loss = measured(evaluate, model)
    return loss, time.perf_counter() - begun


def _ranks(each: Sequence[tuple[int, ...]]) -> str:
    """Write the bonds of layers, or where they differ what they lie between."""
    if len(set(each)) == 1:
        return " ".join(map(str, each[0]))
    bonds = [bond for ranks in each for bond in ranks]
    least, most = min(bonds), max(bonds)
    return str(least) if least == most else f"{least} to {most}"


def _order(layer: CompressedLinear | TTTable) -> int | None:
    """Return how many modes a side has; None of blocks."""
    if not layer.is_chain:
        return None
    return len(layer.cores) // (2 if isinstance(layer, TTLinear) else 1)


@torch.no_grad()
def _error(model: nn.Module, layers: Mapping[str, CompressedLinear | TTTable]) -> float | None:
    """Return the relative error of all weights that were replaced, of those that are one layer."""
    off = whole = 0.0
    for name, layer in layers.items():
        try:
            old = as_torch(model.get_submodule(name)).weight
        except AttributeError:  # an expert, which is no layer in the dense model
            continue
        off += float((layer.to_dense().weight - old).double().square().sum())
        whole += float(old.double().square().sum())
    return (off / whole) ** 0.5 if whole else None


def _digest(model: nn.Module) -> int:
    """Return a checksum of names and bytes of all parameters and buffers."""
    found = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        found = zlib.crc32(data, zlib.crc32(name.encode(), found))
    return found


@contextmanager
def _what_is_said() -> Iterator[list[str]]:
    """Gather what is logged meanwhile, instead of printing it: the table has it once a point."""
    said: list[str] = []

    def gather(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    log.addFilter(gather)
    try:
        yield said
    finally:
        log.removeFilter(gather)
