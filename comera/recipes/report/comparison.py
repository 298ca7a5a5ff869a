"""Variants of a sweep compared: means over seeds, and differences seed by seed.

Figures in words: how a metric differs from another model's, how long something took.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comera.recipes.outcome import read_result

HIGHER_IS_BETTER = ("accuracy", "auc")


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
    """Say how a metric differs from that of another model: ``11 % higher than``.

    A perplexity is compared by its ratio, an accuracy in points of a percent, others as they are.
    """
    if metric == "perplexity":
        percent = 100 * abs(value / other - 1)
        size = f"{percent:,.0f} %" if percent >= 10 else f"{percent:.1f} %"
    elif metric == "accuracy":
        size = f"{100 * abs(value - other):.2f} points"
    else:
        size = f"{abs(value - other):.4f}"
    if value == other:
        return "the same as"
    return f"{size} {'higher' if value > other else 'lower'} than"


def show_times(value: float, other: float, more: str, less: str) -> str:
    """Say how many times more or less, both given in words: ``2.10 times faster``."""
    ratio, word = (value / other, more) if value >= other else (other / value, less)
    return f"{ratio:,.2f} times {word}" if ratio < 10 else f"{ratio:,.1f} times {word}"


def show_duration(seconds: float) -> str:
    """Return seconds, minutes or hours, whichever can be read."""
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"


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
        test: Figures on the test data; empty for a run without.
        checkpoint_bytes: Size of a checkpoint, the mean of those kept; None if it is not known.
        more: The rest of its ``result.json``, without the layers.
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
    """One variant over its finished seeds.

    Attributes:
        variant: Name of the variant.
        seeds: Seeds that are finished.
        params: Parameters after training, the mean.
        fewer: How many times fewer than the reference has.
        mean: Mean of the metric.
        deviation: Sample standard deviation of the metric; None for one seed.
        differences: By seed: metric minus metric of the reference, where both have it.
        reference_mean: Mean of the metric of the reference over those seeds, None without any.
        difference: Mean of those differences, None without any.
        difference_error: Standard error of that mean; None for one seed.
        steps: Optimizer steps, the mean.
        seconds: Time in training steps, the mean.
        speed: How many times less time a step takes than one of the reference, over the seeds
            both have.
        dev_mean: Mean of the metric on the development data, where all other
            figures are of test data; None where they are of the former.
        checkpoint_bytes: The mean size of a checkpoint; None where one is not known.
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
        reference: Name of the variant the others are compared with.
        seeds: All seeds of the sweep, finished or not.
        rows: One row a variant, in the order of the sweep.
        tested: Whether the figures are of test data, which no choice has seen: all finished runs
            have them.
        failed: Runs that ended without a result; they are in no figure.
    """

    metric: str
    reference: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    tested: bool = False
    failed: tuple[Failed, ...] = ()

    @property
    def base(self) -> Row | None:
        """Return the row of the reference, None while none of its runs is finished."""
        return next((row for row in self.rows if row.variant == self.reference), None)

    @property
    def higher_is_better(self) -> bool:
        return self.metric in HIGHER_IS_BETTER


def read_trained(variant: str, seed: int, folder: Path) -> Trained:
    """Return what ``result.json`` in the folder of a finished run says.

    Raises:
        ValueError: If that is damaged.
    """
    facts = read_result(folder)
    main = {key: facts.pop(key) for key in ("params", "metrics", "steps", "seconds")}
    facts.pop("layers")
    main |= {"test": facts.pop("test", {}), "checkpoint_bytes": facts.pop("checkpoint_bytes", None)}
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
    out of the differences. Where every run has figures on test data, these are compared.

    Args:
        runs: The finished ones.
        variants: All names, in the order of the table.
        seeds: All seeds of the sweep.
        reference: One of the names; it may have no run yet.
        metric: A key of the evaluations.
        failed: Runs that ended without a result.
    """
    tested = bool(runs) and all(metric in run.test for run in runs)
    by_variant: dict[str, dict[int, Trained]] = {name: {} for name in variants}
    for run in runs:
        by_variant[run.variant][run.seed] = run
    base = by_variant.get(reference, {})
    rows = [_row(name, mine, base, metric, tested) for name, mine in by_variant.items() if mine]
    return Comparison(metric, reference, tuple(seeds), tuple(rows), tested, tuple(failed))


def pareto_front(comparison: Comparison) -> list[Row]:
    """Return the variants that no other beats with as many parameters or fewer, smallest first."""
    sign = 1 if comparison.higher_is_better else -1
    front: list[Row] = []
    for row in sorted(comparison.rows, key=lambda row: (row.params, -sign * row.mean)):
        if not front or sign * row.mean > sign * front[-1].mean:
            front.append(row)
    return front


def _row(
    name: str,
    mine: Mapping[int, Trained],
    base: Mapping[int, Trained],
    metric: str,
    tested: bool,
) -> Row:
    def figure(run: Trained) -> float:
        return (run.test if tested else run.metrics)[metric]

    runs = list(mine.values())
    values = [figure(run) for run in runs]
    params = statistics.mean(run.params for run in runs)
    sizes = [run.checkpoint_bytes for run in runs if run.checkpoint_bytes is not None]
    shared = [seed for seed in mine if seed in base]
    differences = {seed: figure(mine[seed]) - figure(base[seed]) for seed in shared}
    spread = _deviation(list(differences.values()))
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
        differences=differences,
        reference_mean=_mean([figure(base[seed]) for seed in shared]),
        difference=_mean(list(differences.values())),
        difference_error=None if spread is None else spread / math.sqrt(len(differences)),
        steps=statistics.mean(run.steps for run in runs),
        seconds=statistics.mean(run.seconds for run in runs),
        speed=speed,
        dev_mean=statistics.mean(run.metrics[metric] for run in runs) if tested else None,
        checkpoint_bytes=statistics.mean(sizes) if len(sizes) == len(runs) else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _pace(runs: Sequence[Trained]) -> float:
    """Return the seconds of a step."""
    return sum(run.seconds for run in runs) / sum(run.steps for run in runs)
