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
from comera.report.frontier import Front, FrontPoint
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
        sizes={key: size for key in SIZES if (size := _mean_of(runs, key)) is not None},
    )


def _mean_of(runs: Sequence[Trained], key: str) -> float | None:
    """Return the mean of a figure of runs; None if one has none that is finite."""
    found = [math.nan if run.more.get(key) is None else run.more[key] for run in runs]
    return statistics.mean(found) if all(map(math.isfinite, found)) else None


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
    return page.gather_front(title, front_of(comparison)) | {
        "table": Table("Variants", *comparison_cells(comparison)),
        "note": [comparison.note],
        "failed": [str(run) for run in comparison.failed],
    }


def front_of(comparison: Comparison) -> Front:
    """Return the variants as a front, without those whose metric is not finite."""
    rows = [row for row in comparison.rows if math.isfinite(row.mean)]
    spreads = [row.deviation**2 for row in rows if row.deviation is not None]
    points = []
    for row in rows:
        runs = [run for run in comparison.runs if run.variant == row.variant]
        point = FrontPoint(
            row.variant, "", any(run.more.get("layer_dense_params") for run in runs), row.mean,
            math.sqrt(statistics.mean(spreads) / len(runs)) if spreads else None, len(runs),
            params=round(row.params), bytes=_mean_of(runs, "bytes") or 4 * row.params,
            memory=row.sizes.get("peak_memory"), step_seconds=row.seconds / row.steps,
            forward_seconds=_mean_of(runs, "forward_seconds"),
        )  # fmt: skip
        points.append(point)
    return Front(tuple(points), comparison.metric, comparison.higher_is_better)


_LOOKS = ("compressed", "dense", "relaxed", "target")  # classes of the style sheet


def _first_runs(folder: Path, comparison: Comparison) -> dict[str, Any]:
    """Return losses over seconds and completions of the best variants, of one run each."""
    rows = [row for row in comparison.rows if math.isfinite(row.mean)]
    rows.sort(key=lambda row: row.mean, reverse=comparison.higher_is_better)
    runs, completions = [], []
    for row, look in zip(rows, _LOOKS, strict=False):  # more lines could not be told apart
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
