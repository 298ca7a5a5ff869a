"""Empty figures of matplotlib, drawn without a window."""

from typing import TYPE_CHECKING, Any

from comera.extras import needed_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def empty_figure(count: int) -> tuple["Figure", Any]:
    """Return a figure and so many axes side by side. Needs matplotlib."""
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * count, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]
