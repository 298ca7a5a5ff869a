"""``comera report RUN``: one HTML file about one run, from nothing but what its folder holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comera.files import replacing
from comera.recipes.report.history import History, config_text, read_histories
from comera.recipes.report.page import figure, heading, page, paragraph, preformatted, table
from comera.recipes.report.plots import figure_svg, loss_svg, ranks_svg, rate_svg, size_svg


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder, finished or not; whole, or not at all.

    The file needs nothing beside it: no network, no scripts.

    Args:
        folder: Folder of a run, holding ``metrics.jsonl`` and, as far as they are there,
            ``config.yaml``, ``result.json`` and the twin's folder ``dense``.

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError: If the folder holds no run.
    """
    models = read_histories(folder)
    parts = [
        *_closing(models),
        *_curves(models),
        *_ranks(models[0]),
        *_rates(models),
        *_layers(models[0]),
        *_settings(folder),
    ]
    path = folder / "report.html"
    with replacing(path) as temporary:
        temporary.write_text(page(f"Run {folder.resolve().name}", parts), encoding="utf-8")
    return path


def _closing(models: Sequence[History]) -> list[str]:
    """Say what came of the run, or how far it is."""
    results = [model.result for model in models if model.result is not None]
    out = [paragraph(_summary(model)) for model in models[:1] if model.result]
    out += [paragraph(_so_far(model), note=True) for model in models if model.result is None]
    if results:
        out += [heading("After training"), _closing_table(results)]
    return out


def _summary(model: History) -> str:
    facts: dict[str, Any] = model.result or {}
    text = f"Trained for {facts['steps']:,} steps in {_duration(facts['seconds'])}."
    if facts["layers"]:
        ratio = _ratio(facts["layer_dense_params"], facts["layer_params"])
        text += (
            f" Its {len(facts['layers'])} tensor-train layers store {facts['layer_params']:,} "
            f"parameters in place of {facts['layer_dense_params']:,} in dense layers, "
            f"{ratio} times fewer."
        )
    return text


def _so_far(model: History) -> str:
    text = f"The {model.name} model is unfinished"
    if not model.lines:
        return f"{text}: nothing has been logged yet."
    text += f": step {model.last_step:,}"
    for key in ("loss", *(f"eval/{name}" for name in model.evaluations)):
        _, values = model.series(key)
        if values:
            name = "training loss" if key == "loss" else key.replace("eval/", "evaluation ")
            text += f", {name} {values[-1]:.4f}"
    return f"{text}."


def _closing_table(results: Sequence[dict[str, Any]]) -> str:
    """Set figures of the finished models side by side."""
    two = len(results) == 2
    rows = []

    def row(label: str, values: list[Any], form: str, ratio: bool = True) -> None:
        cells = ["–" if value is None else form.format(value) for value in values]
        if two:
            known = ratio and None not in values
            cells.append(_ratio(values[1], values[0], 2) if known else "")
        rows.append([label, *cells])

    for key in dict.fromkeys(key for facts in results for key in facts["metrics"]):
        row(f"evaluation {key}", [facts["metrics"].get(key) for facts in results], "{:.4f}")
    for label, key, form in (
        ("parameters", "params", "{:,}"),
        ("parameters of the tensorised layers", "layer_params", "{:,}"),
        ("bytes of model.safetensors", "bytes", "{:,}"),
        ("seconds in training steps", "seconds", "{:,.1f}"),
    ):
        row(label, [facts[key] for facts in results], form)
    row("steps", [facts["steps"] for facts in results], "{:,}", ratio=False)
    header = ["", *(facts["name"] for facts in results), *(["dense / compressed"] if two else [])]
    return table(header, rows)


