"""Masked words: the pre-training of encoders."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comera.data.text import TextData, TextStreams
from comera.data.token_batches import MaskedText
from comera.data.vocabulary import CLS, MASK
from comera.models.transformer import MaskedLanguageModel
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import (
    Batch,
    Digests,
    Place,
    Task,
    Trained,
    logits_of,
    padding_said,
    say_padding,
)
from comera.recipes.tasks.text_tasks import OfStreams, make_encoder, text_of, token_loss, tokens_of

_TESTED = 128
"""Batches that a test draws."""
_EVALUATED = 32
"""Batches that an evaluation draws where the settings do not say."""
_SHOWN = 5
"""Words that are told for each masked one."""
_DRAWN_EVERY = 7
"""Of a batch without data, each such word is masked."""


class MaskedTextKind(OfStreams):
    """Words that are masked in a text are guessed."""

    def _data(self, config: RunConfig) -> TextData:
        assert config.masked_text is not None
        return config.masked_text

    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        length = self._data(config).length
        return MaskedLanguageModel(make_encoder(config, vocab_size, length, 0), vocab_size)

    def prepare(self, config: RunConfig, place: Place, digests: Digests) -> Task:
        data = MaskedText(TextStreams.prepare(self._data(config), digests))
        size = config.train.batch_size
        return self._task(
            config,
            place,
            lambda step: say_padding(data.batch(step, size, config.seed)),
            padding_said(data.valid_batches(config.train.eval_batches or _EVALUATED, size)),
            padding_said(data.test_batches(_TESTED, size)),
            data.streams,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"], batch["positions"], batch["padded"])
        return token_loss(logits, batch["targets"])

    def drawn_batch(self, config: RunConfig, rows: int) -> Batch:
        batch = super().drawn_batch(config, rows)
        positions = torch.arange(0, batch["tokens"].shape[1], _DRAWN_EVERY).expand(rows, -1)
        targets = batch["tokens"].gather(1, positions)
        return batch | {"positions": positions, "targets": targets, "padded": False}

    def example_inputs(self, config: RunConfig, sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        (tokens,) = super().example_inputs(config, sizes)
        return tokens, torch.ones(2, 3, dtype=torch.int64)

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        row = np.concatenate([[CLS], tokens_of(run, line)])[: self._data(run.config).length]
        positions = np.flatnonzero(row == MASK)
        if not len(positions):
            raise ValueError(f"{line!r} has no [MASK] in its first {len(row) - 1} tokens")
        inputs = (torch.from_numpy(part)[None] for part in (row, positions))
        logits = logits_of(run, *inputs, False)[0]
        best = logits.softmax(-1).topk(min(_SHOWN, logits.shape[-1]))
        return {
            "masks": [
                [
                    {"text": text_of(run, [int(k)]), "probability": round(float(p), 4)}
                    for p, k in zip(*pair, strict=True)
                ]
                for pair in zip(best.values, best.indices, strict=True)
            ]
        }
