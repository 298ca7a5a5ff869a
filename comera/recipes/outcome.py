"""What came of a trained model, in figures.

``result.json`` in the folder of a run: what came of a model.
"""

import dataclasses
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


def outcome_table(outcomes: list[Outcome]) -> Table:
    """Set figures of the models side by side."""
    table = Table(title="after training")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right")
    if len(outcomes) == 2:
        table.add_column("dense / compressed", justify="right")

    def row(label: str, values: list[float], form: str, ratio: bool = True) -> None:
        cells = [form.format(value) for value in values]
        if len(values) == 2:
            cells.append(f"{values[1] / values[0]:.2f}" if ratio and values[0] else "")
        table.add_row(label, *cells)

    for key in outcomes[0].metrics:
        row(f"evaluation {key}", [o.metrics[key] for o in outcomes], "{:.4f}")
    for key in outcomes[0].test:
        row(f"test {key}", [o.test[key] for o in outcomes], "{:.4f}")
    row("parameters", [o.params for o in outcomes], "{:,}")
    row("parameters of the tensorised layers", [o.layer_params for o in outcomes], "{:,}")
    row("bytes of model.safetensors", [o.bytes for o in outcomes], "{:,}")
    row("seconds in training steps", [o.seconds for o in outcomes], "{:.1f}")
    row("steps", [o.steps for o in outcomes], "{:,}", ratio=False)
    return table
