"""Next words: the pre-training of decoders."""

from typing import Any

import torch
from torch import Tensor, nn

from comera.data.text import TextData, TextStreams
from comera.data.token_batches import CausalText
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import Batch, Digests, Place, Task, Trained, logits_of
from comera.recipes.tasks.text_tasks import OfStreams, text_of, token_loss, tokens_of


class CausalTextKind(OfStreams):
    """The next word of a text is guessed."""

    def _data(self, config: RunConfig) -> TextData:
        assert config.causal_text is not None
        return config.causal_text

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
        data = CausalText(TextStreams.prepare(self._data(config), digests))
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
        return token_loss(model(batch["tokens"]), batch["targets"])

    def drawn_batch(self, config: RunConfig, rows: int) -> Batch:
        batch = super().drawn_batch(config, rows)
        return batch | {"targets": batch["tokens"].roll(-1, 1)}

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        tokens = tokens_of(run, line).tolist()
        if not tokens:
            raise ValueError("there is no text to go on from")
        for _ in range(new_tokens):
            seen = torch.tensor([tokens[-self._data(run.config).length :]])
            tokens.append(int(logits_of(run, seen)[0, -1].argmax()))
        return {"text": text_of(run, tokens)}
