"""Variants of a sweep compared: means over seeds, and differences seed by seed."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from comera.files import replacing
from comera.planning.printing import show_bytes
from comera.recipes.folder import read_result
from comera.recipes.run_config import HIGHER_IS_BETTER
from comera.train.log import from_json, to_json

_NONE = "–"
_WIDEST = 200


@dataclass(frozen=True)
class Trained:
    """One finished run of a sweep.

    Attributes:
        params: Parameters of the whole model after training.
        metrics: Figures of the last evaluation.
        seconds: Time in training steps.
        test: Figures on test data; empty for a run without such data.
        checkpoint_bytes: Mean size of the kept checkpoints; None if it is not known.
        more: The rest of ``result.json``, without the layers.
    """

    variant: str
    seed: int
    params: int
    metrics: dict[str, float]
    steps: int
    seconds: float
    test: dict[str, float] = field(default_factory=dict)
    checkpoint_bytes: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """One run of a sweep that ended without a result, and why."""

    variant: str
    seed: int
    reason: str

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}: {self.reason}"


@dataclass(frozen=True)
class Row:
    """Means of one variant over its finished seeds; None where no run gives such a figure.

    Attributes:
        fewer: How many times fewer parameters than the reference.
        deviation: Sample standard deviation of the metric.
        differences: Metric minus that of the reference, by the seeds that both have.
        reference_mean: Mean metric of the reference over those seeds.
        difference: Mean of the differences.
        difference_error: Standard error of that mean.
        seconds: Time in training steps.
        speed: Time of a step of the reference, divided by that of this variant, over those seeds.
        dev_mean: Mean metric on development data, if all other figures are of test data.
        checkpoint_bytes: Mean size of a checkpoint.
    """

    variant: str
    seeds: tuple[int, ...]
    params: float
    fewer: float | None
    mean: float
    deviation: float | None
    differences: dict[int, float]
    reference_mean: float | None
    difference: float | None
    difference_error: float | None
    steps: float
    seconds: float
    speed: float | None
    dev_mean: float | None = None
    checkpoint_bytes: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All variants that have a finished run, against one of them.

    Attributes:
        metric: Key of the evaluation that is compared.
        seeds: All seeds of the sweep, finished or not.
        rows: One for each variant, in the order of the sweep.
        tested: Whether the figures are of test data, which all runs then have.
        failed: Runs that ended without a result; they are in no figure.
    """

    metric: str
    reference: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    tested: bool = False
    failed: tuple[Failed, ...] = ()

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
        """Describe the columns of the table."""
        note = (
            f"Seeds {', '.join(map(str, self.seeds))}. {self.metric}: mean ± sample standard "
            f"deviation over the finished seeds. Difference: to {self.reference}, paired by seed, "
            "± its standard error. Fewer: times fewer parameters than the reference. Seconds: in "
            "training steps. Speed: of a step, against one of the reference with the same seeds. A "
            "checkpoint: the mean size of those kept, the optimizer's state among it."
        )
        if self.tested:
            note += (
                " All figures are of test data, but those named dev: they are of the data that "
                "settings and variants may be chosen by."
            )
        return note


def read_trained(variant: str, seed: int, folder: Path) -> Trained:
    """Return the content of ``result.json`` in the folder of a finished run.

    Raises:
        ValueError: If that is damaged.
    """
    facts = read_result(folder)
    main = {key: facts.pop(key) for key in ("params", "metrics", "steps", "seconds")}
    main |= {"test": facts.pop("test", {}), "checkpoint_bytes": facts.pop("checkpoint_bytes", None)}
    del facts["layers"]
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

    Runs of one seed see the same batches in the same order, so what seeds have in common drops
    out of the differences. Figures on test data are compared if every finished run has them.
    ``variants`` are all names in the order of the table; the reference may have no run yet.
    """
    tested = bool(runs) and all(metric in run.test for run in runs)
    by_variant: dict[str, dict[int, Trained]] = {name: {} for name in variants}
    for run in runs:
        by_variant[run.variant][run.seed] = run
    base = by_variant.get(reference, {})
    rows = [_row(name, mine, base, metric, tested) for name, mine in by_variant.items() if mine]
    return Comparison(metric, reference, tuple(seeds), tuple(rows), tested, tuple(failed))


def _row(
    name: str, mine: Mapping[int, Trained], base: Mapping[int, Trained], metric: str, tested: bool
) -> Row:
    """Average the runs of a variant; ``mine`` and ``base``, the reference's, are by seed."""

    def figures(runs: Sequence[Trained], of_test: bool = tested) -> list[float]:
        return [(run.test if of_test else run.metrics)[metric] for run in runs]

    def seconds_a_step(runs: Sequence[Trained]) -> float:
        return sum(run.seconds for run in runs) / sum(run.steps for run in runs)

    runs = list(mine.values())
    params = statistics.mean(run.params for run in runs)
    sizes = [run.checkpoint_bytes for run in runs if run.checkpoint_bytes is not None]
    shared = [seed for seed in mine if seed in base]
    own, other = [mine[seed] for seed in shared], [base[seed] for seed in shared]
    differences = [a - b for a, b in zip(figures(own), figures(other), strict=True)]
    error = None
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Row(
        variant=name,
        seeds=tuple(mine),
        params=params,
        fewer=statistics.mean(run.params for run in base.values()) / params if base else None,
        mean=statistics.mean(figures(runs)),
        deviation=statistics.stdev(figures(runs)) if len(runs) > 1 else None,
        differences=dict(zip(shared, differences, strict=True)),
        reference_mean=statistics.mean(figures(other)) if shared else None,
        difference=statistics.mean(differences) if shared else None,
        difference_error=error,
        steps=statistics.mean(run.steps for run in runs),
        seconds=statistics.mean(run.seconds for run in runs),
        speed=seconds_a_step(other) / seconds_a_step(own) if shared else None,
        dev_mean=statistics.mean(figures(runs, of_test=False)) if tested else None,
        checkpoint_bytes=statistics.mean(sizes) if len(sizes) == len(runs) else None,
    )