def _curves(models: Sequence[History]) -> list[str]:
    names = " and ".join(model.name for model in models)
    out = []
    if svg := loss_svg(models):
        caption = (
            "Each point of a line is the mean training loss since the one before it; where there "
            "are many, they are faint and the line is their running mean. Rings are evaluations "
            "on data the model was not trained on. Lower is better."
        )
        out.append(figure(svg, f"Loss over the optimizer steps, {names}", caption))
    others = dict.fromkeys(key for model in models for key in model.evaluations if key != "loss")
    for key in others:
        if svg := figure_svg(models, key):
            caption = f"Evaluation {key}, on data the model was not trained on."
            out.append(figure(svg, f"Evaluation {key} over the optimizer steps, {names}", caption))
    return [heading("Loss"), *out] if out else []


def _ranks(model: History) -> list[str]:
    """Show how the ranks were learned; nothing for a run that keeps them all."""
    out = []
    if svg := size_svg(model):
        caption = (
            "Entries in the cores of all tensor-train layers. The exact size counts the ranks "
            "whose gate is above its threshold; the relaxed size adds up the gates themselves, "
            "which training can lower smoothly. In the late stage, shaded yellow, the size is "
            "regularised towards the target; then, shaded grey, the closed ranks are cut away and "
            f"the rest goes on training. {_how_small(model)}"
        )
        out.append(figure(svg, "Size of the cores over the optimizer steps", caption))
    if svg := ranks_svg(model):
        caption = (
            "Every thin row is one bond between two cores of a layer, the first on top. Dark: all "
            "the ranks it started with are in use; pale: most are closed."
        )
        if model.result is None:
            caption += " The start is what was logged first."
        out.append(figure(svg, "Live ranks of every layer over the optimizer steps", caption))
    return [heading("Ranks"), *out] if out else []


def _how_small(model: History) -> str:
    done = next((line for line in model.lines if "target_size" in line), None)
    if done is None:
        return "The target shown is the share asked for, of the size first logged."
    text = (
        f"From {done['start_size']:,} entries to {done['size']:,}; "
        f"the target was {done['target_size']:,}."
    )
    if done["forced"]:
        text += (
            f" The rank objective had come to {done['reached']:,}; {done['forced']:,} ranks were "
            "still open then and were closed by how little they carried."
        )
    return text


def _rates(models: Sequence[History]) -> list[str]:
    svg = rate_svg(models)
    if svg is None:
        return []
    caption = "Learning rate of the weights. The gates of the ranks have a constant rate."
    return [
        heading("Learning rate"),
        figure(svg, "Learning rate over the optimizer steps", caption),
    ]


def _layers(model: History) -> list[str]:
    """List the tensor-train layers; before the end only their ranks are known."""
    if model.result is None:
        start, now = model.start_ranks, next(reversed(model.live_ranks.values()), {})
        rows = [[name or "(model)", _arrow(ranks, now[name])] for name, ranks in start.items()]
        header = ["layer", "ranks, first logged → now"]
        return [heading("Layers"), table(header, rows, text_columns=2, wide=True)] if rows else []
    layers = model.result["layers"]
    if not layers:
        return []
    header = ["layer", "type", "modes", "ranks", "dense", "stored", "ratio"]
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
        for layer in layers
    ]
    dense, stored = model.result["layer_dense_params"], model.result["layer_params"]
    total = ["total", "", "", "", f"{dense:,}", f"{stored:,}", _ratio(dense, stored)]
    text = (
        "Ranks are given from before training to after it. Dense: entries of the weight a layer "
        "stands for. Stored: entries of its cores and gates, and of rows kept dense. Biases are "
        "not counted."
    )
    return [
        heading("Layers"),
        paragraph(text),
        table(header, rows, text_columns=4, total=total, wide=True),
    ]


def _settings(folder: Path) -> list[str]:
    text = config_text(folder)
    return [] if text is None else [heading("Configuration"), preformatted(text)]


def _arrow(start: Sequence[int], end: Sequence[int]) -> str:
    before, after = (" ".join(map(str, ranks)) for ranks in (start, end))
    return before if before == after else f"{before} → {after}"


def _ratio(over: float, under: float, digits: int = 1) -> str:
    """Return a ratio as text, blank where there is nothing left to divide by."""
    return f"{over / under:,.{digits}f}" if under else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"
