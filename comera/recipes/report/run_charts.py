"""Logs of a run's models as series, and the charts drawn from them."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comera.recipes.folder import read_result
from comera.recipes.parse import read_yaml
from comera.recipes.report.page import Axis, Band, Chart, Line, Point, axis_around
from comera.recipes.run_config import RANK_SECTIONS
from comera.train.log import read_metrics

MOST_POINTS = 150
"""Most points of a line: more cannot be told apart, and make the page large."""

_STAGES = {"late": "late stage", "done": "ranks truncated"}

_IN_EVERY_RESULT = (
    "name", "metrics", "params", "layer_params", "layer_dense_params", "bytes", "seconds", "steps",
    "layers",
)  # fmt: skip

Series = list[tuple[int, float]]
"""Optimizer steps, each with the value logged after it."""


@dataclass(frozen=True)
class History:
    """Log and result of one model.

    ``name`` is ``compressed``, ``dense``, or ``model`` if the folder does not say; ``result`` is
    None while it is unfinished; ``target_share`` is the target of rank learning, as a share of the
    size at the start.
    """

    name: str
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None = None
    target_share: float | None = None

    def series(self, key: str) -> Series:
        """Return the values logged under ``key``, with their steps."""
        found = [line for line in self.lines if isinstance(line.get(key), int | float)]
        return [(line["step"], line[key]) for line in found]

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines if "failed" not in line), default=0)

    @property
    def failure(self) -> str | None:
        """Why training failed; None if it can still be finished."""
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
        """Live rank of each bond, by step and layer."""
        return {line["step"]: line["live_ranks"] for line in self.lines if "live_ranks" in line}

    @property
    def start_ranks(self) -> dict[str, list[int]]:
        """Ranks by layer before training, or those first logged without a result."""
        if self.result is not None:
            return {layer["name"]: layer["start_ranks"] for layer in self.result["layers"]}
        return next(iter(self.live_ranks.values()), {})

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Ranks by layer after training, or those last logged without a result."""
        if self.result is not None:
            return {layer["name"]: layer["ranks"] for layer in self.result["layers"]}
        return next(reversed(self.live_ranks.values()), {})

    @property
    def target_size(self) -> int | None:
        """Entries that cores may have at the end; estimated until truncation."""
        reached, sizes = self.series("target_size"), self.series("size")
        if reached:
            return int(reached[-1][1])
        if self.target_share is None or not sizes:
            return None
        return math.floor(self.target_share * sizes[0][1])


def read_histories(folder: Path) -> list[History]:
    """Return the model of a run and, where there is one, its dense twin.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If a file in it is damaged.
    """
    lines = read_metrics(folder)
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    result = _result(folder)
    if result is not None:
        name = result["name"]
    else:
        name = ("compressed" if config.get("tensorize") else "dense") if config else "model"
    sections = [s for name in RANK_SECTIONS if isinstance(s := config.get(name), dict)]
    share = next((section["target"] for section in sections if "target" in section), None)
    found = [History(name, lines, result, share)]
    twin = folder / "dense"
    if (twin / "metrics.jsonl").is_file():
        found.append(History("dense", read_metrics(twin), _result(twin)))
    return found


def _result(folder: Path) -> dict[str, Any] | None:
    if not (folder / "result.json").is_file():
        return None
    result = read_result(folder)
    lacking = [key for key in _IN_EVERY_RESULT if key not in result]
    if lacking:
        raise ValueError(f"{folder / 'result.json'} is damaged: it lacks {', '.join(lacking)}")
    return result


def loss_by_step(models: Sequence[History]) -> Chart | None:
    """Draw training and evaluation loss of each model over the optimizer steps."""
    caption = (
        "Each point of a line is the mean training loss since the one before it. Dots are "
        "evaluations on data the model was not trained on. Lower is better."
    )
    lines = [line for model in models for line in _losses(model)]
    return _chart("Loss over the optimizer steps", caption, steps_axis(models), "loss", lines)


def loss_by_clock(models: Sequence[History]) -> Chart | None:
    """Draw the same losses over the time in training steps."""
    caption = (
        "The same by the wall clock: seconds spent in training steps, without evaluation and "
        "saving. Further left is faster."
    )
    lines = []
    for model in models:
        if logged := model.series("seconds"):
            known, seconds = zip(*logged, strict=True)
            for line in _losses(model):
                steps = [point.x for point in line.points]
                places = np.interp(steps, (0, *known), (0.0, *seconds)).tolist()
                lines.append(_moved(line, places, "{:,.1f} seconds"))
    return _chart("Loss by the wall clock", caption, "seconds in training steps", "loss", lines)


def metric_by_step(models: Sequence[History], key: str) -> Chart | None:
    """Draw a figure of the evaluations over the steps; None if no model has two of them."""
    found = [(model, _finite(model.series(f"eval/{key}"))) for model in models]
    if all(len(series) < 2 for _, series in found):
        return None
    lines = [_line(model, key, series, dots=True) for model, series in found]
    title, caption = f"Evaluation: {key}", "On data the model was not trained on."
    return _chart(title, caption, steps_axis(models), key, lines, log=key == "perplexity")


