"""What a sweep writes: means over seeds, differences by seed, as one table and one picture."""

import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from comera.extras import needed_by
from comera.files import replacing


@dataclass(frozen=True)
class Trained:
    """One finished run of a sweep.

    Attributes:
        variant: Name of the variant that was trained.
        seed: Seed of the run.
        params: Parameters of the whole model after training.
        metrics: Figures of the last evaluation.
        steps: Optimizer steps.
        seconds: Time in training steps.
        more: The rest of its ``result.json``, without the layers.
    """

    variant: str
    seed: int
    params: int
    metrics: dict[str, float]
    steps: int
    seconds: float
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One variant over its finished seeds.

    Attributes:
        variant: Name of the variant.
        seeds: Seeds that are finished.
        params: Parameters after training, the mean.
        fewer: How many times fewer than the reference has.
        mean: Mean of the metric.
        deviation: Sample standard deviation of the metric; None for one seed.
        difference: Mean of metric minus metric of the reference, over the seeds both have.
        difference_error: Standard error of that mean; None for one seed.
        steps: Optimizer steps, the mean.
        seconds: Time in training steps, the mean.
        speed: How many times less time a step takes than one of the reference, over the seeds
            both have.
    """

    variant: str
    seeds: tuple[int, ...]
    params: float
    fewer: float | None
    mean: float
    deviation: float | None
    difference: float | None
    difference_error: float | None
    steps: float
    seconds: float
    speed: float | None


@dataclass(frozen=True)
class Comparison:
    """All variants that have a finished run, against one of them.

    Attributes:
        metric: Key of the evaluation that is compared.
        reference: Name of the variant the others are compared with.
        seeds: All seeds of the sweep, finished or not.
        rows: One row a variant, in the order of the sweep.
    """

    metric: str
    reference: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def higher_is_better(self) -> bool:
        return self.metric in ("accuracy", "auc")


def read_trained(variant: str, seed: int, folder: Path) -> Trained:
    """Return what ``result.json`` in the folder of a finished run says."""
    facts = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    main = {key: facts.pop(key) for key in ("params", "metrics", "steps", "seconds")}
    facts.pop("layers")
    return Trained(variant, seed, **main, more={"folder": str(folder), **facts})


def compare(
    runs: Sequence[Trained],
    variants: Sequence[str],
    seeds: Sequence[int],
    reference: str,
    metric: str,
) -> Comparison:
    """Compute means over the seeds, and differences to the reference seed by seed.

    Runs of one seed see the same batches in the same order, so what seeds have in common drops
    out of the differences.

    Args:
        runs: The finished ones.
        variants: All names, in the order of the table.
        seeds: All seeds of the sweep.
        reference: One of the names.
        metric: A key of the evaluations.
    """
    by_variant: dict[str, dict[int, Trained]] = {name: {} for name in variants}
    for run in runs:
        by_variant[run.variant][run.seed] = run
    base = by_variant[reference]
    rows = [_row(name, mine, base, metric) for name, mine in by_variant.items() if mine]
    return Comparison(metric, reference, tuple(seeds), tuple(rows))


def pareto_front(comparison: Comparison) -> list[Row]:
    """Return the variants that no other beats with as many parameters or fewer, smallest first."""
    sign = 1 if comparison.higher_is_better else -1
    front: list[Row] = []
    for row in sorted(comparison.rows, key=lambda row: (row.params, -sign * row.mean)):
        if not front or sign * row.mean > sign * front[-1].mean:
            front.append(row)
    return front


def _row(name: str, mine: Mapping[int, Trained], base: Mapping[int, Trained], metric: str) -> Row:
    runs = list(mine.values())
    values = [run.metrics[metric] for run in runs]
    params = statistics.mean(run.params for run in runs)
    shared = [seed for seed in mine if seed in base]
    differences = [mine[s].metrics[metric] - base[s].metrics[metric] for s in shared]
    spread = _deviation(differences)
    speed = None
    if shared:
        speed = _pace([base[s] for s in shared]) / _pace([mine[s] for s in shared])
    return Row(
        variant=name,
        seeds=tuple(mine),
        params=params,
        fewer=statistics.mean(run.params for run in base.values()) / params if base else None,
        mean=statistics.mean(values),
        deviation=_deviation(values),
        difference=statistics.mean(differences) if differences else None,
        difference_error=None if spread is None else spread / math.sqrt(len(differences)),
        steps=statistics.mean(run.steps for run in runs),
        seconds=statistics.mean(run.seconds for run in runs),
        speed=speed,
    )


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _pace(runs: Sequence[Trained]) -> float:
    """Return the seconds of a step."""
    return sum(run.seconds for run in runs) / sum(run.steps for run in runs)


_MAIN_COLOUR, _REFERENCE_COLOUR = "#14608f", "#c4651a"
_NONE = "–"
_WIDEST = 200


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison for a terminal; its lines are not broken, however narrow that is."""
    header, rows = _cells(comparison)
    table = Table(title=_title(comparison))
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    out = io.StringIO()
    Console(file=out, width=_WIDEST, color_system=None).print(table)
    return out.getvalue().rstrip()


