"""Define tasks on text: masked words, next words, and natural-language inference."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.nli import LABELS, NliPairs, joined
from comera.data.text import CausalText, MaskedText, TextStreams
from comera.data.vocabulary import CLS, MASK
from comera.extras import error_prefix
from comera.files import write_text
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.own import own_model
from comera.models.transformer import PAD, Encoder, MaskedLanguageModel, SequenceClassifier
from comera.recipes.tasks.task import Batch, Digests, Task, logits_of

_TOKENIZER = "tokenizer.json"
_LARGEST_LOSS = 700.0  # loss above which a perplexity is too large for a float
_FIRST_WORD = 5  # numbers below stand for padding and other marks


class TextTask(Task):
    """A task whose model is a transformer."""

    def planned_sizes(self) -> Mapping[str, Any]:
        return {"vocab_size": self.data.vocab_size}

    def dense_model(self, sizes: Mapping[str, Any]) -> nn.Module:
        words = int(sizes["vocab_size"])
        with error_prefix("model."):  # it begins with the name of a setting
            if (make := self.config.model.make) is None:
                return self._transformer(words)
            names = ("width", "depth", "heads", "ffn")
            own = dict(zip(names, self._widths, strict=True))
            return own_model(make, **own, vocab_size=words)

    @abstractmethod
    def _transformer(self, vocab_size: int) -> nn.Module:
        """Return the dense transformer."""

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        model = self.config.model
        return model.d_model, model.num_layers, model.num_heads, model.ffn_dim

    def _encoder(self, vocab_size: int, segments: int = 0) -> Encoder:
        model, length = self.config.model, self.data.length
        own = segments, model.norm, model.qk_norm, model.position_std
        return Encoder(vocab_size, *self._widths, length, model.dropout, *own)

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        shape = rows, self.data.length
        return {"tokens": torch.randint(_FIRST_WORD, int(sizes["vocab_size"]), shape)}

    def save_vocabulary(self, folder: Path) -> None:
        write_text(folder / _TOKENIZER, self.vocabulary.to_str())

    def load_vocabulary(self, folder: Path) -> None:
        path = str(folder / _TOKENIZER)
        with error_prefix(f"{path} is damaged: ", Exception):  # tokenizers raises no other
            self.vocabulary = Tokenizer.from_file(path)

    def _tokens(self, text: str) -> np.ndarray:
        return np.asarray(self.vocabulary.encode(text, add_special_tokens=False).ids, np.int64)

    def _text(self, tokens: list[int]) -> str:
        return self.vocabulary.decode(tokens, skip_special_tokens=False)


class StreamTask(TextTask):
    """A task on streams of text, evaluated by the loss on held-out batches."""

    def _read(self, digests: Digests) -> TextStreams:
        streams = TextStreams.prepare(self.data, digests)
        self.sizes, self.vocabulary = {"vocab_size": streams.settings.vocab_size}, streams.tokenizer
        self.per_step = self.config.train.batch_size * self.data.length, "tokens"
        return streams

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = self.logits(model, batch)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def _measure(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        batches = list(batches)
        own = self._own(batches)
        (total,) = self._evaluators.sums(
            sum(float(self.loss(model, batch)) * batch["targets"].numel() for batch in own)
        )
        loss = total / sum(batch["targets"].numel() for batch in batches)
        return {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_LOSS))}


_TESTED = 128  # batches that a test draws
_EVALUATED = 32  # batches that an evaluation draws where the settings do not say
_DRAWN_EVERY = 7  # interval of masked words in a batch that is drawn without data


class MaskedTextTask(StreamTask):
    """Task in which an encoder predicts masked words of a text."""

    inputs = ("tokens", "positions", "padded")

    def _transformer(self, vocab_size: int) -> nn.Module:
        return MaskedLanguageModel(self._encoder(vocab_size), vocab_size)

    def prepare(self, digests: Digests) -> None:
        streams = self._read(digests)
        data, size, seed = MaskedText(streams), self.config.train.batch_size, self.config.seed
        evaluated = self.config.train.eval_batches or _EVALUATED
        valid = list(map(with_padding, data.held_out("valid", size, evaluated)))
        test = list(map(with_padding, data.held_out("test", size, _TESTED)))
        self._prepared(
            streams, lambda step: with_padding(data.batch(step, size, seed)), None, valid, test
        )

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        batch = super().drawn_batch(rows, sizes)
        positions = torch.arange(0, batch["tokens"].shape[1], _DRAWN_EVERY).expand(rows, -1)
        targets = batch["tokens"].gather(1, positions)
        return batch | {"positions": positions, "targets": targets, "padded": False}

    def predict(self, model: nn.Module, line: str, new_tokens: int) -> dict[str, Any]:
        row = np.concatenate([[CLS], self._tokens(line)])[: self.data.length]
        positions = np.flatnonzero(row == MASK)
        if not len(positions):
            raise ValueError(f"{line!r} has no [MASK] in its first {len(row) - 1} tokens")
        inputs = (torch.from_numpy(part)[None] for part in (row, positions))
        logits = logits_of(model, *inputs, False)[0]
        best = logits.softmax(-1).topk(min(5, logits.shape[-1]))
        return {
            "masks": [
                [
                    {"text": self._text([int(k)]), "probability": round(float(p), 4)}
                    for p, k in zip(*pair, strict=True)
                ]
                for pair in zip(best.values, best.indices, strict=True)
            ]
        }


class CausalTextTask(StreamTask):
    """Task in which a decoder predicts the next word of a text."""

    inputs = ("tokens",)

    def _transformer(self, vocab_size: int) -> nn.Module:
        model = self.config.model
        decoder = Decoder(vocab_size, *self._widths, model.dropout, model.qk_norm)
        return CausalLanguageModel(decoder, vocab_size)

    def prepare(self, digests: Digests) -> None:
        streams = self._read(digests)
        data, size, seed = CausalText(streams), self.config.train.batch_size, self.config.seed
        valid = data.held_out("valid", size, self.config.train.eval_batches)
        test = data.held_out("test", size)
        self._held_out = valid[0]["tokens"][0].tolist()
        self._prepared(streams, lambda step: data.batch(step, size, seed), None, valid, test)

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        batch = super().drawn_batch(rows, sizes)
        return batch | {"targets": batch["tokens"].roll(-1, 1)}

    def predict(self, model: nn.Module, line: str, new_tokens: int) -> dict[str, Any]:
        tokens = self._tokens(line).tolist()
        if not tokens:
            raise ValueError("there is no text to go on from")
        for _ in range(new_tokens):
            seen = torch.tensor([tokens[-self.data.length :]])
            tokens.append(int(logits_of(model, seen)[0, -1].argmax()))
        return {"text": self._text(tokens)}

    def completion(self, model: nn.Module) -> list[str] | None:
        given = self._text(self._held_out)
        text = self.predict(model, given, 32)["text"]  # the end of a line
        return [given.rpartition("\n")[2], text.removeprefix(given).partition("\n")[0]]


class NliTask(TextTask):
    """Task in which an encoder classifies pairs of sentences."""

    inputs = ("tokens", "segments", "padded")

    def _transformer(self, vocab_size: int) -> nn.Module:
        encoder = self._encoder(vocab_size, segments=2)
        return SequenceClassifier(encoder, len(LABELS), self.config.model.dropout)

    def prepare(self, digests: Digests) -> None:
        data = NliPairs.prepare(self.data, digests)
        train, size = self.config.train, self.config.train.batch_size
        limit = train.eval_batches and train.eval_batches * size
        valid = list(map(with_padding, data.held_out("dev", 4 * size, limit)))
        test = list(map(with_padding, data.held_out("test", 4 * size)))
        # A CUDA graph takes batches of one shape alone.
        graph = self.device.type == "cuda" and train.graph is not False
        length = self.data.length if graph else None
        self.sizes, self.vocabulary = {"vocab_size": data.vocab_size}, data.tokenizer
        self.per_step = size, "pairs"
        self._prepared(
            data, lambda step: with_padding(data.batch(step, size, self.config.seed, length)),
            len(data.train.labels), valid, test,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["labels"])

    def _measure(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        right, loss, rows = 0.0, 0.0, 0.0
        for batch in self._own(batches):
            logits = self.logits(model, batch)
            loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            right += float((logits.argmax(-1) == batch["labels"]).sum())
            rows += len(logits)
        right, loss, rows = self._evaluators.sums(right, loss, rows)
        return {"loss": loss / rows, "accuracy": right / rows}

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        batch = super().drawn_batch(rows, sizes)
        length = batch["tokens"].shape[1]
        segments = (torch.arange(length) >= length // 2).long().expand(rows, length)
        labels = torch.randint(len(LABELS), (rows,))
        return batch | {"segments": segments, "labels": labels, "padded": False}

    def predict(self, model: nn.Module, line: str, new_tokens: int) -> dict[str, Any]:
        premise, tab, hypothesis = line.partition("\t")
        if not tab:
            raise ValueError(f"{line!r} must be a premise, a tab and a hypothesis")
        row, start = joined(self._tokens(premise), self._tokens(hypothesis), self.data.length)
        segments = (torch.arange(len(row)) >= start).long()[None]
        logits = logits_of(model, torch.from_numpy(row)[None], segments, False)[0]
        shares = zip(LABELS, logits.softmax(0), strict=True)
        return {
            "label": LABELS[int(logits.argmax())],
            "probabilities": {name: round(float(share), 4) for name, share in shares},
        }


def with_padding(batch: dict[str, Tensor]) -> Batch:
    """Add to a batch whether any token is padding, found here as a GPU would have to wait."""
    return batch | {"padded": bool((batch["tokens"] == PAD).any())}
