"""Write one HTML file about a run from the files of its folder (``comera report RUN``)."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comera.planning.printing import Table
from comera.recipes.parse import read_yaml
from comera.recipes.report import page
from comera.recipes.run_config import RANK_SECTIONS
from comera.recipes.run_folder import outcome_cells, read_result
from comera.train.log import read_metrics
from comera.train.loop import SILENT

MOST_POINTS = 150  # most points of a line: more cannot be told apart, and make the page large
MOST_COLUMNS = 60  # most steps at which ranks are shown
_STAGES = {"late": "late stage", "done": "ranks truncated"}

_IN_EVERY_RESULT = (
    "name", "metrics", "params", "layer_params", "layer_dense_params", "bytes", "seconds", "steps",
    "layers",
)  # fmt: skip

Series = list[tuple[int, float]]  # optimizer steps, each with the value logged after it


@dataclass(frozen=True)
class History:
    """The log and the result of one model of a run."""

    name: str  # compressed, dense, or model if the folder does not tell
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None = None  # None while it is unfinished
    target_share: float | None = None  # of rank learning, of the size at the start
    look: str = ""  # class of the style sheet; its name if not given

    def series(self, key: str) -> Series:
        found = [line for line in self.lines if isinstance(line.get(key), int | float)]
        return [(line["step"], line[key]) for line in found]

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines if "failed" not in line), default=0)

    @property
    def failure(self) -> str | None:
        return next((line["failed"] for line in self.lines if "failed" in line), None)

    @property
    def evaluations(self) -> list[str]:
        """Names of the evaluations, without the leading ``eval/``."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return [key.removeprefix("eval/") for key in keys if key.startswith("eval/")]

    @property
    def stages(self) -> list[tuple[str, int, int]]:
        """Stages of rank learning with their first and last step."""
        starts: list[tuple[str, int]] = []
        for line in self.lines:
            if "stage" in line and (not starts or starts[-1][0] != line["stage"]):
                starts.append((line["stage"], line["step"] if starts else 0))
        ends = [step for _, step in starts[1:]] + [self.last_step]
        return [(name, step, end) for (name, step), end in zip(starts, ends, strict=True)]

    @property
    def live_ranks(self) -> dict[int, dict[str, list[int]]]:
        """Ranks of each bond that are not pruned, by step and layer."""
        return {line["step"]: line["live_ranks"] for line in self.lines if "live_ranks" in line}

    @property
    def start_ranks(self) -> dict[str, list[int]]:
        """Ranks by layer before training; without a result, the ranks first logged."""
        if self.result is not None:
            return {layer["name"]: layer["start_ranks"] for layer in self.result["layers"]}
        return next(iter(self.live_ranks.values()), {})

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Ranks by layer after training; without a result, the ranks last logged."""
        if self.result is not None:
            return {layer["name"]: layer["ranks"] for layer in self.result["layers"]}
        return next(reversed(self.live_ranks.values()), {})

    @property
    def target_size(self) -> int | None:
        """Entries that the cores may have at the end; an estimate before truncation."""
        reached, sizes = self.series("target_size"), self.series("size")
        if reached:
            return int(reached[-1][1])
        if self.target_share is None or not sizes:
            return None
        return math.floor(self.target_share * sizes[0][1])


def read_histories(folder: Path) -> list[History]:
    """Return the model of a run and its dense twin, if there is one."""
    lines, result = read_metrics(folder), _result(folder)
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    name = ("compressed" if config.get("tensorize") else "dense") if config else "model"
    name = name if result is None else result["name"]
    sections = [s for name in RANK_SECTIONS if isinstance(s := config.get(name), dict)]
    share = next((section["target"] for section in sections if "target" in section), None)
    found, twin = [History(name, lines, result, share)], folder / "dense"
    if (twin / "metrics.jsonl").is_file():
        found.append(History("dense", read_metrics(twin), _result(twin)))
    return found


def _result(folder: Path) -> dict[str, Any] | None:
    if not (folder / "result.json").is_file():
        return None
    result = read_result(folder)
    if lacking := [key for key in _IN_EVERY_RESULT if key not in result]:
        raise ValueError(f"{folder / 'result.json'} is damaged: it lacks {', '.join(lacking)}")
    return result


def loss_by_step(models: Sequence[History]) -> page.Chart | None:
    caption = (
        "Each point of a line is the mean training loss since the one before it. Dots are "
        "evaluations on data the model was not trained on. Lower is better."
    )
    lines = [line for model in models for line in _losses(model)]
    return _chart("Loss over the optimizer steps", caption, steps_axis(models), "loss", lines)


def loss_by_clock(models: Sequence[History]) -> page.Chart | None:
    caption = (
        "Training loss by the seconds spent in training steps, without evaluation and saving; "
        "dots are evaluations. Further left is faster."
    )
    lines = []
    for model in models:
        if logged := model.series("seconds"):
            known, seconds = zip(*logged, strict=True)
            for line in _losses(model):
                steps = [point.x for point in line.points]
                places = np.interp(steps, (0, *known), (0.0, *seconds)).tolist()
                points = [
                    dataclasses.replace(point, x=x, text=f"{point.text}, {x:,.1f} seconds")
                    for point, x in zip(line.points, places, strict=True)
                ]
                lines.append(dataclasses.replace(line, points=points))
    return _chart("Loss by the wall clock", caption, "seconds in training steps", "loss", lines)


def metric_by_step(models: Sequence[History], key: str) -> page.Chart | None:
    """Draw a metric of the evaluations over the steps; None if no model has two evaluations."""
    found = [(model, _finite(model.series(f"eval/{key}"))) for model in models]
    if all(len(series) < 2 for _, series in found):
        return None
    lines = [_line(model, key, series, dots=True) for model, series in found]
    title, caption = f"Evaluation: {key}", "On data the model was not trained on."
    return _chart(title, caption, steps_axis(models), key, lines, log=key == "perplexity")


def size_by_step(model: History) -> page.Chart | None:
    """Draw the entries of the cores over the steps, with the target as line and shaded stages."""

    def line(name: str, series: Series, look: str) -> page.Line:
        return page.Line(name, look, _points(name, series, "{:,.0f}"))

    exact, relaxed = (_picked(_finite(model.series(key))) for key in ("size", "relaxed_size"))
    if not exact:
        return None
    lines = [line("exact size", exact, model.name), line("relaxed size", relaxed, "relaxed")]
    if model.target_size is not None:
        target = [(step, float(model.target_size)) for step in (0, model.last_step)]
        lines.append(line("target", target, "target"))
    bands = [
        page.Band(_STAGES[stage], stage, start, end)
        for stage, start, end in model.stages
        if stage in _STAGES and end > start
    ]
    caption = (
        "Entries in the cores of all tensor-train layers. The exact size counts the ranks whose "
        "gate is above its threshold; the relaxed size adds up the gates themselves, which "
        "training can lower smoothly. In the late stage the size is regularised towards the "
        "target; then closed ranks are cut away and the rest goes on training. "
    )
    if done := next((line for line in model.lines if "target_size" in line), None):
        caption += (
            f"From {done['start_size']:,} entries to {done['size']:,}; "
            f"the target was {done['target_size']:,}."
        )
        if done["forced"]:
            caption += (
                f" The rank objective had come to {done['reached']:,}; {done['forced']:,} ranks "
                "were still open then and were closed by how little they carried."
            )
    else:
        caption += "The target shown is the share asked for, of the size first logged."
    title, label = "Size over the optimizer steps", "entries in the cores"
    return _chart(title, caption, steps_axis([model]), label, lines, zero=True, bands=bands)


def rate_by_step(models: Sequence[History]) -> page.Chart | None:
    caption = "Of the weights. The gates of the ranks have a constant rate."
    rates = [(model, _picked(_finite(model.series("lr")))) for model in models]
    lines = [_line(model, "learning rate", series, "{:.3g}") for model, series in rates]
    title, label = "Learning rate over the optimizer steps", "learning rate"
    return _chart(title, caption, steps_axis(models), label, lines, zero=True)


def steps_axis(models: Sequence[History]) -> page.Axis:
    return page.Axis("optimizer step", 0, max(1, *(model.last_step for model in models)))


def _chart(
    title: str,
    caption: str,
    x: page.Axis | str,
    y: str,
    lines: Sequence[page.Line],
    bands: Sequence[page.Band] = (),
    **up: bool,
) -> page.Chart | None:
    """Return a chart of lines with fitting axes; None if no line has a point."""
    shown = [line for line in lines if line.points]
    points = [point for line in shown for point in line.points]
    if not points:
        return None
    if isinstance(x, str):
        x = page.axis_around(x, [point.x for point in points], zero=True)
    up_axis = page.axis_around(y, [point.y for point in points], **up)
    return page.Chart(title, caption, x, up_axis, shown, bands)


def _losses(model: History) -> list[page.Line]:
    training, measured = (_finite(model.series(key)) for key in ("loss", "eval/loss"))
    return [
        _line(model, "training loss", _averaged(training)),
        _line(model, "evaluation loss", measured, joined=False, dots=True),
    ]


def _line(
    model: History, what: str, series: Series, form: str = "{:,.4f}", **look: Any
) -> page.Line:
    name = f"{model.name}, {what}"
    return page.Line(name, model.look or model.name, _points(name, series, form), **look)


def _points(name: str, series: Series, form: str) -> list[page.Point]:
    return [
        page.Point(step, value, f"{name}: {form.format(value)}, step {step:,}")
        for step, value in series
    ]


def _finite(series: Series) -> Series:
    return [(step, value) for step, value in series if math.isfinite(value)]


def _averaged(series: Series) -> Series:
    """Average neighbouring values to at most ``MOST_POINTS``, each at its last step."""
    groups = np.array_split(np.arange(len(series)), max(1, min(len(series), MOST_POINTS)))
    return [
        (series[group[-1]][0], statistics.fmean(series[k][1] for k in group))
        for group in groups
        if len(group)
    ]


def _picked(items: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """Return at most ``most`` items of a sequence, evenly spaced and including both ends."""
    chosen = np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int)
    return [items[k] for k in chosen]


def write_report(folder: Path, say: Callable[[str], object] = lambda text: None) -> Path:
    """Write ``report.html`` into the folder of a run, finished or not, and return its path.

    ``say`` is called with a sentence for each file that is missing or damaged. Raises
    ``FileNotFoundError`` without a run, and ``ValueError`` for damaged settings or results.
    """
    report = gather(folder)
    path = page.write_page(folder / "report.html", "run.html", report)
    for text in report["gaps"]:
        say(text)
    return path


def gather(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.html``, which leaves out what is empty or None."""
    models = read_histories(folder)
    model, results = models[0], [each.result for each in models if each.result is not None]
    others = dict.fromkeys(key for each in models for key in each.evaluations if key != "loss")
    metrics = [metric_by_step(models, key) for key in others]
    config = folder / "config.yaml"
    figures = Table("Figures of the finished models", *outcome_cells(results))
    return {
        "title": f"Run {folder.resolve().name}",
        "findings": _findings(model.result, results[1:]) if model.result else [],
        "gaps": list(_gaps(folder, models)),
        "unfinished": [_progress(each) for each in models if each.result is None],
        "figures": figures if results else None,
        "losses": [loss_by_step(models), *metrics, loss_by_clock(models)],
        "sizes": [size_by_step(model)],
        "ranks": layer_ranks(model),
        "steps": steps_axis(models),
        "rate": rate_by_step(models),
        "layers": _layers(model),
        "settings": config.read_text(encoding="utf-8") if config.is_file() else None,
    }