def loss_by_size(models: Sequence[History]) -> Chart | None:
    """Draw the loss of the compressed model against its size, and where each model ended."""
    model, twins = models[0], models[1:]
    sizes = dict(_finite(model.series("size")))
    if not sizes:
        return None
    losses = [(s, loss) for s, loss in _averaged(_finite(model.series("loss"))) if s in sizes]
    way = _line(model, "training loss", losses)
    lines = [_moved(way, [sizes[step] for step, _ in losses], "{:,.0f} entries")]
    ends = [(model, list(sizes.values())[-1])]
    ends += [(twin, twin.result["layer_params"]) for twin in twins if twin.result]
    for each, size in ends:
        last = _finite(each.series("eval/loss"))[-1:]
        line = _line(each, "last evaluation", last, joined=False, dots=True)
        lines.append(_moved(line, [size] * len(last), "{:,.0f} entries"))
    caption = (
        "Further left is smaller, lower is better. Training comes down at full size, then gives "
        "up entries where they cost the least loss, and goes on at the size that is left."
    )
    if len(ends) > 1:
        caption += " The dense twin stands at the size of the weights that the cores replace."
    return _chart("Loss against size", caption, "entries in the cores", "loss", lines, log_x=True)


def size_by_step(model: History) -> Chart | None:
    """Draw entries in the cores over the steps, the target as a line, the stages shaded."""

    def line(name: str, series: Series, look: str) -> Line:
        return Line(name, look, _points(name, series, "{:,.0f}"))

    exact, relaxed = (_picked(_finite(model.series(key))) for key in ("size", "relaxed_size"))
    if not exact:
        return None
    lines = [line("exact size", exact, model.name), line("relaxed size", relaxed, "relaxed")]
    if model.target_size is not None:
        target = [(step, float(model.target_size)) for step in (0, model.last_step)]
        lines.append(line("target", target, "target"))
    bands = [
        Band(_STAGES[stage], stage, start, end)
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


def rate_by_step(models: Sequence[History]) -> Chart | None:
    """Draw the learning rate of each model over the steps."""
    caption = "Of the weights. The gates of the ranks have a constant rate."
    rates = [(model, _picked(_finite(model.series("lr")))) for model in models]
    lines = [_line(model, "learning rate", series, "{:.3g}") for model, series in rates]
    title, label = "Learning rate over the optimizer steps", "learning rate"
    return _chart(title, caption, steps_axis(models), label, lines, zero=True)


def steps_axis(models: Sequence[History]) -> Axis:
    """Return the axis that all charts over steps share."""
    return Axis("optimizer step", 0, max(1, *(model.last_step for model in models)))


def _chart(
    title: str,
    caption: str,
    x: Axis | str,
    y: str,
    lines: Sequence[Line],
    log_x: bool = False,
    bands: Sequence[Band] = (),
    **up: bool,
) -> Chart | None:
    """Draw lines over axes that fit them; None if no line has a point."""
    shown = [line for line in lines if line.points]
    points = [point for line in shown for point in line.points]
    if not points:
        return None
    if isinstance(x, str):
        x = axis_around(x, [point.x for point in points], log=log_x, zero=not log_x)
    up_axis = axis_around(y, [point.y for point in points], **up)
    return Chart(title, caption, x, up_axis, shown, bands)


def _losses(model: History) -> list[Line]:
    training, measured = (_finite(model.series(key)) for key in ("loss", "eval/loss"))
    return [
        _line(model, "training loss", _averaged(training)),
        _line(model, "evaluation loss", measured, joined=False, dots=True),
    ]


def _line(model: History, what: str, series: Series, form: str = "{:,.4f}", **look: Any) -> Line:
    """Return a line over the steps, in the colour of a model."""
    name = f"{model.name}, {what}"
    return Line(name, model.name, _points(name, series, form), **look)


def _points(name: str, series: Series, form: str) -> list[Point]:
    return [
        Point(step, value, f"{name}: {form.format(value)}, step {step:,}") for step, value in series
    ]


def _moved(line: Line, places: Sequence[float], form: str) -> Line:
    """Return a line along another horizontal axis, whose values are added to the points' text."""
    points = [
        dataclasses.replace(point, x=x, text=f"{point.text}, {form.format(x)}")
        for point, x in zip(line.points, places, strict=True)
    ]
    return dataclasses.replace(line, points=points)


def _finite(series: Series) -> Series:
    return [(step, value) for step, value in series if math.isfinite(value)]


def _averaged(series: Series) -> Series:
    """Average neighbours until ``MOST_POINTS`` are left, at their last steps."""
    groups = np.array_split(np.arange(len(series)), max(1, min(len(series), MOST_POINTS)))
    return [
        (series[group[-1]][0], statistics.fmean(series[k][1] for k in group))
        for group in groups
        if len(group)
    ]


def _picked(series: Series) -> Series:
    """Sample at most ``MOST_POINTS`` of a series, its first and last among them."""
    chosen = np.linspace(0, len(series) - 1, min(len(series), MOST_POINTS)).round().astype(int)
    return [series[k] for k in chosen]