def write_comparison(comparison: Comparison, runs: Sequence[Trained], folder: Path) -> None:
    """Write ``results.json``, ``results.md`` and ``pareto.png`` into the folder of a sweep."""
    facts = {
        "metric": comparison.metric,
        "higher_is_better": comparison.higher_is_better,
        "reference": comparison.reference,
        "seeds": comparison.seeds,
        "summary": [asdict(row) for row in comparison.rows],
        "runs": [_flat(run) for run in runs],
    }
    with replacing(folder / "results.json") as temporary:
        temporary.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    with replacing(folder / "results.md") as temporary:
        temporary.write_text(_markdown(comparison), encoding="utf-8")
    _plot(comparison, folder / "pareto.png")


def show_metric(metric: str, value: float) -> str:
    """Return a metric as it is shown: an accuracy in percent."""
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.4f}"


def _flat(run: Trained) -> dict[str, Any]:
    facts = asdict(run)
    return {**facts, **facts.pop("more")}


def _title(comparison: Comparison) -> str:
    better = "higher" if comparison.higher_is_better else "lower"
    return f"{comparison.metric} ({better} is better), compared with {comparison.reference}"


def _cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text."""
    percent = comparison.metric == "accuracy"
    scale, digits = (100, 2) if percent else (1, 4)
    header = [
        "variant", "seeds", "parameters", "fewer", f"{comparison.metric}{' %' if percent else ''}",
        "difference, points" if percent else "difference", "steps", "seconds", "speed a step",
    ]  # fmt: skip
    rows = []
    for row in comparison.rows:
        itself = row.variant == comparison.reference
        rows.append(
            [
                row.variant,
                f"{len(row.seeds)}/{len(comparison.seeds)}",
                f"{row.params:,.0f}",
                _NONE if row.fewer is None else f"{row.fewer:.2f}x",
                _plus_minus(row.mean, row.deviation, scale, f".{digits}f"),
                _NONE
                if itself
                else _plus_minus(row.difference, row.difference_error, scale, f"+.{digits}f"),
                f"{row.steps:,.0f}",
                f"{row.seconds:,.1f}",
                _NONE if row.speed is None else f"{row.speed:.2f}x",
            ]
        )
    return header, rows


def _plus_minus(value: float | None, error: float | None, scale: int, form: str) -> str:
    if value is None:
        return _NONE
    spread = _NONE if error is None else f"{scale * error:{form.removeprefix('+')}}"
    return f"{scale * value:{form}} ± {spread}"


def _markdown(comparison: Comparison) -> str:
    header, rows = _cells(comparison)
    lines = [
        header,
        ["---", *["---:"] * (len(header) - 1)],
        *rows,
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    seeds = ", ".join(map(str, comparison.seeds))
    return (
        f"# {_title(comparison)}\n\n{table}\n\n"
        f"Seeds {seeds}. {comparison.metric}: mean ± sample standard deviation over the finished "
        f"seeds. Difference: to {comparison.reference}, paired by seed, ± its standard error. "
        "Fewer: times fewer parameters than the reference. Seconds: in training steps. Speed: of a "
        "step, against one of the reference with the same seeds.\n"
    )


def _plot(comparison: Comparison, path: Path) -> None:
    """Draw the metric against the parameters, without a display and without pyplot's figures."""
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    scale = 100 if comparison.metric == "accuracy" else 1
    # A canvas of its own: pyplot would keep every figure of a process and look for a display.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in comparison.rows:
        itself = row.variant == comparison.reference
        colour = _REFERENCE_COLOUR if itself else _MAIN_COLOUR
        look: dict[str, Any] = {"marker": "*", "ms": 13} if itself else {"marker": "o", "ms": 5}
        error = None if row.deviation is None else scale * row.deviation
        axes.errorbar(
            row.params, scale * row.mean, error, color=colour, capsize=3, zorder=3, **look
        )
        axes.annotate(
            row.variant,
            (row.params, scale * row.mean),
            (6, 5),
            textcoords="offset points",
            fontsize=8,
            parse_math=False,  # a name may hold dollar signs
        )
        if itself:
            axes.axhline(scale * row.mean, color=colour, ls=":", lw=1)
    # A step, no slope: a size between two variants reaches what the smaller one does.
    front = pareto_front(comparison)
    axes.step(
        [row.params for row in front],
        [scale * row.mean for row in front],
        where="post",
        color="#8a9299",
        lw=1,
        label="best at that size or below",
    )
    unit = " in %" if scale == 100 else ""
    axes.set(xscale="log", xlabel="parameters", ylabel=f"{comparison.metric}{unit}")
    axes.margins(x=0.15, y=0.12)
    axes.set_title(_title(comparison), fontsize=9, parse_math=False)
    axes.grid(color="#dfe4e8", lw=0.6)
    axes.legend(frameon=False, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