def _gaps(folder: Path, models: Sequence[History]) -> Iterator[str]:
    """Yield sentences on a model that answers nothing, and on missing and damaged files."""
    if not (folder / "config.yaml").is_file():
        yield "config.yaml is missing: the settings are not shown."
    for model, place in zip(models, ("", "dense/"), strict=False):
        log, steps = folder / place / "metrics.jsonl", (model.result or {}).get("steps", 0)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        read = len(model.lines)
        if (spread := model.series("spread")) and spread[-1][1] < SILENT:
            yield (
                f"the {model.name} model answers the same to every input: at step "
                f"{spread[-1][0]:,} its probabilities differ by a share of "
                f"{spread[-1][1]:.1g} within a batch."
            )
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
    """Return sentences about a finished model, compared with its dense twin if finished."""
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
        for part, data in {"metrics": "evaluation", "test": "test"}.items():
            out += [
                f"Its {data} {key} is {page.show_metric(key, value)}, "
                f"{page.show_difference(key, value, other)} the dense twin's "
                f"{page.show_metric(key, other)}."
                for key, value in facts.get(part, {}).items()
                if math.isfinite(value)
                and math.isfinite(other := twin.get(part, {}).get(key, math.nan))
            ]
        out.append(
            f"The whole model has {facts['params']:,} parameters, "
            f"{page.show_times(twin['params'], facts['params'], 'fewer', 'more')} than the dense "
            f"twin's {twin['params']:,}."
        )
        pace, other = (each["seconds"] / each["steps"] for each in (facts, twin))
        out.append(
            f"By the wall clock a training step takes {pace:.3g} seconds, "
            f"{page.show_times(other, pace, 'faster', 'slower')} than the dense twin's {other:.3g}."
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
    """A span of steps over which the unpruned ranks of a layer stayed the same."""

    first: int
    last: int
    ranks: list[int]
    share: float  # their sum over that before training


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of one layer: their sum before training and now, and spans of steps at equal ranks."""

    name: str
    start: int
    now: int
    spans: list[Span]


def layer_ranks(model: History) -> list[LayerRanks]:
    """Return the logged ranks of every layer; long logs are sampled evenly."""
    logged = model.live_ranks
    layers: list[LayerRanks] = []
    for name, start in model.start_ranks.items() if logged else ():
        spans: list[Span] = []
        before = 0
        for step in _picked(list(logged), MOST_COLUMNS):  # each reaches back to the one before it
            ranks = logged[step].get(name, start)
            if spans and spans[-1].ranks == ranks:
                before = spans.pop().first
            spans.append(Span(before, step, ranks, sum(ranks) / max(1, sum(start))))
            before = step
        now = sum(model.ranks.get(name, start))
        layers.append(LayerRanks(name or "(model)", sum(start), now, spans))
    return layers


def _layers(model: History) -> Table | None:
    """Return a table of the tensor-train layers; of an unfinished model only with their ranks."""
    if model.result is None:
        ranks = [
            [name or "(model)", _arrow(start, model.ranks[name])]
            for name, start in model.start_ranks.items()
        ]
        header = ["layer", "ranks, first logged → now"]
        return Table("Layers", header, ranks, left=range(2)) if ranks else None
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
    rows.append(["total", "", "", "", f"{dense:,}", f"{stored:,}", _ratio(dense, stored)])
    header = ["layer", "type", "modes", "ranks", "dense", "stored", "ratio"]
    return Table("Layers", header, rows, left=range(4), total=True)


def _arrow(start: Sequence[int], end: Sequence[int]) -> str:
    before, after = (" ".join(map(str, ranks)) for ranks in (start, end))
    return before if before == after else f"{before} → {after}"


def _ratio(over: float, under: float) -> str:
    return f"{over / under:,.1f}" if under else ""
