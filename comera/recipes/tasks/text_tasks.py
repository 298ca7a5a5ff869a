"""What kinds of tasks share that are made of text."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.text import TextData, TextStreams, find_text, text_digests
from comera.models.transformer import Encoder
from comera.recipes.data_record import DataRecord
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import Batch, Place, Task, TaskKind, Trained

_LARGEST_LOSS = 700.0
"""Loss above which a perplexity is too large for a float."""
_FIRST_WORD = 5
"""Numbers below stand for padding and other marks."""
_MOST_EXAMPLE_TOKENS = 16


class OfText(TaskKind):
    """A kind of task whose model is a transformer."""

    def planned_sizes(self, config: RunConfig) -> Mapping[str, Any]:
        assert config.text is not None, "of a kind of text"
        return {"vocab_size": config.text.vocab_size}

    def dense_model(self, config: RunConfig, sizes: Mapping[str, Any]) -> nn.Module:
        try:
            return self._transformer(config, int(sizes["vocab_size"]))
        except ValueError as problem:  # it begins with the name of a setting
            raise ValueError(f"model.{problem}") from None

    @abstractmethod
    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        """Make the dense model."""

    def drawn_batch(self, config: RunConfig, rows: int) -> Batch:
        assert config.text is not None, "of a kind of text"
        shape = rows, config.text.length
        return {"tokens": torch.randint(_FIRST_WORD, config.text.vocab_size, shape)}

    def example_inputs(self, config: RunConfig, sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        assert config.text is not None, "of a kind of text"
        return (torch.full((2, min(_MOST_EXAMPLE_TOKENS, config.text.length)), 7),)


class OfStreams(OfText):
    """A kind of task on text without end, judged by its loss on held-out batches."""

    @abstractmethod
    def _data(self, config: RunConfig) -> TextData:
        """Return the section of the data."""

    def find_data(self, config: RunConfig) -> None:
        find_text(self._data(config))

    def data_digests(self, config: RunConfig) -> dict[str, str]:
        return text_digests(self._data(config))

    def _task(
        self,
        config: RunConfig,
        place: Place,
        get_batch: Callable[[int], Batch],
        valid: Sequence[Batch],
        test: Sequence[Batch],
        data: TextStreams,
    ) -> Task:
        assert config.train.steps is not None, "RunConfig.check asks for steps here"

        def evaluate(batches: Sequence[Batch], model: nn.Module) -> dict[str, float]:
            own = place.own(batches)
            total = sum(float(self.loss(model, b)) * b["targets"].numel() for b in own)
            (total,) = place.sums(total)
            loss = total / sum(batch["targets"].numel() for batch in batches)
            return {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_LOSS))}

        sizes = {"vocab_size": data.vocab_size}
        return Task(
            make_model=lambda: self.dense_model(config, sizes),
            get_batch=lambda step: place.share_of(get_batch(step)),
            loss_fn=self.loss,
            evaluate=partial(evaluate, valid),
            steps=config.train.steps,
            record=DataRecord(data.digests, data.prepared),
            per_step=(config.train.batch_size * data.settings.length, "tokens"),
            test=partial(evaluate, test) if test else None,
            sizes=sizes,
            tokenizer=data.tokenizer,
        )


def make_encoder(config: RunConfig, vocab_size: int, length: int, segments: int) -> Encoder:
    """Make the encoder that the settings of a run describe."""
    model = config.model
    return Encoder(
        vocab_size,
        model.d_model,
        model.num_layers,
        model.num_heads,
        model.ffn_dim,
        length,
        model.dropout,
        segments,
        model.norm,
        model.qk_norm,
        model.position_std,
    )


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of tokens, ``logits`` of ``(B, T, V)``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tokens_of(run: Trained, text: str) -> np.ndarray:
    """Make tokens of text by the vocabulary of a run."""
    assert run.tokenizer is not None, "a run of text has one"
    return np.asarray(run.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def text_of(run: Trained, tokens: list[int]) -> str:
    """Make text of tokens by the vocabulary of a run."""
    assert run.tokenizer is not None, "a run of text has one"
    return run.tokenizer.decode(tokens, skip_special_tokens=False)
