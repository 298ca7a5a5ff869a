"""Say what is missing or damaged in the folder of a run, of which its report shows less."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from comera.recipes.report.history import History


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
