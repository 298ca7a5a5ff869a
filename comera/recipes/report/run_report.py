"""``comera report RUN``: one HTML file about one run, from nothing but what its folder holds.

Say what is missing or damaged in the folder of a run, of which its report shows less.

What the ranks of each layer were, are, and were in between.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comera.recipes.report import run_charts
from comera.recipes.report.comparison import show_difference, show_duration, show_metric, show_times
from comera.recipes.report.history import History, config_text, read_histories
from comera.recipes.report.page import SIDE, Axis, Chart, Table, write_page


def gaps(folder: Path, models: Sequence[History]) -> Iterator[str]:
    """Say what is missing or damaged, a sentence each.

    Args:
        folder: Folder of the run.
        models: The histories that were read there: the model's, then its dense twin's, if any.
    """
    if not (folder / "config.yaml").is_file():
        yield "config.yaml is missing: the settings are not shown."
    for model, place in zip(models, ("", "dense/"), strict=False):
        log, steps = folder / place / "metrics.jsonl", (model.result or {}).get("steps", 0)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        read = len(model.lines)
        if read + 1 < len(lines):  # a last line cut short is one that was being written
            yield (
                f"{place}metrics.jsonl is damaged in line {read + 1} of {len(lines)}: what was "
                "logged from there on is not shown."
            )
        elif model.last_step < steps:
            yield (
                f"{place}metrics.jsonl ends at step {model.last_step:,}, and the model was trained "
                f"for {steps:,}: what was logged later is not shown."
            )
        if model.result is not None and not (folder / place / "model.safetensors").is_file():
            yield (
                f"{place}model.safetensors is missing: comera train {folder} writes it again, from "
                "the last checkpoint."
            )


MOST_COLUMNS = 60
"""Steps shown at most."""


@dataclass(frozen=True)
class Bond:
    """One bond of a layer as a bar: its place, and rank before and now, in lengths of the bar.

    Attributes:
        start: Rank before training.
        now: Live rank.
        left: Where the bar begins, from 0 to ``SIDE``.
        width: Its length at the rank before training.
        filled: Its length at the live rank.
    """

    start: int
    now: int
    left: float
    width: float
    filled: float


@dataclass(frozen=True)
class Span:
    """Steps over which the live ranks of a layer stayed the same.

    Attributes:
        first: Step at which the span begins, from 0 on.
        last: Step at which it ends.
        ranks: Live ranks of the bonds.
        share: Their sum, as a share of that before training.
    """

    first: int
    last: int
    ranks: list[int]
    share: float


@dataclass(frozen=True)
class LayerRanks:
    """One layer.

    Attributes:
        name: Its name in the model.
        bonds: In the order of the cores.
        spans: In the order of the steps.
    """

    name: str
    bonds: list[Bond]
    spans: list[Span]

    @property
    def start(self) -> int:
        return sum(bond.start for bond in self.bonds)

    @property
    def now(self) -> int:
        return sum(bond.now for bond in self.bonds)


def layer_ranks(model: History) -> list[LayerRanks]:
    """Return the ranks of every layer that has bonds; nothing if none were logged.

    Bars are drawn to one scale: that of the layer with the most ranks before training. Of a long
    log, evenly spaced lines are taken.
    """
    logged = model.live_ranks
    layers = {name: ranks for name, ranks in model.start_ranks.items() if ranks}
    if not logged or not layers:
        return []
    every = np.array(list(logged))
    chosen = np.linspace(0, len(every) - 1, min(len(every), MOST_COLUMNS)).round().astype(int)
    steps = every[chosen].tolist()
    scale = SIDE / max(1, *map(sum, layers.values()))
    return [
        LayerRanks(
            name or "(model)",
            _bonds(start, model.ranks.get(name, start), scale),
            _spans(start, {step: logged[step].get(name, start) for step in steps}),
        )
        for name, start in layers.items()
    ]


def _bonds(start: Sequence[int], now: Sequence[int], scale: float) -> list[Bond]:
    lefts = np.cumsum([0, *start])[:-1].tolist()
    return [
        Bond(before, live, round(left * scale, 1), round(before * scale, 1), round(live * scale, 1))
        for left, before, live in zip(lefts, start, now, strict=True)
    ]


def _spans(start: Sequence[int], ranks_at: dict[int, list[int]]) -> list[Span]:
    """Put steps together whose ranks are the same; each step reaches back to the one before it."""
    spans: list[Span] = []
    before = 0
    for step, ranks in ranks_at.items():
        if spans and spans[-1].ranks == ranks:
            before = spans.pop().first
        spans.append(Span(before, step, ranks, sum(ranks) / max(1, sum(start))))
        before = step
    return spans


_MEASURED = {"metrics": "evaluation", "test": "test"}
"""What a result has figures of: the data that choices are made by, and those kept apart."""


@dataclass(frozen=True)
class RunReport:
    """What ``run.html`` shows; a part that is empty or None is left out.

    Attributes:
        title: Heading of the page.
        findings: What came of the run, in sentences.
        gaps: What of the folder is missing or damaged, in sentences.
        unfinished: How far the models are that still train.
        figures: Finished models side by side.
        losses: Loss and other figures of the evaluations over steps and seconds.
        sizes: Loss against size, size over steps.
        ranks: Ranks of every layer.
        steps: The axis of the steps, below ranks over time.
        rate: Learning rate.
        layers: The tensor-train layers, or their ranks so far.
        settings: The configuration as it was written down.
    """

    title: str
    findings: list[str]
    gaps: list[str]
    unfinished: list[str]
    figures: Table | None
    losses: list[Chart]
    sizes: list[Chart]
    ranks: list[LayerRanks]
    steps: Axis
    rate: Chart | None
    layers: Table | None
    settings: str | None


def write_report(folder: Path, say: Callable[[str], object] = lambda text: None) -> Path:
    """Write ``report.html`` into a run folder, finished or not; whole, or not at all.

    Args:
        folder: Folder of a run, holding ``metrics.jsonl`` and, as far as they are there,
            ``config.yaml``, ``result.json`` and the twin's folder ``dense``.
        say: Called with each sentence on what of that is missing or damaged, as the page has it.

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If its settings or its result are damaged.
    """
    path, report = folder / "report.html", gather(folder)
    write_page(path, "run.html", report)
    for text in report.gaps:
        say(text)
    return path


def gather(folder: Path) -> RunReport:
    """Read a run folder and return all that its page shows.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If its settings or its result are damaged.
    """
    models = read_histories(folder)
    model, results = models[0], [each.result for each in models if each.result is not None]
    others = dict.fromkeys(key for each in models for key in each.evaluations if key != "loss")
    losses = [
        run_charts.loss_by_step(models),
        *(run_charts.metric_by_step(models, key) for key in others),
        run_charts.loss_by_clock(models),
    ]
    sizes = [run_charts.loss_by_size(models), run_charts.size_by_step(model)]
    return RunReport(
        title=f"Run {folder.resolve().name}",
        findings=_findings(model.result, results[1:]) if model.result else [],
        gaps=list(gaps(folder, models)),
        unfinished=[_so_far(each) for each in models if each.result is None],
        figures=_figures(results) if results else None,
        losses=[chart for chart in losses if chart],
        sizes=[chart for chart in sizes if chart],
        ranks=layer_ranks(model),
        steps=run_charts.steps_axis(models),
        rate=run_charts.rate_by_step(models),
        layers=_layers(model.result) if model.result else _layers_so_far(model),
        settings=config_text(folder),
    )


def _findings(facts: dict[str, Any], twins: Sequence[dict[str, Any]]) -> list[str]:
    """Say what came of a finished model, beside its dense twin if that is finished too."""
    out = [f"Trained for {facts['steps']:,} steps in {show_duration(facts['seconds'])}."]
    if facts["layers"]:
        dense, stored = facts["layer_dense_params"], facts["layer_params"]
        out.append(
            f"Its {len(facts['layers'])} tensor-train layers store {stored:,} parameters in place "
            f"of {dense:,} in dense layers, {_ratio(dense, stored)} times fewer."
        )
    for twin in twins:
        for part, data in _MEASURED.items():
            out += [
                f"Its {data} {key} is {show_metric(key, value)}, "
                f"{show_difference(key, value, other)} the dense twin's {show_metric(key, other)}."
                for key, value in facts.get(part, {}).items()
                if math.isfinite(value)
                and math.isfinite(other := twin.get(part, {}).get(key, math.nan))
            ]
        out.append(
            f"The whole model has {facts['params']:,} parameters, "
            f"{show_times(twin['params'], facts['params'], 'fewer', 'more')} than the dense twin's "
            f"{twin['params']:,}."
        )
        pace, other = (each["seconds"] / each["steps"] for each in (facts, twin))
        out.append(
            f"By the wall clock a training step takes {pace:.3g} seconds, "
            f"{show_times(other, pace, 'faster', 'slower')} than the dense twin's {other:.3g}."
        )
    return out


def _so_far(model: History) -> str:
    text = f"The {model.name} model is unfinished"
    if model.failure is not None:
        text = f"The {model.name} model failed: {model.failure}. It is unfinished"
    if not model.lines:
        return f"{text}: nothing has been logged yet."
    text += f": step {model.last_step:,}"
    for key in ("loss", *(f"eval/{name}" for name in model.evaluations)):
        if series := model.series(key):
            name = "training loss" if key == "loss" else key.replace("eval/", "evaluation ")
            text += f", {name} {series[-1][1]:.4f}"
    return f"{text}."


def _figures(results: Sequence[dict[str, Any]]) -> Table:
    """Set figures of the finished models side by side."""
    rows = []

    def row(label: str, values: list[Any], form: str, ratio: bool = True) -> None:
        cells = ["–" if value is None else form.format(value) for value in values]
        if len(results) == 2:
            known = ratio and None not in values
            cells.append(_ratio(values[1], values[0], 2) if known else "")
        rows.append([label, *cells])

    for part, data in _MEASURED.items():
        for key in dict.fromkeys(key for facts in results for key in facts.get(part, {})):
            row(f"{data} {key}", [facts.get(part, {}).get(key) for facts in results], "{:,.4f}")
    for label, key, form in (
        ("parameters", "params", "{:,}"),
        ("parameters of the tensorised layers", "layer_params", "{:,}"),
        ("bytes of the file", "bytes", "{:,}"),
        ("seconds in training steps", "seconds", "{:,.1f}"),
    ):
        row(label, [facts[key] for facts in results], form)
    row("seconds a step", [facts["seconds"] / facts["steps"] for facts in results], "{:.3g}")
    row("steps", [facts["steps"] for facts in results], "{:,}", ratio=False)
    more = ["ratio"] if len(results) == 2 else []
    return Table(["", *(facts["name"] for facts in results), *more], rows)


def _layers(facts: dict[str, Any]) -> Table | None:
    """List the tensor-train layers of a finished model."""
    rows = [
        [
            layer["name"] or "(model)",
            layer["kind"],
            layer["modes"],
            _arrow(layer["start_ranks"], layer["ranks"]),
            f"{layer['dense_params']:,}",
            f"{layer['params']:,}",
            _ratio(layer["dense_params"], layer["params"]),
        ]
        for layer in facts["layers"]
    ]
    if not rows:
        return None
    dense, stored = facts["layer_dense_params"], facts["layer_params"]
    total = ["total", "", "", "", f"{dense:,}", f"{stored:,}", _ratio(dense, stored)]
    header = ["layer", "type", "modes", "ranks", "dense", "stored", "ratio"]
    return Table(header, rows, text_columns=4, total=total)


def _layers_so_far(model: History) -> Table | None:
    """List the layers of an unfinished model: only their ranks are known."""
    rows = [
        [name or "(model)", _arrow(start, model.ranks[name])]
        for name, start in model.start_ranks.items()
    ]
    return Table(["layer", "ranks, first logged → now"], rows, text_columns=2) if rows else None


def _arrow(start: Sequence[int], end: Sequence[int]) -> str:
    before, after = (" ".join(map(str, ranks)) for ranks in (start, end))
    return before if before == after else f"{before} → {after}"


def _ratio(over: float, under: float, digits: int = 1) -> str:
    """Return a ratio as text, blank where there is nothing left to divide by."""
    return f"{over / under:,.{digits}f}" if under else ""
