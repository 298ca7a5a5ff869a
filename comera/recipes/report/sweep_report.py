"""Compare variants of a sweep: means over seeds, differences seed by seed, and an HTML page."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from comera.files import write_text
from comera.planning.printing import Table, show_bytes
from comera.recipes.report import page
from comera.recipes.report.run_report import loss_by_clock, read_histories
from comera.recipes.run_config import HIGHER_IS_BETTER
from comera.recipes.run_folder import read_result
from comera.train.log import from_json, to_json

log = logging.getLogger("comera")

_NONE = "–"
SIZES: dict[str, tuple[str, Callable[[float], str]]] = {
    "processor_seconds": ("processor seconds", "{:,.1f}".format),
    "peak_memory": ("peak memory", show_bytes),
    "state_bytes": ("optimizer state", show_bytes),
    "checkpoint_bytes": ("a checkpoint", show_bytes),
}
"""Figures of a run that has them: what a table calls them, and how it writes them."""
MEASURED = {
    "params": ("parameters", "{:,.0f}".format),
    "layer_params": ("parameters of compressed layers", "{:,.0f}".format),
    "seconds": ("seconds", "{:,.1f}".format), **SIZES,
}  # fmt: skip
"""All figures that are the better the smaller they are, which no task defines."""


@dataclass(frozen=True)
class Trained:
    """The figures of a finished run of a sweep."""

    variant: str
    seed: int
    params: int  # of the whole model after training
    metrics: dict[str, float]  # of the last evaluation
    steps: int
    seconds: float  # in training steps
    test: dict[str, float] = field(default_factory=dict)
    processor_seconds: float | None = None
    peak_memory: float | None = None
    state_bytes: float | None = None
    checkpoint_bytes: float | None = None  # mean of the kept checkpoints
    ran: dict[str, Any] = field(default_factory=dict)  # date, machine and versions
    more: dict[str, Any] = field(default_factory=dict)  # the rest of result.json but the layers


@dataclass(frozen=True)
class Failed:
    """A run of a sweep that ended without a result, with the reason."""

    variant: str
    seed: int
    reason: str

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}: {self.reason}"


@dataclass(frozen=True)
class Row:
    """Means of one variant over its finished seeds; None if no run has such a figure.

    Differences, ``reference_mean`` and ``speed`` use only seeds that the reference has, too.
    """

    variant: str
    seeds: tuple[int, ...]
    params: float
    fewer: float | None  # how many times fewer parameters than the reference
    mean: float
    deviation: float | None  # sample standard deviation of the metric
    differences: dict[int, float]  # metric minus that of the reference, by seed
    reference_mean: float | None
    difference: float | None  # mean of the differences
    difference_error: float | None  # standard error of that mean
    steps: float
    seconds: float
    speed: float | None  # time of a step of the reference over that of this variant
    dev_mean: float | None = None  # on development data, if all other figures are of test data
    sizes: Mapping[str, float] = field(default_factory=dict)  # means of those that all runs have


@dataclass(frozen=True)
class Comparison:
    """All variants that have a finished run, compared with one of them, the reference."""

    metric: str
    reference: str
    seeds: tuple[int, ...]  # of the sweep, finished or not
    rows: tuple[Row, ...]  # in the order of the sweep
    tested: bool = False  # figures are of test data, which all finished runs then have
    failed: tuple[Failed, ...] = ()
    runs: tuple[Trained, ...] = field(default=(), compare=False)

    @property
    def higher_is_better(self) -> bool:
        return self.metric in HIGHER_IS_BETTER

    @property
    def title(self) -> str:
        better = "higher" if self.higher_is_better else "lower"
        where = " on test data" if self.tested else ""
        return f"{self.metric}{where} ({better} is better), compared with {self.reference}"

    @property
    def note(self) -> str:
        note = (
            f"Seeds {', '.join(map(str, self.seeds))}. {self.metric}: mean ± sample standard "
            f"deviation over the finished seeds. Difference: to {self.reference}, paired by seed, "
            "± its standard error. Fewer: times fewer parameters than the reference. Seconds: in "
            "training steps; processor seconds: of all processors in them. Speed: of a step, "
            "against one of the reference with the same seeds. Peak memory: of training steps, "
            "above what there was before the model. Optimizer state: at the start. A checkpoint: "
            "the mean size of those kept, the optimizer's state among it."
        )
        if self.tested:
            note += (
                " All figures are of test data, but those named dev: they are of the data that "
                "settings and variants may be chosen by."
            )
        return note


def read_trained(variant: str, seed: int, folder: Path) -> Trained:
    """Read ``result.json`` of a finished run; raises ``ValueError`` if it is damaged."""
    facts = read_result(folder)
    del facts["layers"]
    main = {each.name: facts.pop(each.name) for each in fields(Trained) if each.name in facts}
    return Trained(variant, seed, **main, more={"folder": str(folder), **facts})


def compare(
    runs: Sequence[Trained],
    variants: Sequence[str],
    seeds: Sequence[int],
    reference: str,
    metric: str,
    failed: Sequence[Failed] = (),
) -> Comparison:
    """Compute means over the seeds, and differences to the reference seed by seed.

    Figures are those of test data if every run has them. ``variants`` orders the table.
    """
    tested = bool(runs) and all(metric in run.test for run in runs)
    by_variant: dict[str, dict[int, Trained]] = {name: {} for name in variants}
    for run in runs:
        by_variant[run.variant][run.seed] = run
    base = by_variant.get(reference, {})
    rows = [_row(name, mine, base, metric, tested) for name, mine in by_variant.items() if mine]
    of = tuple(seeds), tuple(rows), tested, tuple(failed), tuple(runs)
    return Comparison(metric, reference, *of)


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None of one value, NaN if one is not finite."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _row(
    name: str, mine: Mapping[int, Trained], base: Mapping[int, Trained], metric: str, tested: bool
) -> Row:
    """Average a variant's runs ``mine``; ``base`` are the reference's runs, both by seed."""

    def figures(runs: Sequence[Trained], of_test: bool = tested) -> list[float]:
        return [(run.test if of_test else run.metrics)[metric] for run in runs]

    def seconds_a_step(runs: Sequence[Trained]) -> float:
        return sum(run.seconds for run in runs) / sum(run.steps for run in runs)

    mean = statistics.mean
    runs = list(mine.values())
    params = mean(run.params for run in runs)
    sizes = {key: [getattr(run, key) for run in runs] for key in SIZES}
    shared = [seed for seed in mine if seed in base]
    own, other = [mine[seed] for seed in shared], [base[seed] for seed in shared]
    differences = [a - b for a, b in zip(figures(own), figures(other), strict=True)]
    spread = deviation(differences)
    return Row(
        variant=name,
        seeds=tuple(mine),
        params=params,
        fewer=mean(run.params for run in base.values()) / params if base else None,
        mean=mean(figures(runs)),
        deviation=deviation(figures(runs)),
        differences=dict(zip(shared, differences, strict=True)),
        reference_mean=mean(figures(other)) if shared else None,
        difference=mean(differences) if shared else None,
        difference_error=None if spread is None else spread / math.sqrt(len(differences)),
        steps=mean(run.steps for run in runs),
        seconds=mean(run.seconds for run in runs),
        speed=seconds_a_step(other) / seconds_a_step(own) if shared else None,
        dev_mean=mean(figures(runs, of_test=False)) if tested else None,
        sizes={
            key: mean(found)
            for key, found in sizes.items()
            if all(value is not None and math.isfinite(value) for value in found)
        },
    )


def comparison_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table as text."""
    percent = comparison.metric == "accuracy"
    scale, form = (100, ".2f") if percent else (1, ".4f")
    named = f"{comparison.metric}{' %' if percent else ''}"

    def times(value: float | None) -> str:
        return _NONE if value is None else f"{value:.2f}x"

    def with_error(value: float | None, error: float | None, sign: str = "") -> str:
        if value is None:
            return _NONE
        spread = _NONE if error is None else f"{scale * error:{form}}"
        return f"{scale * value:{sign}{form}} ± {spread}"

    rows = comparison.rows
    columns = {
        "variant": [row.variant for row in rows],
        "seeds": [f"{len(row.seeds)}/{len(comparison.seeds)}" for row in rows],
        "parameters": [f"{row.params:,.0f}" for row in rows],
        "fewer": [times(row.fewer) for row in rows],
        f"test {named}" if comparison.tested else named: [
            with_error(row.mean, row.deviation) for row in rows
        ],
        "difference, points" if percent else "difference": [
            _NONE
            if row.variant == comparison.reference
            else with_error(row.difference, row.difference_error, "+")
            for row in rows
        ],
        "steps": [f"{row.steps:,.0f}" for row in rows],
        "seconds": [f"{row.seconds:,.1f}" for row in rows],
        "speed a step": [times(row.speed) for row in rows],
    }
    if comparison.tested:
        columns[f"dev {named}"] = [f"{scale * (row.dev_mean or 0):{form}}" for row in rows]
    for key, (label, show) in SIZES.items():
        sizes = [show(row.sizes[key]) if key in row.sizes else _NONE for row in rows]
        if len(set(sizes)) > 1:
            columns[label] = sizes
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def comparison_text(comparison: Comparison) -> str:
    spare = [label for label, _ in SIZES.values()]
    header, rows = comparison_cells(comparison)
    return Table(comparison.title, header, rows, spare=[s for s in spare if s in header]).text()


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write ``results.json`` and ``results.md`` into the folder of a sweep."""
    facts = {
        "metric": comparison.metric,
        "higher_is_better": comparison.higher_is_better,
        "reference": comparison.reference,
        "tested": comparison.tested,
        "seeds": comparison.seeds,
        "summary": [asdict(row) for row in comparison.rows],
        "runs": [
            {key: value for key, value in (vars(run) | run.more).items() if key != "more"}
            for run in comparison.runs
        ],
        "failed": [asdict(run) for run in comparison.failed],
    }
    write_text(folder / "results.json", to_json(facts, indent=2))
    header, rows = comparison_cells(comparison)
    parts = [f"# {comparison.title}", page.markdown(header, rows), comparison.note]
    if comparison.failed:
        parts += ["Failed:", "\n".join(f"* {run}" for run in comparison.failed)]
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")


def read_comparison(folder: Path) -> Comparison:
    """Compare the runs of ``results.json`` in a folder; raises ``ValueError`` if damaged."""
    path = folder / "results.json"
    names = {each.name for each in fields(Trained)}
    try:
        facts = from_json(path.read_text(encoding="utf-8"))
        runs = [Trained(**{k: r.pop(k) for k in names & {*r}}, more=r) for r in facts["runs"]]
        variants = [row["variant"] for row in facts["summary"]]
        failed = [Failed(**run) for run in facts["failed"]]
        return compare(runs, variants, facts["seeds"], facts["reference"], facts["metric"], failed)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path} is damaged ({problem!r}): comera sweep FILE writes it again, and trains "
            "nothing that is finished"
        ) from None


def write_sweep_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a sweep, from its ``results.json``."""
    comparison = read_comparison(folder)
    content = gather_sweep(f"Sweep {folder.resolve().name}", comparison)
    content |= _first_runs(folder, comparison)
    return page.write_page(folder / "report.html", "sweep.html", content)


