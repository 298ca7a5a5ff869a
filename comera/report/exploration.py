"""Show the points of an explored model: their table, Pareto front and plot."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from comera.extras import listed
from comera.planning import printing
from comera.report.pictures import Dot, Panel, draw

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


@dataclass(frozen=True, repr=False)
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
        return replace(self, points=tuple(point for point in self.points if point in best))

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
        losses = printing.show_column([point.loss for point in self.points], 4)
        rows = [
            (
                ("* " if point in best else "") + point.setting,
                point.layer,
                _text(point.order, "{}".format),
                point.ranks,
                _text(point.ratio, "{:.2f}x".format),
                _text(point.params, "{:,}".format),
                _text(point.bytes, printing.show_bytes),
                _text(point.error, "{:.3f}".format),
                loss or "failed",
                _text(point.predicted_ratio, "{:.2f}x".format),
                _text(point.measured_seconds, printing.show_seconds),
            )
            for point, loss in zip(self.points, losses, strict=True)
        ]
        spare = ["evaluate took", "bytes", "order", "parameters", "predicted time / dense"]
        if all(point.layer == WHOLE for point in self.points):
            spare.insert(0, "layer")
        batches = sorted({point.tokens for point in self.points if point.tokens})
        at = f", times at {listed(list(map(str, batches)))} rows a batch" * bool(batches)
        return [
            printing.Table(f"explored{at}", _HEADER, rows, left=(0, 1, 3), names=1, spare=spare)
        ]

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
