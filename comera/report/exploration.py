"""Show the points of an explored model: their table, Pareto front and plot."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from comera.extras import listed, needed_by
from comera.planning import printing

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
        if library not in ("matplotlib", "plotly"):
            raise ValueError(f"library={library!r} must be 'matplotlib' or 'plotly'")
        if not self._measured:
            raise ValueError(f"none of {len(self.points)} points has a loss: nothing can be drawn")
        groups: dict[str, list[Point]] = {}
        for point in self._measured:
            groups.setdefault(point.kind, []).append(point)
        best = sorted(self.pareto().points, key=lambda point: point.params or 0)
        return (_in_plotly if library == "plotly" else _in_matplotlib)(groups, best)

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


def _in_matplotlib(groups: dict[str, list[Point]], best: Sequence[Point]) -> Any:
    figure, (axes,) = printing.empty_figure(height=4.4)
    from matplotlib.ticker import EngFormatter

    for kind, points in groups.items():
        axes.plot(*_sizes_and_losses(points), "o", ms=4, label=kind)
    axes.plot(*_sizes_and_losses(best), color="#8a9299", lw=0.8, zorder=0, label="Pareto front")
    axes.margins(0.1)
    axes.set(xlabel="parameters of the whole model", ylabel="loss")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.locator_params("x", nbins=6)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.draw_without_rendering()  # puts the axes where they stay
    taken: list[Any] = []
    every = [*best, *(point for points in groups.values() for point in points)]
    for point in dict.fromkeys(every):  # those on the line first
        if point.setting == "dense" or (point.layer != WHOLE and point not in best):
            continue
        name = re.sub(r"^(order=\d+, |budget=)", "", point.setting)
        name += "" if point.layer == WHOLE else f", {point.layer}"
        text = axes.annotate(
            name, (point.params, point.loss), (5, 5), textcoords="offset points",
            fontsize="x-small", in_layout=False,
        )  # fmt: skip
        box = text.get_window_extent()
        if box.count_overlaps(taken):  # no room for a name
            text.remove()
        else:
            taken.append(box)
    return figure


def _in_plotly(groups: dict[str, list[Point]], best: Sequence[Point]) -> Any:
    with needed_by("a picture to zoom into"):
        import plotly.graph_objects as plotly
    figure = plotly.Figure()
    sizes, losses = _sizes_and_losses(best)
    line = {"color": "#8a9299", "width": 1}
    figure.add_scatter(
        x=sizes, y=losses, mode="lines", line=line, name="Pareto front", hoverinfo="skip"
    )
    for kind, points in groups.items():
        sizes, losses = _sizes_and_losses(points)
        texts = []
        for point in points:
            lines = [f"<b>{point.setting}</b>", point.layer, f"loss {point.loss:.5g}"]
            lines.append(f"{point.params:,} parameters, {point.ratio:.2f}x smaller")
            if point.ranks:
                lines.append(f"ranks {point.ranks}")
            if point.error is not None:
                lines.append(f"error of the weights {point.error:.3f}")
            texts.append("<br>".join(lines))
        figure.add_scatter(
            x=sizes, y=losses, mode="markers", name=kind, text=texts,
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    return figure.update_layout(
        xaxis_title="parameters of the whole model", yaxis_title="loss",
        template="plotly_white", width=720, height=440,
    )  # fmt: skip


def _sizes_and_losses(points: Sequence[Point]) -> tuple[list[Any], list[Any]]:
    return [point.params for point in points], [point.loss for point in points]


def _loss(point: Point) -> float:
    assert point.loss is not None, "only points with a loss are compared"
    return point.loss


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)