def gather_sweep(title: str, comparison: Comparison) -> dict[str, Any]:
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
        "summary": _summary(comparison) if finite else "",
        "findings": [_finding(row, comparison) for row in others],
        "table": Table("Variants", *comparison_cells(comparison)),
        "note": comparison.note,
        "failed": [str(run) for run in comparison.failed],
        "charts": _charts(replace(comparison, rows=finite)) if finite else [],
        "axis": page.axis_around(label, [0.0, *ends]) if ends else None,
        "differences": differences,
    }


_LOOKS = ("compressed", "dense", "relaxed", "target")  # classes of the style sheet


def _best_first(comparison: Comparison) -> list[Row]:
    """Return the best variants, as many as lines of a chart can be told apart."""
    rows = [row for row in comparison.rows if math.isfinite(row.mean)]
    best = sorted(rows, key=lambda row: row.mean, reverse=comparison.higher_is_better)
    return best[: len(_LOOKS)]


def _summary(comparison: Comparison) -> str:
    rows = _best_first(comparison)
    figures = [
        f"{row.variant} {page.show_metric(comparison.metric, row.mean)} with {row.params:,.0f}"
        for row in rows
    ]
    seconds = {f" after {row.seconds:,.0f} seconds of training each" for row in rows}
    after = seconds.pop() if len(seconds) == 1 else ""
    return f"By {_named(comparison)}{after}, best first: {', '.join(figures)} parameters."


