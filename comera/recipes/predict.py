"""Predictions of a trained model, a line at a time."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.data.click_rows import CATEGORIES
from comera.data.nli import LABELS, joined
from comera.data.vocabulary import CLS, MASK
from comera.recipes.trained import TrainedRun

_SHOWN = 5
"""Words that are told for each masked one."""


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
    if run.config.clicks is not None and run.categories is None:
        raise ValueError(
            f"{run.folder} has no {CATEGORIES}: an earlier version wrote it. The same comera train "
            "with --overwrite=true trains it anew"
        )
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        try:
            with torch.no_grad():
                if run.config.clicks is not None:
                    yield _click(run, line)
                elif run.config.nli is not None:
                    yield _relation(run, line)
                elif run.config.masked_text is not None:
                    yield _words(run, line)
                else:
                    yield _continuation(run, line, new_tokens)
        except ValueError as problem:
            yield {"error": f"line {number}: {problem}"}


def _tokens_of(run: TrainedRun, text: str) -> np.ndarray:
    assert run.tokenizer is not None, "a run of text has one"
    return np.asarray(run.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def _text_of(run: TrainedRun, tokens: list[int]) -> str:
    assert run.tokenizer is not None, "a run of text has one"
    return run.tokenizer.decode(tokens, skip_special_tokens=False)


def _click(run: TrainedRun, line: str) -> dict[str, Any]:
    assert run.categories is not None, "it was asked for above"
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f'{line!r} must be a JSON object, such as {{"user": "ann", "age": 31}}')
    *inputs, unknown = run.categories.encode([row])
    found: dict[str, Any] = {"probability": round(float(_logits(run, *inputs)[0].sigmoid()), 4)}
    return found | ({"unknown": unknown[0]} if unknown[0] else {})


def _relation(run: TrainedRun, line: str) -> dict[str, Any]:
    premise, tab, hypothesis = line.partition("\t")
    if not tab:
        raise ValueError(f"{line!r} must be a premise, a tab and a hypothesis")
    assert run.config.nli is not None
    sides = _tokens_of(run, premise), _tokens_of(run, hypothesis)
    row, start = joined(*sides, run.config.nli.length)
    tokens = torch.from_numpy(row)[None]
    segments = (torch.arange(len(row)) >= start).long()[None]
    logits = _logits(run, tokens, segments, False)[0]
    shares = {name: round(float(p), 4) for name, p in zip(LABELS, logits.softmax(0), strict=True)}
    return {"label": LABELS[int(logits.argmax())], "probabilities": shares}


def _words(run: TrainedRun, line: str) -> dict[str, Any]:
    assert run.config.masked_text is not None
    row = np.concatenate([[CLS], _tokens_of(run, line)])[: run.config.masked_text.length]
    positions = np.flatnonzero(row == MASK)
    if not len(positions):
        raise ValueError(f"{line!r} has no [MASK] in its first {len(row) - 1} tokens")
    logits = _logits(run, *(torch.from_numpy(part)[None] for part in (row, positions)), False)[0]
    best = logits.softmax(-1).topk(min(_SHOWN, logits.shape[-1]))
    return {
        "masks": [
            [
                {"text": _text_of(run, [int(k)]), "probability": round(float(p), 4)}
                for p, k in zip(*pair, strict=True)
            ]
            for pair in zip(best.values, best.indices, strict=True)
        ]
    }


def _continuation(run: TrainedRun, line: str, new_tokens: int) -> dict[str, Any]:
    assert run.config.causal_text is not None
    tokens = _tokens_of(run, line).tolist()
    if not tokens:
        raise ValueError("there is no text to go on from")
    for _ in range(new_tokens):
        seen = torch.tensor([tokens[-run.config.causal_text.length :]])
        tokens.append(int(_logits(run, seen)[0, -1].argmax()))
    return {"text": _text_of(run, tokens)}


def _logits(run: TrainedRun, *inputs: Any) -> Tensor:
    device = next(run.model.parameters()).device
    moved = (value.to(device) if isinstance(value, Tensor) else value for value in inputs)
    return run.model(*moved).float().cpu()


def as_json(found: dict[str, Any]) -> str:
    """Return one prediction as a line of JSON."""
    return json.dumps(found, ensure_ascii=False)
