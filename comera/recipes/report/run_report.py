"""``comera report RUN``: one HTML file about one run, from the files of its folder."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comera.recipes.folder import outcome_cells
from comera.recipes.report import run_charts
from comera.recipes.report.comparison import show_difference, show_metric, show_times
from comera.recipes.report.page import Table, write_page
from comera.recipes.report.run_charts import History, read_histories

MOST_COLUMNS = 60
"""Most steps at which ranks are shown."""

_MEASURED = {"metrics": "evaluation", "test": "test"}
"""Keys of figures in a result, and the data that they are of."""


def write_report(folder: Path, say: Callable[[str], object] = lambda text: None) -> Path:
    """Write ``report.html`` into the folder of a run, finished or not, and return its path.

    ``say`` is called with a sentence for each file that is missing or damaged.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If its settings or its result are damaged.
    """
    path, report = folder / "report.html", gather(folder)
    write_page(path, "run.html", report)
    for text in report["gaps"]:
        say(text)
    return path


def gather(folder: Path) -> dict[str, Any]:
    """Return what ``run.html`` shows; it leaves out what is empty or None."""
    models = read_histories(folder)
    model, results = models[0], [each.result for each in models if each.result is not None]
    others = dict.fromkeys(key for each in models for key in each.evaluations if key != "loss")
    losses = [
        run_charts.loss_by_step(models),
        *(run_charts.metric_by_step(models, key) for key in others),
        run_charts.loss_by_clock(models),
    ]
    sizes = [run_charts.loss_by_size(models), run_charts.size_by_step(model)]
    config = folder / "config.yaml"
    return {
        "title": f"Run {folder.resolve().name}",
        "findings": _findings(model.result, results[1:]) if model.result else [],
        "gaps": list(_gaps(folder, models)),
        "unfinished": [_progress(each) for each in models if each.result is None],
        "figures": Table(*outcome_cells(results)) if results else None,
        "losses": [chart for chart in losses if chart],
        "sizes": [chart for chart in sizes if chart],
        "ranks": layer_ranks(model),
        "steps": run_charts.steps_axis(models),
        "rate": run_charts.rate_by_step(models),
        "layers": _layers(model),
        "settings": config.read_text(encoding="utf-8") if config.is_file() else None,
    }


def _gaps(folder: Path, models: Sequence[History]) -> Iterator[str]:
    """Describe what is missing or damaged in the folder, of the model and its dense twin."""
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


def _findings(facts: dict[str, Any], twins: Sequence[dict[str, Any]]) -> list[str]:
    """Describe a finished model in sentences, beside its dense twin if that is finished too."""
    duration = f"{facts['seconds']:.1f} seconds"
    if facts["seconds"] >= 120:
        minutes = facts["seconds"] / 60
        duration = f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
    out = [f"Trained for {facts['steps']:,} steps in {duration}."]
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


def _progress(model: History) -> str:
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


@dataclass(frozen=True)
class Span:
    """Steps ``first`` to ``last`` over which the live ranks of a layer stayed the same.

    ``share`` is the sum of the ranks over that before training.
    """

    first: int
    last: int
    ranks: list[int]
    share: float


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of one layer: sums over its bonds before training and now, and the spans between."""

    name: str
    start: int
    now: int
    spans: list[Span]


def layer_ranks(model: History) -> list[LayerRanks]:
    """Return the logged ranks of every layer that has bonds; a long log is sampled evenly."""
    logged = model.live_ranks
    every = np.array(list(logged), int)
    chosen = np.linspace(0, len(every) - 1, min(len(every), MOST_COLUMNS)).round().astype(int)
    layers: list[LayerRanks] = []
    for name, start in model.start_ranks.items() if logged else ():
        if not start:
            continue
        spans: list[Span] = []
        before = 0
        for step in every[chosen].tolist():  # each reaches back to the one before it
            ranks = logged[step].get(name, start)
            if spans and spans[-1].ranks == ranks:
                before = spans.pop().first
            spans.append(Span(before, step, ranks, sum(ranks) / max(1, sum(start))))
            before = step
        now = sum(model.ranks.get(name, start))
        layers.append(LayerRanks(name or "(model)", sum(start), now, spans))
    return layers


def _layers(model: History) -> Table | None:
    """List the tensor-train layers; of an unfinished model only their ranks are known."""
    if model.result is None:
        ranks = [
            [name or "(model)", _arrow(start, model.ranks[name])]
            for name, start in model.start_ranks.items()
        ]
        header = ["layer", "ranks, first logged → now"]
        return Table(header, ranks, text_columns=2) if ranks else None
    facts = model.result
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


def _arrow(start: Sequence[int], end: Sequence[int]) -> str:
    before, after = (" ".join(map(str, ranks)) for ranks in (start, end))
    return before if before == after else f"{before} → {after}"


def _ratio(over: float, under: float) -> str:
    """Return a ratio as text, empty for a divisor of 0."""
    return f"{over / under:,.1f}" if under else ""