def _first_runs(folder: Path, comparison: Comparison) -> dict[str, Any]:
    """Return losses over seconds and completions of the best variants, of one run each."""
    runs, completions = [], []
    for row, look in zip(_best_first(comparison), _LOOKS, strict=False):
        try:
            run = read_histories(folder / row.variant / f"seed-{row.seeds[0]}")[0]
        except (FileNotFoundError, ValueError) as problem:  # moved, damaged
            log.warning("%s has no line in the losses over seconds: %s", row.variant, problem)
            continue
        runs.append(replace(run, name=row.variant, look=look))
        if lines := (run.result or {}).get("completion"):
            completions.append([row.variant, *lines])
    header = ["variant", "the first held-out sequence ends with", "and the model goes on with"]
    table = Table("Completions", header, completions, left=range(3)) if completions else None
    return {"loss": loss_by_clock(runs), "completions": table}


def _named(comparison: Comparison) -> str:
    return f"test {comparison.metric}" if comparison.tested else comparison.metric


def _finding(row: Row, comparison: Comparison) -> str:
    """Return a sentence that compares a variant with the reference over common seeds."""
    assert row.reference_mean is not None, "they share seeds"
    metric, reference, seeds = comparison.metric, row.reference_mean, len(row.differences)
    value = reference + (row.difference or 0.0)
    text = (
        f"{row.variant}: {_named(comparison)} {page.show_metric(metric, value)}, "
        f"{page.show_difference(metric, value, reference)} {comparison.reference}'s "
        f"{page.show_metric(metric, reference)} ({'one seed' if seeds == 1 else f'{seeds} seeds'})"
    )
    if row.fewer:
        text += f"; {page.show_times(row.fewer, 1, 'fewer', 'more')} parameters"
    if row.speed:
        text += f"; a step {page.show_times(row.speed, 1, 'faster', 'slower')} by the wall clock"
    return f"{text}."