def pareto_front(comparison: Comparison) -> list[Row]:
    """Return the variants that no other beats with as many parameters or fewer, smallest first."""
    sign = 1 if comparison.higher_is_better else -1
    front: list[Row] = []
    for row in sorted(comparison.rows, key=lambda row: (row.params, -sign * row.mean)):
        if not front or sign * row.mean > sign * front[-1].mean:
            front.append(row)
    return front


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
    sizes = [
        _NONE if row.checkpoint_bytes is None else show_bytes(row.checkpoint_bytes) for row in rows
    ]
    if len(set(sizes)) > 1:
        columns["a checkpoint"] = sizes
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison for a terminal; its lines are not broken, however narrow that is."""
    header, rows = comparison_cells(comparison)
    table = Table(title=comparison.title)
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    out = io.StringIO()
    Console(file=out, width=_WIDEST, color_system=None).print(table)
    return out.getvalue().rstrip()


def write_comparison(comparison: Comparison, runs: Sequence[Trained], folder: Path) -> None:
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
            for run in runs
        ],
        "failed": [asdict(run) for run in comparison.failed],
    }
    with replacing(folder / "results.json") as temporary:
        temporary.write_text(to_json(facts, indent=2), encoding="utf-8")
    header, rows = comparison_cells(comparison)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [f"# {comparison.title}", table, comparison.note]
    if comparison.failed:
        parts += ["Failed:", "\n".join(f"* {run}" for run in comparison.failed)]
    with replacing(folder / "results.md") as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def read_comparison(folder: Path) -> Comparison:
    """Compare again the runs that ``results.json`` in the folder of a sweep lists.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged.
    """
    path = folder / "results.json"
    names = ("variant", "seed", "params", "metrics", "steps", "seconds", "test", "checkpoint_bytes")
    try:
        facts = from_json(path.read_text(encoding="utf-8"))
        runs = [Trained(**{name: run[name] for name in names}) for run in facts["runs"]]
        variants = [row["variant"] for row in facts["summary"]]
        failed = [Failed(**run) for run in facts["failed"]]
        return compare(runs, variants, facts["seeds"], facts["reference"], facts["metric"], failed)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path} is damaged ({problem!r}): comera sweep FILE writes it again, and trains "
            "nothing that is finished"
        ) from None


def show_metric(metric: str, value: float) -> str:
    """Return a metric as it is shown: an accuracy in percent."""
    if metric == "accuracy":
        return f"{100 * value:.2f} %"
    return f"{value:,.2f}" if metric == "perplexity" else f"{value:.4f}"


def show_change(metric: str, value: float, error: float | None = None) -> str:
    """Return a difference of a metric with its sign and, if there is one, its standard error."""
    scale, unit = (100, " points") if metric == "accuracy" else (1, "")
    digits = 2 if metric in ("accuracy", "perplexity") else 4
    spread = "" if error is None else f" ± {scale * error:,.{digits}f}"
    return f"{scale * value:+,.{digits}f}{spread}{unit}"


def show_difference(metric: str, value: float, other: float) -> str:
    """Return how a metric differs from that of another model: ``11 % higher than``.

    A perplexity is compared by its ratio, an accuracy in points of a percent, others as they are.
    """
    if value == other:
        return "the same as"
    if metric == "perplexity":
        percent = 100 * abs(value / other - 1)
        size = f"{percent:,.0f} %" if percent >= 10 else f"{percent:.1f} %"
    elif metric == "accuracy":
        size = f"{100 * abs(value - other):.2f} points"
    else:
        size = f"{abs(value - other):.4f}"
    return f"{size} {'higher' if value > other else 'lower'} than"


def show_times(value: float, other: float, more: str, less: str) -> str:
    """Return how many times more or less, both given in words: ``2.10 times faster``."""
    ratio, word = (value / other, more) if value >= other else (other / value, less)
    return f"{ratio:,.2f} times {word}" if ratio < 10 else f"{ratio:,.1f} times {word}"
