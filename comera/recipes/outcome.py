"""Figures of a trained model: ``result.json`` in the folder of a run, and a table of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from comera.files import replacing
from comera.train.log import from_json, to_json

_NAME = "result.json"


def write_result(folder: Path, facts: dict[str, Any]) -> None:
    """Write what came of a model into its folder."""
    with replacing(folder / _NAME) as temporary:
        temporary.write_text(to_json(facts, indent=2), encoding="utf-8")


def read_result(folder: Path) -> dict[str, Any]:
    """Return what came of a model, from its folder.

    Raises:
        FileNotFoundError: If it is not finished.
        ValueError: If the file is damaged; names it and what writes it again.
    """
    path = folder / _NAME
    try:
        found = from_json(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {str(found)[:40]!r}")
    except ValueError as problem:
        run = folder if (folder / "config.yaml").is_file() else folder.parent  # of a twin
        raise ValueError(
            f"{path} is damaged ({problem}): comera train {run} writes it again, from the last "
            "checkpoint"
        ) from None
    return found


@dataclass
class Outcome:
    """One trained model in figures.

    Attributes:
        name: ``compressed`` or ``dense``.
        metrics: The last evaluation.
        params: Parameters of the whole model.
        layer_params: Parameters of its tensor-train layers, or of the dense layers in their place.
        layer_dense_params: Entries of the dense weights those layers stand for.
        bytes: Size of ``model.safetensors``.
        seconds: Time in training steps.
        steps: Optimizer steps.
        ranks: What rank learning reported, if it ran.
        test: The same figures as ``metrics`` of data by which nothing was chosen, if there are any.
        checkpoint_bytes: Size of a checkpoint, the mean of those kept, as a lossy one needs what it
            links to. None without checkpoints.
    """

    name: str
    metrics: dict[str, float]
    params: int
    layer_params: int
    layer_dense_params: int
    bytes: int
    seconds: float
    steps: int
    ranks: dict[str, Any] | None = None
    test: dict[str, float] = dataclasses.field(default_factory=dict)
    checkpoint_bytes: float | None = None


def read_outcome(folder: Path) -> Outcome:
    """Return what came of a finished model, from its folder; raises what reading it does."""
    facts = read_result(folder)
    names = {field.name for field in dataclasses.fields(Outcome)}
    return Outcome(**{name: value for name, value in facts.items() if name in names})


def outcome_cells(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of finished models, given as in ``result.json``.

    Where there are two, a last column has the ratio of the second to the first.
    """
    two = len(results) == 2
    rows: list[list[str]] = []

    def row(label: str, values: Sequence[float | None], form: str, ratio: bool = True) -> None:
        cells = ["–" if value is None else f"{value:{form}}" for value in values]
        if two:
            first, second = values
            cells.append(f"{second / first:,.2f}" if ratio and first and second is not None else "")
        rows.append([label, *cells])

    for part, data in (("metrics", "evaluation"), ("test", "test")):
        for key in dict.fromkeys(key for facts in results for key in facts.get(part, {})):
            row(f"{data} {key}", [facts.get(part, {}).get(key) for facts in results], ",.4f")
    for label, key, form in (
        ("parameters", "params", ","),
        ("parameters of the tensorised layers", "layer_params", ","),
        ("bytes of model.safetensors", "bytes", ","),
        ("seconds in training steps", "seconds", ",.1f"),
    ):
        row(label, [facts[key] for facts in results], form)
    row("seconds a step", [facts["seconds"] / facts["steps"] for facts in results], ".3g")
    row("steps", [facts["steps"] for facts in results], ",", ratio=False)
    names = [facts["name"] for facts in results]
    return ["", *names, *(["dense / compressed"] if two else [])], rows


def outcome_table(outcomes: list[Outcome]) -> Table:
    """Set figures of the models side by side."""
    header, rows = outcome_cells([vars(outcome) for outcome in outcomes])
    table = Table(title="after training")
    for name in header:
        table.add_column(name, justify="right" if name else "left")
    for cells in rows:
        table.add_row(*cells)
    return table