def _differences(row: Row, comparison: Comparison) -> dict[str, Any]:
    """Return a variant's differences to the reference as points, whose ``x`` is the difference."""
    assert row.difference is not None, "they share seeds"
    metric, error = comparison.metric, row.difference_error
    shown = page.show_change(metric, row.difference, error)
    return {
        "variant": row.variant,
        "by_seed": [
            page.Point(value, 0, f"{row.variant}, seed {seed}: {page.show_change(metric, value)}")
            for seed, value in row.differences.items()
        ],
        "mean": page.Point(row.difference, 0, f"{row.variant}, mean: {shown}", error=error or 0.0),
        "shown": shown,
    }


def _charts(comparison: Comparison) -> list[page.Chart]:
    named, rows = _named(comparison), comparison.rows
    sizes = [_point(row, comparison, row.params) for row in rows]
    times = [_point(row, comparison, row.seconds) for row in rows]
    front: list[page.Point] = []  # Pareto's, smallest first
    sign = 1 if comparison.higher_is_better else -1
    for point in sorted(sizes, key=lambda point: (point.x, -sign * point.y)):
        if not front or sign * point.y > sign * front[-1].y:
            # Steps, no slope: a size between two variants reaches what the smaller one does.
            front += [page.Point(point.x, smaller.y, "") for smaller in front[-1:]]
            front.append(page.Point(point.x, point.y, ""))
    caption = (
        "Further left is smaller. The dotted line joins the Pareto front: variants that no other "
        "beats with as many parameters or fewer."
    )
    if len(comparison.seeds) > 1:
        caption += " Bars are standard deviations over the seeds."
    x = page.axis_around("parameters", [point.x for point in sizes], log=True, room=0.1)
    seconds = page.axis_around("seconds", [point.x for point in times], zero=True, room=0.1)
    ends = [y for p in sizes for y in (p.y - p.error, p.y + p.error)]
    y = page.axis_around(named, ends, room=0.1)
    lines = [page.Line("best at that size or below", "front", front), *_dots(sizes, comparison)]
    said = "Seconds in training steps by the wall clock, the mean. Further left is faster."
    return [
        page.Chart(f"Size and {named}", caption, x, y, lines),
        page.Chart(f"Time and {named}", said, seconds, y, _dots(times, comparison)),
    ]


def _point(row: Row, comparison: Comparison, x: float) -> page.Point:
    metric = comparison.metric
    text = f"{row.variant}: {_named(comparison)} {page.show_metric(metric, row.mean)}"
    if row.deviation is not None:
        text += f" ± {page.show_metric(metric, row.deviation)}"
    text += f", {row.params:,.0f} parameters, {row.seconds:,.1f} seconds"
    return page.Point(x, row.mean, text, row.variant, row.deviation or 0.0)


def _dots(points: Sequence[page.Point], comparison: Comparison) -> list[page.Line]:
    """Return the dots of the variants, with another look for the reference."""
    # From left to right, so that the names of neighbours can stand above and below.
    base, ordered = comparison.reference, sorted(points, key=lambda point: point.x)
    others = [point for point in ordered if point.name != base]
    own = [point for point in ordered if point.name == base]
    named = (("variants", "variant", others), (base, "reference", own))
    return [page.Line(*each, joined=False, dots=True) for each in named if each[2]]
