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
from comera.recipes.folder import DataRecord
from comera.recipes.tasks.task import (
    Batch,
    Digests,
    Place,
    Task,
    TaskKind,
    Trained,
    logits_of,
    say_padding,
)

_LARGEST_LOSS = 700.0
"""Loss above which a perplexity is too large for a float."""
_FIRST_WORD = 5
"""Numbers below stand for padding and other marks."""


class OfText(TaskKind):
    """A kind of task whose model is a transformer."""

    def planned_sizes(self) -> Mapping[str, Any]:
        return {"vocab_size": self.data.vocab_size}

    def dense_model(self, sizes: Mapping[str, Any]) -> nn.Module:
        try:
            return self._transformer(int(sizes["vocab_size"]))
        except ValueError as problem:  # it begins with the name of a setting
            raise ValueError(f"model.{problem}") from None

    @abstractmethod
    def _transformer(self, vocab_size: int) -> nn.Module:
        """Make the dense model."""

    def _encoder(self, vocab_size: int, segments: int = 0) -> Encoder:
        model = self.config.model
        return Encoder(
            vocab_size,
            model.d_model,
            model.num_layers,
            model.num_heads,
            model.ffn_dim,
            self.data.length,
            model.dropout,
            segments,
            model.norm,
            model.qk_norm,
            model.position_std,
        )

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        shape = rows, self.data.length
        return {"tokens": torch.randint(_FIRST_WORD, int(sizes["vocab_size"]), shape)}


class OfStreams(OfText):
    """A kind of task on text without end, judged by its loss on held-out batches."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = self.logits(model, batch)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def _task(
        self,
        place: Place,
        get_batch: Callable[[int], Batch],
        valid: Sequence[Batch],
        test: Sequence[Batch],
        data: TextStreams,
    ) -> Task:
        assert self.config.train.steps is not None, "RunConfig.check asks for steps here"

        def evaluate(batches: Sequence[Batch], model: nn.Module) -> dict[str, float]:
            own = place.own(batches)
            total = sum(float(self.loss(model, b)) * b["targets"].numel() for b in own)
            (total,) = place.sums(total)
            loss = total / sum(batch["targets"].numel() for batch in batches)
            return {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_LOSS))}

        sizes = {"vocab_size": data.vocab_size}
        return Task(
            make_model=lambda: self.dense_model(sizes),
            get_batch=lambda step: place.share_of(get_batch(step)),
            loss_fn=self.loss,
            evaluate=partial(evaluate, valid),
            steps=self.config.train.steps,
            record=DataRecord(data.digests, data.prepared),
            per_step=(self.config.train.batch_size * data.settings.length, "tokens"),
            test=partial(evaluate, test) if test else None,
            sizes=sizes,
            tokenizer=data.tokenizer,
        )


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
"""Interval of masked words in a batch that is drawn without data."""


class MaskedTextKind(OfStreams):
    """Words that are masked in a text are guessed."""

    inputs = ("tokens", "positions", "padded")

    def _transformer(self, vocab_size: int) -> nn.Module:
        return MaskedLanguageModel(self._encoder(vocab_size), vocab_size)

    def prepare(self, place: Place, digests: Digests) -> Task:
        data = MaskedText(TextStreams.prepare(self.data, digests))
        size = self.config.train.batch_size
        evaluated = self.config.train.eval_batches or _EVALUATED
        return self._task(
            place,
            lambda step: say_padding(data.batch(step, size, self.config.seed)),
            list(map(say_padding, data.valid_batches(evaluated, size))),
            list(map(say_padding, data.test_batches(_TESTED, size))),
            data.streams,
        )

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        batch = super().drawn_batch(rows, sizes)
        positions = torch.arange(0, batch["tokens"].shape[1], _DRAWN_EVERY).expand(rows, -1)
        targets = batch["tokens"].gather(1, positions)
        return batch | {"positions": positions, "targets": targets, "padded": False}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        row = np.concatenate([[CLS], tokens_of(run, line)])[: self.data.length]
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

    def _transformer(self, vocab_size: int) -> nn.Module:
        model = self.config.model
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

    def prepare(self, place: Place, digests: Digests) -> Task:
        data = CausalText(TextStreams.prepare(self.data, digests))
        size = self.config.train.batch_size
        return self._task(
            place,
            lambda step: data.batch(step, size, self.config.seed),
            data.valid_batches(self.config.train.eval_batches, size),
            data.test_batches(None, size),
            data.streams,
        )

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        batch = super().drawn_batch(rows, sizes)
        return batch | {"targets": batch["tokens"].roll(-1, 1)}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        tokens = tokens_of(run, line).tolist()
        if not tokens:
            raise ValueError("there is no text to go on from")
        for _ in range(new_tokens):
            seen = torch.tensor([tokens[-self.data.length :]])
            tokens.append(int(logits_of(run, seen)[0, -1].argmax()))
        return {"text": text_of(run, tokens)}


class NliKind(OfText):
    """Pairs of sentences are told apart."""

    inputs = ("tokens", "segments", "padded")

    def _transformer(self, vocab_size: int) -> nn.Module:
        encoder = self._encoder(vocab_size, segments=2)
        return SequenceClassifier(encoder, len(LABELS), self.config.model.dropout)

    def prepare(self, place: Place, digests: Digests) -> Task:
        data = NliPairs.prepare(self.data, digests)
        train, size = self.config.train, self.config.train.batch_size
        limit = train.eval_batches and train.eval_batches * size
        dev = list(map(say_padding, data.dev_batches(4 * size, limit)))
        test = list(map(say_padding, data.test_batches(4 * size)))
        # A CUDA graph takes batches of one shape alone.
        graph = place.device.type == "cuda" and train.graph is not False
        length = self.data.length if graph else None

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
            make_model=lambda: self.dense_model(sizes),
            get_batch=lambda step: place.share_of(
                say_padding(data.batch(step, size, self.config.seed, length))
            ),
            loss_fn=self.loss,
            evaluate=partial(evaluate, dev),
            steps=self.count_steps(data.steps_per_epoch(size)),
            record=DataRecord(data.digests, data.prepared),
            per_step=(size, "pairs"),
            test=partial(evaluate, test) if test else None,
            sizes=sizes,
            tokenizer=data.tokenizer,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["labels"])

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        batch = super().drawn_batch(rows, sizes)
        length = batch["tokens"].shape[1]
        segments = (torch.arange(length) >= length // 2).long().expand(rows, length)
        labels = torch.randint(len(LABELS), (rows,))
        return batch | {"segments": segments, "labels": labels, "padded": False}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        premise, tab, hypothesis = line.partition("\t")
        if not tab:
            raise ValueError(f"{line!r} must be a premise, a tab and a hypothesis")
        sides = tokens_of(run, premise), tokens_of(run, hypothesis)
        row, start = joined(*sides, self.data.length)
        tokens = torch.from_numpy(row)[None]
        segments = (torch.arange(len(row)) >= start).long()[None]
        logits = logits_of(run, tokens, segments, False)[0]
        shares = zip(LABELS, logits.softmax(0), strict=True)
        return {
            "label": LABELS[int(logits.argmax())],
            "probabilities": {name: round(float(share), 4) for name, share in shares},
        }
