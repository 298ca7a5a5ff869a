"""What a run folder says about each trained model, as plain series to draw and tabulate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comera.recipes.outcome import read_result
from comera.recipes.parse import read_yaml
from comera.recipes.run_config import RANK_SECTIONS
from comera.train.log import read_metrics

_IN_EVERY_RESULT = (
    "name", "metrics", "params", "layer_params", "layer_dense_params", "bytes", "seconds", "steps",
    "layers",
)  # fmt: skip

Series = list[tuple[int, float]]
"""Optimizer steps, each with the value logged after it."""


@dataclass(frozen=True)
class History:
    """One model's way through training.

    Attributes:
        name: ``compressed``, ``dense``, or ``model`` where the folder does not say.
        lines: Lines of the model's ``metrics.jsonl``.
        result: Content of the model's ``result.json``; None while it is unfinished.
        target_share: The target of rank learning, as a share of the size at the start.
    """

    name: str
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None = None
    target_share: float | None = None

    def series(self, key: str) -> Series:
        """Return what was logged under ``key``, and when; empty if nothing was."""
        found = [line for line in self.lines if isinstance(line.get(key), int | float)]
        return [(line["step"], line[key]) for line in found]

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Return the seconds that training steps had taken by then, if any were logged."""
        logged = self.series("seconds")
        if not logged:
            return []
        known, seconds = zip(*logged, strict=True)
        return np.interp(steps, (0, *known), (0.0, *seconds)).tolist()

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines if "failed" not in line), default=0)

    @property
    def failure(self) -> str | None:
        """Return why a model could not be trained to its end; None if it can still be."""
        return next((line["failed"] for line in self.lines if "failed" in line), None)

    @property
    def evaluations(self) -> list[str]:
        """Return the names of a model's evaluations, without the leading ``eval/``."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return [key.removeprefix("eval/") for key in keys if key.startswith("eval/")]

    @property
    def stages(self) -> list[tuple[str, int, int]]:
        """Return stages of rank learning with first and last step, as far as the log tells."""
        starts: list[tuple[str, int]] = []
        for line in self.lines:
            if "stage" in line and (not starts or starts[-1][0] != line["stage"]):
                starts.append((line["stage"], line["step"] if starts else 0))
        ends = [step for _, step in starts[1:]] + [self.last_step]
        return [(name, step, end) for (name, step), end in zip(starts, ends, strict=True)]

    @property
    def live_ranks(self) -> dict[int, dict[str, list[int]]]:
        """Return, by step and layer name, the live rank of each bond."""
        return {line["step"]: line["live_ranks"] for line in self.lines if "live_ranks" in line}

    @property
    def start_ranks(self) -> dict[str, list[int]]:
        """Return ranks by layer before training, or those first logged without a result."""
        if self.result is not None:
            return {layer["name"]: layer["start_ranks"] for layer in self.result["layers"]}
        return next(iter(self.live_ranks.values()), {})

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Return ranks by layer after training, or those last logged without a result."""
        if self.result is not None:
            return {layer["name"]: layer["ranks"] for layer in self.result["layers"]}
        return next(reversed(self.live_ranks.values()), {})

    @property
    def target_size(self) -> int | None:
        """Return the entries that cores may have at the end; estimated until truncation."""
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
    name = "model"
    if result is not None:
        name = result["name"]
    elif config:
        name = "compressed" if config.get("tensorize") else "dense"
    sections = [s for name in RANK_SECTIONS if isinstance(s := config.get(name), dict)]
    share = next((section["target"] for section in sections if "target" in section), None)
    found = [History(name, lines, result, share)]
    twin = folder / "dense"
    if (twin / "metrics.jsonl").is_file():
        found.append(History("dense", read_metrics(twin), _result(twin)))
    return found


def config_text(folder: Path) -> str | None:
    """Return the settings of a run as they were written down, None if they were not."""
    file = folder / "config.yaml"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _result(folder: Path) -> dict[str, Any] | None:
    if not (folder / "result.json").is_file():
        return None
    result = read_result(folder)
    lacking = [key for key in _IN_EVERY_RESULT if key not in result]
    if lacking:
        raise ValueError(f"{folder / 'result.json'} is damaged: it lacks {', '.join(lacking)}")
    return result
