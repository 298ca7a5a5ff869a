"""The page of a sweep: one HTML file about all its variants."""

import math
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from comera.recipes.report.comparison import (
    Comparison,
    Row,
    comparison_cells,
    pareto_front,
    read_comparison,
    show_change,
    show_difference,
    show_metric,
    show_times,
)
from comera.recipes.report.page import Chart, Line, Point, Table, axis_around, write_page


def write_sweep_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a sweep, from its ``results.json``; return its path.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    path = folder / "report.html"
    title = f"Sweep {folder.resolve().name}"
    write_page(path, "sweep.html", gather_sweep(title, read_comparison(folder)))
    return path


def gather_sweep(title: str, comparison: Comparison) -> dict[str, Any]:
    """Return what ``sweep.html`` shows."""
    finite = tuple(row for row in comparison.rows if math.isfinite(row.mean))
    others = [
        row
        for row in finite
        if row.difference is not None
        and math.isfinite(row.difference)
        and row.variant != comparison.reference
    ]
    differences = [_differences(row, comparison) for row in others]
    points = [point for each in differences for point in (*each["by_seed"], each["mean"])]
    ends = [end for point in points for end in (point.x - point.error, point.x + point.error)]
    label = f"difference in {_named(comparison)} to {comparison.reference}"
    return {
        "title": title,
        "subtitle": comparison.title,
        "findings": [_finding(row, comparison) for row in others],
        "table": Table(*comparison_cells(comparison)),
        "note": comparison.note,
        "failed": [str(run) for run in comparison.failed],
        "charts": _charts(replace(comparison, rows=finite)) if finite else [],
        "axis": axis_around(label, [0.0, *ends]) if ends else None,
        "differences": differences,
    }


def _named(comparison: Comparison) -> str:
    return f"test {comparison.metric}" if comparison.tested else comparison.metric


def _finding(row: Row, comparison: Comparison) -> str:
    """Compare a variant with the reference over the seeds that both have, in a sentence."""
    assert row.reference_mean is not None, "they share seeds"
    metric, reference, seeds = comparison.metric, row.reference_mean, len(row.differences)
    value = reference + (row.difference or 0.0)
    text = (
        f"{row.variant}: {_named(comparison)} {show_metric(metric, value)}, "
        f"{show_difference(metric, value, reference)} {comparison.reference}'s "
        f"{show_metric(metric, reference)} ({'one seed' if seeds == 1 else f'{seeds} seeds'})"
    )
    if row.fewer:
        text += f"; {show_times(row.fewer, 1, 'fewer', 'more')} parameters"
    if row.speed:
        text += f"; a step {show_times(row.speed, 1, 'faster', 'slower')} by the wall clock"
    return f"{text}."


def _differences(row: Row, comparison: Comparison) -> dict[str, Any]:
    """Return a variant's differences to the reference as points; only their ``x`` is used."""
    assert row.difference is not None, "they share seeds"
    metric, error = comparison.metric, row.difference_error
    shown = show_change(metric, row.difference, error)
    return {
        "variant": row.variant,
        "by_seed": [
            Point(value, 0, f"{row.variant}, seed {seed}: {show_change(metric, value)}")
            for seed, value in row.differences.items()
        ],
        "mean": Point(row.difference, 0, f"{row.variant}, mean: {shown}", error=error or 0.0),
        "shown": shown,
    }


def _charts(comparison: Comparison) -> list[Chart]:
    """Draw the metric against the parameters, with the Pareto front, and against the time."""
    named, rows = _named(comparison), comparison.rows
    sizes = {row.variant: _point(row, comparison, row.params) for row in rows}
    times = {row.variant: _point(row, comparison, row.seconds) for row in rows}
    best = [sizes[row.variant] for row in pareto_front(comparison)]
    # Steps, no slope: a size between two variants reaches what the smaller one does.
    corners = [Point(right.x, left.y, "") for left, right in pairwise(best)]
    steps = [replace(point, text="", error=0.0, name="") for point in best]
    front = [point for pair in zip_longest(steps, corners) for point in pair if point]
    caption = (
        "Further left is smaller. The dotted line joins the Pareto front: variants that no other "
        "beats with as many parameters or fewer."
    )
    if len(comparison.seeds) > 1:
        caption += " Bars are standard deviations over the seeds."
    x = axis_around("parameters", [point.x for point in sizes.values()], log=True, room=0.1)
    seconds = axis_around("seconds", [point.x for point in times.values()], zero=True, room=0.1)
    ends = [y for p in sizes.values() for y in (p.y - p.error, p.y + p.error)]
    y = axis_around(named, ends, room=0.1)
    lines = [Line("best at that size or below", "front", front), *_dots(sizes, comparison)]
    said = "Seconds in training steps by the wall clock, the mean. Further left is faster."
    return [
        Chart(f"Size and {named}", caption, x, y, lines),
        Chart(f"Time and {named}", said, seconds, y, _dots(times, comparison)),
    ]


def _point(row: Row, comparison: Comparison, x: float) -> Point:
    metric = comparison.metric
    text = f"{row.variant}: {_named(comparison)} {show_metric(metric, row.mean)}"
    if row.deviation is not None:
        text += f" ± {show_metric(metric, row.deviation)}"
    text += f", {row.params:,.0f} parameters, {row.seconds:,.1f} seconds"
    return Point(x, row.mean, text, row.variant, row.deviation or 0.0)


def _dots(points: dict[str, Point], comparison: Comparison) -> list[Line]:
    """Return the dots of the variants, and that of the reference in another colour."""
    base = comparison.reference
    # From left to right, so that the names of neighbours can stand above and below.
    ordered = sorted(points.items(), key=lambda item: item[1].x)
    others = [point for name, point in ordered if name != base]
    own = [point for name, point in ordered if name == base]
    named = (("variants", "variant", others), (base, "reference", own))
    return [Line(*each, joined=False, dots=True) for each in named if each[2]]
