"""Predictions of a trained model, a line at a time."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from comera.recipes.tasks.task_kinds import kind_of
from comera.recipes.trained import TrainedRun


def predictions(run: TrainedRun, lines: Iterable[str], new_tokens: int) -> Iterator[dict[str, Any]]:
    """Predict something for each line, as the run's task has it.

    A line that is not what is expected gives ``error``, which names it, and the others go on.

    Args:
        run: A finished run.
        lines: Of sentence pairs ``premise<TAB>hypothesis``; of a masked language model text with
            ``[MASK]`` in it; of a causal one the beginning of a text; of a click log a row of it as
            a JSON object, without its label.
        new_tokens: Tokens that a causal model adds, the most likely one each time.

    Raises:
        ValueError: If the run is of a click log and has not kept its categories, as earlier
            versions did not.
    """
    kind = kind_of(run.config)
    kind.check_predicts(run)
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        try:
            _check_text(line)
            with torch.no_grad():
                yield kind.predict(run, line, new_tokens)
        except ValueError as problem:
            yield {"error": f"line {number}: {problem}"}


def _check_text(line: str) -> None:
    """Refuse bytes that were no text, which reading has kept as surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{line.encode(errors='surrogateescape')!r} is no text in UTF-8") from None


def as_json(found: dict[str, Any]) -> str:
    """Return one prediction as a line of JSON."""
    return json.dumps(found, ensure_ascii=False)
