"""Empty figures of matplotlib, drawn without a window."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from comera.extras import needed_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def empty_figure(
    columns: int = 1,
    heights: Sequence[float] = (1,),
    *,
    size: tuple[float, float] = (5.5, 3.6),
) -> tuple["Figure", Any]:
    """Return a figure and its axes, row by row. Needs matplotlib.

    Args:
        columns: Axes side by side.
        heights: Of the rows, in units of each other; axes of a column share their x.
        size: Inches of all axes of a column together, width and height.
    """
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(heights), columns, sharex="col", squeeze=False, height_ratios=heights
    )
    return figure, axes.flatten()
