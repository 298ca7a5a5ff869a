"""Show how small a model can be: the answer in sentences, a table and pictures of a front."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Literal

from comera.extras import check_known, listed
from comera.planning import printing
from comera.report.pictures import Dot, Panel, draw, shown

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

COSTS = {
    "params": ("parameters", ""), "bytes": ("bytes on disk", "B"),
    "memory": ("memory of training", "B"), "step_seconds": ("seconds of a step", "s"),
    "forward_seconds": ("seconds of a forward pass", "s"),
}  # fmt: skip
"""The costs of a model, each with its name and unit."""

SIDES = {False: "dense", True: "compressed"}
_LEVEL = "level"
_UNITS = {
    "params": "parameters", "bytes": "on disk", "memory": "of training memory",
    "step_seconds": "a step", "forward_seconds": "a forward pass",
}  # fmt: skip
_HIGHER = {"accuracy", "acc", "auc", "f1", "r2", "precision", "recall", "bleu", "rouge", "map"}
_WITHIN = 0.02  # share of the best's quality that the smallest good model may give away
_ALIKE = 1.01  # times a cost up to which another is the same: small tables are made as large
_ERRORS = 2.0  # standard errors of a difference up to which two models are level


@dataclass(frozen=True)
class Training:
    """One training of a variant; ``costs`` are figures by key of ``COSTS``, and ``steps``."""

    variant: str
    family: str
    compressed: bool
    rate: float
    seed: int
    dev: float  # quality on data that rates are chosen by
    test: float | None  # quality on data that nothing is chosen by
    costs: Mapping[str, float | None]
    layers: str = ""
    trains_on: str = ""


@dataclass(frozen=True)
class FrontPoint:
    """A variant at its best rate, as the mean over its seeds; what is not known is None.

    Attributes:
        name: Of the variant.
        family: What was done to the model as given, such as ``blocks``.
        compressed: Whether a format of comera stores weights; else dense, in eight bits or not.
        quality: The metric, on test data if there are any.
        error: Standard error of the quality, from the deviations over seeds of all variants.
        seeds: Number of trainings at that rate.
        rate: Learning rate, the best of those tried by data that are not the test data.
        params: Parameters of the whole model, after training.
        bytes: Bytes of its file.
        memory: Peak bytes of training, above what the process had before.
        step_seconds: Processor seconds of a training step, the mean.
        forward_seconds: Seconds of a pass over a batch in evaluation mode.
        steps: Steps of training, the mean.
        layers: What its layers are, in words.
        trains_on: How to train it for longer.
        note: What happened on the way, such as rates that diverged.
    """

    name: str
    family: str
    compressed: bool
    quality: float
    error: float | None = None
    seeds: int = 1
    rate: float | None = None
    params: int = 0
    bytes: float = 0
    memory: float | None = None
    step_seconds: float | None = None
    forward_seconds: float | None = None
    steps: float | None = None
    layers: str = ""
    trains_on: str = ""
    note: str = ""


def is_higher_better(metric: str) -> bool:
    """Return whether a metric has the name of one of which more is better."""
    return not _HIGHER.isdisjoint(re.split(r"[^a-z0-9]+", metric.lower()))


def chosen_rates(runs: Sequence[Training], higher: bool) -> dict[str, float]:
    """Return the rate of each variant that is best by development data of the first seed.

    A variant of which all trainings diverged has none.
    """
    found: dict[str, tuple[float, float]] = {}
    first = min((run.seed for run in runs), default=0)
    for run in runs:
        if math.isfinite(run.dev) and run.seed == first:
            worse = -run.dev if higher else run.dev
            found[run.variant] = min((worse, run.rate), found.get(run.variant, (math.inf, 0.0)))
    return {name: rate for name, (_, rate) in found.items()}


def points_of(runs: Sequence[Training], higher: bool) -> list[FrontPoint]:
    """Return the mean of each variant over its seeds, at the rate of :func:`chosen_rates`.

    Errors are standard errors by the variance over seeds that all variants share, None where no
    variant has several seeds. Where less is better, as of a loss, it is a share of the mean: larger
    ones spread more. Figures are of test data if all runs have them.
    """
    groups: dict[str, list[Training]] = {}
    rates, tested = chosen_rates(runs, higher), all(run.test is not None for run in runs)
    for run in runs:
        if rates.get(run.variant) == run.rate and math.isfinite(run.dev):
            groups.setdefault(run.variant, []).append(run)
    values = {k: [float((r.test if tested else r.dev) or 0) for r in g] for k, g in groups.items()}
    units = {name: 1.0 if higher else abs(fmean(each)) for name, each in values.items()}
    spreads = [variance(v) / (units[k] or 1.0) ** 2 for k, v in values.items() if len(v) > 1]
    found = []
    for name, own in groups.items():
        means: dict[str, Any] = {}
        for key in (*COSTS, "steps"):
            known = [cost for run in own if (cost := run.costs.get(key)) is not None]
            means[key] = fmean(known) if len(known) == len(own) else None
        gone = [r for r in runs if r.variant == name and not math.isfinite(r.dev)]
        at = listed([f"rate {run.rate:.2g}, seed {run.seed}" for run in gone])
        point = FrontPoint(
            name, own[0].family, own[0].compressed, fmean(values[name]),
            units[name] * math.sqrt(fmean(spreads) / len(own)) if spreads else None,
            len(own), own[0].rate,
            **means | {"params": round(means["params"])}, layers=own[0].layers,
            trains_on=own[0].trains_on, note=f"diverged at {at}" if gone else "",
        )  # fmt: skip
        found.append(point)
    return found


@dataclass(frozen=True, repr=False)
class Front(printing.Report):
    """Result of :func:`comera.front`: how good each variant of a model is, and what it costs.

    It prints itself, also in Jupyter: the answer in sentences, then the table.

    Attributes:
        points: A point for each variant that was trained; the model as given is first.
        metric: What quality is, such as ``loss``.
        higher: True if more of it is better.
        left_out: Why other variants have no point, by name.
        about: How the variants were trained, in words.
        interrupted: Whether some are missing because of Ctrl-C.
        loader: Function that returns a trained model by the name of its variant.
    """

    points: tuple[FrontPoint, ...]
    metric: str = "loss"
    higher: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    about: str = ""
    interrupted: bool = False
    loader: "Callable[[str], nn.Module] | None" = field(default=None, compare=False)

    def load(self, name: str) -> "nn.Module":
        """Return the trained model of a variant, of the first seed.

        Raises ``ValueError`` if no point has that name, or the models are not at hand, as of the
        front of a sweep.
        """
        check_known(name, [point.name for point in self.points], f"name={name!r} is no variant")
        if self.loader is None:
            raise ValueError(
                "the models of this front are in its folder: comera.load_run reads one"
            )
        return self.loader(name)

    def best(self, points: Sequence[FrontPoint] | None = None) -> FrontPoint:
        """Return the point of best quality, of all or of some; ``ValueError`` if there is none."""
        if not self.points:
            raise ValueError(f"no variant has been trained: {self.summary()}")
        return min(self.points if points is None else points, key=self._worse)

    def pareto(self, cost: str = "params") -> list[FrontPoint]:
        """Return the points that none as cheap beats, cheapest first; ``cost`` is a key of COSTS.

        Points whose cost was not measured are left out.
        """
        found: list[FrontPoint] = []
        known = [point for point in self.points if getattr(point, cost) is not None]
        for point in sorted(known, key=lambda p: (getattr(p, cost), self._worse(p))):
            if not found or self._worse(point) < self._worse(found[-1]):
                if found and getattr(point, cost) <= _ALIKE * getattr(found[-1], cost):
                    found.pop()
                found.append(point)
        return found

    def smallest(self, within: float = _WITHIN) -> FrontPoint:
        """Return the point of fewest bytes whose quality is within a share of the best's."""
        best = self.best()
        bound = self._worse(best) + within * abs(best.quality)
        return self._smallest_of([p for p in self.points if self._worse(p) <= bound])

    def _smallest_of(self, points: Sequence[FrontPoint]) -> FrontPoint:
        least = min(point.bytes for point in points)
        return self.best([point for point in points if point.bytes <= _ALIKE * least])

    def level(self, one: FrontPoint, other: FrontPoint) -> bool:
        """Return whether errors are known and as large as the difference of two points."""
        if one.error is None or other.error is None:
            return False
        return abs(one.quality - other.quality) < _ERRORS * math.hypot(one.error, other.error)

    def answer(self) -> list[str]:
        """Return how small the model can be, in sentences."""
        if not self.points:
            why = ", for the reasons below" if self.left_out else ""
            return [f"No variant has been trained{why}."]
        best, given, least = self.best(), self.points[0], self.smallest()
        said = [f"Best: {self._described(best)}."]
        if best is not given and given.family == "given":
            bound = self._worse(given)
            small = self._smallest_of([p for p in self.points if self._worse(p) <= bound])
            said[0] += f" As given: {self._described(given).partition(', ')[2]}."
            ratio = f"{given.bytes / small.bytes:.1f}x smaller on disk"
            if small is best:
                said[0] += f" The best is {ratio}."
            elif small is given:
                said.append("Nothing smaller is as good as given.")
            else:
                said.append(f"Smallest as good as given: {self._described(small)}; {ratio}.")
        if near := [p.name for p in self.points if p is not best and self.level(p, best)]:
            said[0] += f" Level with the best within its error: {listed(near)}."
        if least is best:
            said.append(f"Smallest within {_WITHIN:.0%} of the best: itself.")
        else:
            times = best.bytes / least.bytes
            text = f"Smallest within {_WITHIN:.0%} of the best: {self._described(least)}"
            said.append(f"{text}; {times:.1f}x smaller on disk than the best.")
        front = self.pareto("bytes")
        steps = [f"{shown(p.bytes, 'B')} {p.name} ({self._shown(p)})" for p in front]
        said.append(f"Best at each size on disk: {listed(steps, 8)}.")
        alike: dict[tuple[Any, ...], list[tuple[str, list[float]]]] = {}
        for key in COSTS:
            if leads := self._leads(key):
                (first, _), *changed = leads
                known = [(c, p) for p in self.points if (c := getattr(p, key)) is not None]
                below = {SIDES[p.compressed] for c, p in known if changed and c < changed[0][1]}
                kind = (below == {first}, *(side for side, _ in leads))
                alike.setdefault(kind, []).append((key, [start for _, start in changed]))
        for (alone, first, *others), costs in alike.items():
            if not others:
                which = "any cost" if len(alike) == 1 else listed([COSTS[k][0] for k, _ in costs])
                said.append(f"{_lead(first)}, whatever the limit on {which}.")
            elif len(others) == 1:
                limits = [f"{shown(at[0], COSTS[k][1])} {_UNITS[k]}" for k, at in costs]
                leads_by = f"Only {first} models are" if alone else _lead(first)
                said.append(
                    f"{leads_by} below {listed(limits)}; {_lead(*others).lower()} from there."
                )
            for key, starts in costs if len(others) > 1 else ():
                changes = zip(others, starts, strict=True)
                where = [f"{who} from {shown(at, COSTS[key][1])}" for who, at in changes]
                said.append(f"Who leads by {COSTS[key][0]}: {first}, {', '.join(where)}.")
        if best is not given and 0 < 2 * (given.steps or 0) < (best.steps or 0):
            said.append(
                f"In these seconds the model as given made {given.steps:,.0f} steps, {best.name} "
                f"{best.steps:,.0f}: with more seconds another may lead."
            )
        if all(point.error is None for point in self.points):
            said.append("One seed each: no errors are known, and small differences may be chance.")
        return said

    def _leads(self, cost: str) -> list[tuple[str, float]]:
        """Return the side that leads among models that cost no more, wherever that changes.

        There is none if all models that have such a cost are of one side.
        """
        known = [(c, p) for p in self.points if (c := getattr(p, cost)) is not None]
        found: list[tuple[str, float]] = []
        for most in sorted({c for c, _ in known}):
            among = [p for c, p in known if c <= _ALIKE * most]
            fits = [[p for p in among if p.compressed == side] for side in SIDES]
            best = [self.best(side) for side in fits if side]
            is_level = len(best) == 2 and self.level(*best)
            found.append((_LEVEL if is_level else SIDES[self.best(best).compressed], most))
        first = [next(own) for _, own in groupby(found, key=lambda each: each[0])]
        return first if len({p.compressed for _, p in known}) == 2 else []

    def tables(self) -> list[printing.Table]:
        """Return a table with a row for each point, best first; the front by size has a star."""
        if not self.points:
            return []
        best = self.pareto("bytes")
        columns: dict[str, Callable[[FrontPoint], str]] = {
            "variant": lambda p: ("* " if p in best else "") + p.name,
            self.metric: self._shown,
            "parameters": lambda p: f"{p.params:,}",
            "on disk": lambda p: shown(p.bytes, "B"),
            "memory": lambda p: shown(p.memory, "B"),
            "a step": lambda p: shown(p.step_seconds, "s"),
            "a pass": lambda p: shown(p.forward_seconds, "s"),
            "steps": lambda p: "" if p.steps is None else f"{p.steps:,.0f}",
            "rate": lambda p: "" if p.rate is None else f"{p.rate:.2g}",
            "seeds": lambda p: str(p.seeds),
        }
        points = sorted(self.points, key=self._worse)
        title = f"{self.metric}, {'higher' if self.higher else 'lower'} is better"
        spare = ["seeds", "rate", "steps", "a pass", "a step", "memory"]
        return [printing.table_of(title, columns, points, spare=spare)]

    @property
    def heading(self) -> str:  # type: ignore[override]
        return "\n".join(self.answer())

    def summary(self) -> str:
        """Return how the variants were trained, and which are left out."""
        lines = [self.about]
        if self.points:
            lines.append("* no other is as small on disk and as good")
            lines[-1] += "; ± one standard error" * any(point.error for point in self.points)
        if any(point.family == "8-bits" for point in self.points):
            lines.append("bytes of eight bits are counted: the file there has the rounded weights")
        lines += [f"{point.name}: {point.note}" for point in self.points if point.note]
        lines += [f"left out: {reason}" for reason in self.left_out.values()]
        return "\n".join(filter(None, lines))

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for each :class:`FrontPoint`. Needs pandas."""
        return printing.data_frame(map(vars, self.points))

    def plot(
        self,
        library: Literal["matplotlib", "plotly"] = "matplotlib",
        costs: Sequence[str] = tuple(COSTS),
    ) -> Any:
        """Draw quality over each cost, dense and compressed told apart.

        Args:
            library: ``"matplotlib"`` draws a still picture with a panel for each cost;
                ``"plotly"`` one to zoom into, with a menu of costs: under the pointer a point
                shows its figures, its layers and how to train it on.
            costs: Keys of ``COSTS``: params, bytes, memory, step_seconds, forward_seconds.

        Returns:
            A figure of that library.

        Raises:
            ValueError: If ``library`` is neither of the two, a cost is unknown, or nothing was
                measured.
            MissingPackageError: If the library is not installed.
        """
        for cost in costs:
            if cost not in COSTS:
                raise ValueError(f"costs holds {cost!r}, which is none of {', '.join(COSTS)}")
        panels = [self.panel(cost) for cost in costs if self.pareto(cost)]
        if not panels:
            raise ValueError("no point has such a cost: nothing can be drawn")
        return draw(panels, library)

    def panel(self, cost: str) -> Panel:
        """Return the panel of a cost: dots of both sides, and a line through the best of each."""
        dots: dict[str, list[Dot]] = {}
        lines: dict[str, list[tuple[float, float]]] = {}
        known = [(c, p) for p in self.points if (c := getattr(p, cost)) is not None]
        most = max((c for c, _ in known), default=0.0)
        for compressed, side in SIDES.items():
            if own := [(c, p) for c, p in known if p.compressed == compressed]:
                dots[side] = [Dot(c, p.quality, p.name, self._facts(p), p.error) for c, p in own]
                front = replace(self, points=tuple(p for _, p in own)).pareto(cost)
                ends = [(getattr(p, cost), p.quality) for p in front]
                lines[side] = [*ends, (most, front[-1].quality)]
        name, unit = COSTS[cost]
        far = not self.higher and self._is_far
        better = f"{'higher' if self.higher else 'lower'} is better"
        return Panel(name, self.metric, dots, lines, unit, better, log=True, log_y=far, steps=True)

    @property
    def _is_far(self) -> bool:
        """Return whether the worst quality is several times the best, as perplexities may be."""
        least, most = (pick(point.quality for point in self.points) for pick in (min, max))
        return least > 0 and most > 3 * least

    def _facts(self, point: FrontPoint) -> tuple[str, ...]:
        facts = [f"<b>{point.name}</b>", f"{self.metric} {self._shown(point)}"]
        for key, (name, unit) in COSTS.items():
            if (cost := getattr(point, key)) is not None:
                facts.append(f"{name} {shown(cost, unit)}")
        facts += [f"rate {point.rate:.2g}, {point.steps:,.0f} steps"] if point.steps else []
        return (*facts, *filter(None, (point.layers, point.trains_on, point.note)))

    def _worse(self, point: FrontPoint) -> float:
        return -point.quality if self.higher else point.quality

    def _shown(self, point: FrontPoint) -> str:
        scale, digits = (100, 1) if self.metric == "accuracy" else (1, 3)
        if self.metric == "perplexity":
            digits = 2
        error = "" if point.error is None else f" ± {scale * point.error:.{digits}f}"
        return f"{scale * point.quality:.{digits}f}{' %' * (scale == 100 and not error)}{error}"

    def _described(self, point: FrontPoint) -> str:
        return f"{point.name}, {self.metric} {self._shown(point)}, {point.params:,} parameters"


def _lead(side: str) -> str:
    return "Both sides are level" if side == _LEVEL else f"{side.capitalize()} models lead"
