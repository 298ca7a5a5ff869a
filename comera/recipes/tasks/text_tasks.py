"""Tasks on text: masked words for encoders, next words for decoders, natural-language inference."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.nli import LABELS, NliPairs, joined
from comera.data.text import CausalText, MaskedText, TextStreams
from comera.data.vocabulary import CLS, MASK
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.transformer import Encoder, MaskedLanguageModel, SequenceClassifier
from comera.recipes.data_record import DataRecord
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import (
    Batch,
    Digests,
    Place,
    Task,
    TaskKind,
    Trained,
    count_steps,
    logits_of,
    say_padding,
)

_LARGEST_LOSS = 700.0
"""Loss above which a perplexity is too large for a float."""
_FIRST_WORD = 5
"""Numbers below stand for padding and other marks."""


class OfText(TaskKind):
    """A kind of task whose model is a transformer."""

    def planned_sizes(self, config: RunConfig) -> Mapping[str, Any]:
        return {"vocab_size": self.data(config).vocab_size}

    def dense_model(self, config: RunConfig, sizes: Mapping[str, Any]) -> nn.Module:
        try:
            return self._transformer(config, int(sizes["vocab_size"]))
        except ValueError as problem:  # it begins with the name of a setting
            raise ValueError(f"model.{problem}") from None

    @abstractmethod
    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        """Make the dense model."""

    def drawn_batch(
        self, config: RunConfig, rows: int, sizes: Mapping[str, Any] | None = None
    ) -> Batch:
        shape = rows, self.data(config).length
        return {"tokens": torch.randint(_FIRST_WORD, self.data(config).vocab_size, shape)}


class OfStreams(OfText):
    """A kind of task on text without end, judged by its loss on held-out batches."""

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

    inputs = ("tokens", "positions", "padded")

    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        length = self.data(config).length
        return MaskedLanguageModel(make_encoder(config, vocab_size, length, 0), vocab_size)

    def prepare(self, config: RunConfig, place: Place, digests: Digests) -> Task:
        data = MaskedText(TextStreams.prepare(self.data(config), digests))
        size, evaluated = config.train.batch_size, config.train.eval_batches or _EVALUATED
        return self._task(
            config,
            place,
            lambda step: say_padding(data.batch(step, size, config.seed)),
            list(map(say_padding, data.valid_batches(evaluated, size))),
            list(map(say_padding, data.test_batches(_TESTED, size))),
            data.streams,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return token_loss(self.logits(model, batch), batch["targets"])

    def drawn_batch(
        self, config: RunConfig, rows: int, sizes: Mapping[str, Any] | None = None
    ) -> Batch:
        batch = super().drawn_batch(config, rows)
        positions = torch.arange(0, batch["tokens"].shape[1], _DRAWN_EVERY).expand(rows, -1)
        targets = batch["tokens"].gather(1, positions)
        return batch | {"positions": positions, "targets": targets, "padded": False}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        row = np.concatenate([[CLS], tokens_of(run, line)])[: self.data(run.config).length]
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


class CausalTextKind(OfStreams):
    """The next word of a text is guessed."""

    inputs = ("tokens",)

    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        model = config.model
        decoder = Decoder(
            vocab_size,
            model.d_model,
            model.num_layers,
            model.num_heads,
            model.ffn_dim,
            model.dropout,
            model.qk_norm,
        )
        return CausalLanguageModel(decoder, vocab_size)

    def prepare(self, config: RunConfig, place: Place, digests: Digests) -> Task:
        data = CausalText(TextStreams.prepare(self.data(config), digests))
        size = config.train.batch_size
        return self._task(
            config,
            place,
            lambda step: data.batch(step, size, config.seed),
            data.valid_batches(config.train.eval_batches, size),
            data.test_batches(None, size),
            data.streams,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return token_loss(self.logits(model, batch), batch["targets"])

    def drawn_batch(
        self, config: RunConfig, rows: int, sizes: Mapping[str, Any] | None = None
    ) -> Batch:
        batch = super().drawn_batch(config, rows)
        return batch | {"targets": batch["tokens"].roll(-1, 1)}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        tokens = tokens_of(run, line).tolist()
        if not tokens:
            raise ValueError("there is no text to go on from")
        for _ in range(new_tokens):
            seen = torch.tensor([tokens[-self.data(run.config).length :]])
            tokens.append(int(logits_of(run, seen)[0, -1].argmax()))
        return {"text": text_of(run, tokens)}


_SEGMENTS = 2


class NliKind(OfText):
    """Pairs of sentences are told apart."""

    inputs = ("tokens", "segments", "padded")

    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        encoder = make_encoder(config, vocab_size, self.data(config).length, _SEGMENTS)
        return SequenceClassifier(encoder, len(LABELS), config.model.dropout)

    def prepare(self, config: RunConfig, place: Place, digests: Digests) -> Task:
        data = NliPairs.prepare(self.data(config), digests)
        size = config.train.batch_size
        limit = config.train.eval_batches and config.train.eval_batches * size
        dev = list(map(say_padding, data.dev_batches(4 * size, limit)))
        test = list(map(say_padding, data.test_batches(4 * size)))
        # A CUDA graph takes batches of one shape alone.
        graph = place.device.type == "cuda" and config.train.graph is not False
        length = self.data(config).length if graph else None

        def evaluate(batches: Sequence[Batch], model: nn.Module) -> dict[str, float]:
            right, loss, rows = 0.0, 0.0, 0.0
            for batch in place.own(batches):
                logits = self.logits(model, batch)
                loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
                right += float((logits.argmax(-1) == batch["labels"]).sum())
                rows += len(logits)
            right, loss, rows = place.sums(right, loss, rows)
            return {"loss": loss / rows, "accuracy": right / rows}

        sizes = {"vocab_size": data.vocab_size}
        return Task(
            make_model=lambda: self.dense_model(config, sizes),
            get_batch=lambda step: place.share_of(
                say_padding(data.batch(step, size, config.seed, length))
            ),
            loss_fn=self.loss,
            evaluate=partial(evaluate, dev),
            steps=count_steps(config, data.steps_per_epoch(size)),
            record=DataRecord(data.digests, data.prepared),
            per_step=(size, "pairs"),
            test=partial(evaluate, test) if test else None,
            sizes=sizes,
            tokenizer=data.tokenizer,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["labels"])

    def drawn_batch(
        self, config: RunConfig, rows: int, sizes: Mapping[str, Any] | None = None
    ) -> Batch:
        batch = super().drawn_batch(config, rows)
        length = batch["tokens"].shape[1]
        segments = (torch.arange(length) >= length // 2).long().expand(rows, length)
        labels = torch.randint(len(LABELS), (rows,))
        return batch | {"segments": segments, "labels": labels, "padded": False}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        premise, tab, hypothesis = line.partition("\t")
        if not tab:
            raise ValueError(f"{line!r} must be a premise, a tab and a hypothesis")
        sides = tokens_of(run, premise), tokens_of(run, hypothesis)
        row, start = joined(*sides, self.data(run.config).length)
        tokens = torch.from_numpy(row)[None]
        segments = (torch.arange(len(row)) >= start).long()[None]
        logits = logits_of(run, tokens, segments, False)[0]
        shares = zip(LABELS, logits.softmax(0), strict=True)
        return {
            "label": LABELS[int(logits.argmax())],
            "probabilities": {name: round(float(share), 4) for name, share in shares},
        }
