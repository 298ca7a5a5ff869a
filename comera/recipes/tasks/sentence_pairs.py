"""Natural-language inference: how the second of two sentences follows from the first."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.nli import LABELS, NliData, NliPairs, find_pairs, joined, nli_digests
from comera.models.transformer import SequenceClassifier
from comera.recipes.data_record import DataRecord
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import (
    Batch,
    Digests,
    Place,
    Task,
    Trained,
    count_steps,
    logits_of,
    padding_said,
    say_padding,
)
from comera.recipes.tasks.text_tasks import OfText, make_encoder, tokens_of

_SEGMENTS = 2


class NliKind(OfText):
    """Pairs of sentences are told apart."""

    def _data(self, config: RunConfig) -> NliData:
        assert config.nli is not None
        return config.nli

    def find_data(self, config: RunConfig) -> None:
        find_pairs(self._data(config))

    def data_digests(self, config: RunConfig) -> dict[str, str]:
        return nli_digests(self._data(config))

    def _transformer(self, config: RunConfig, vocab_size: int) -> nn.Module:
        encoder = make_encoder(config, vocab_size, self._data(config).length, _SEGMENTS)
        return SequenceClassifier(encoder, len(LABELS), config.model.dropout)

    def prepare(self, config: RunConfig, place: Place, digests: Digests) -> Task:
        data = NliPairs.prepare(self._data(config), digests)
        size = config.train.batch_size
        limit = config.train.eval_batches and config.train.eval_batches * size
        dev = padding_said(data.dev_batches(4 * size, limit))
        test = padding_said(data.test_batches(4 * size) or ())
        # A CUDA graph takes batches of one shape alone.
        graph = place.device.type == "cuda" and config.train.graph is not False
        length = self._data(config).length if graph else None

        def evaluate(batches: Sequence[Batch], model: nn.Module) -> dict[str, float]:
            right, loss, rows = 0.0, 0.0, 0.0
            for batch in place.own(batches):
                logits = _logits(model, batch)
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
        return F.cross_entropy(_logits(model, batch), batch["labels"])

    def drawn_batch(self, config: RunConfig, rows: int) -> Batch:
        batch = super().drawn_batch(config, rows)
        length = batch["tokens"].shape[1]
        segments = (torch.arange(length) >= length // 2).long().expand(rows, length)
        labels = torch.randint(len(LABELS), (rows,))
        return batch | {"segments": segments, "labels": labels, "padded": False}

    def example_inputs(self, config: RunConfig, sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        (tokens,) = super().example_inputs(config, sizes)
        return tokens, torch.zeros_like(tokens)

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        premise, tab, hypothesis = line.partition("\t")
        if not tab:
            raise ValueError(f"{line!r} must be a premise, a tab and a hypothesis")
        sides = tokens_of(run, premise), tokens_of(run, hypothesis)
        row, start = joined(*sides, self._data(run.config).length)
        tokens = torch.from_numpy(row)[None]
        segments = (torch.arange(len(row)) >= start).long()[None]
        logits = logits_of(run, tokens, segments, False)[0]
        shares = zip(LABELS, logits.softmax(0), strict=True)
        return {
            "label": LABELS[int(logits.argmax())],
            "probabilities": {name: round(float(share), 4) for name, share in shares},
        }


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["tokens"], batch["segments"], batch["padded"]).float()
