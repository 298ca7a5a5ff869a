"""Masked-language-model batches over a stream of tokens."""

import torch
from torch import Tensor

from comera.data.text import TextStreams, generator_of, windows
from comera.data.vocabulary import CLS, MASK, SPECIAL

_PREDICTED_SHARE = 0.15
"""Share of the tokens to be predicted: 80 % of them masked, 10 % replaced, 10 % kept (BERT)."""


class MaskedText:
    """Batches that depend only on a seed and a step number.

    Args:
        streams: The text; a sequence is a leading ``[CLS]`` and ``settings.length - 1`` tokens.
    """

    def __init__(self, streams: TextStreams) -> None:
        self.streams = streams

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        """Return training batch number ``step``; always the same for the same arguments."""
        return self._masked(self.streams.train, batch_size, generator_of(seed, step))

    def valid_batches(self, count: int, batch_size: int) -> list[dict[str, Tensor]]:
        """Return evaluation batches; the same in every run."""
        valid = self.streams.valid
        return [self._masked(valid, batch_size, generator_of(-1, k)) for k in range(count)]

    def _masked(
        self, stream: Tensor, batch_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Return ``tokens (B, T)``, ``positions (B, M)`` to predict, and ``targets (B, M)``."""
        length = self.streams.settings.length - 1
        count = max(1, round(_PREDICTED_SHARE * length))
        window = windows(stream, batch_size, length, generator)
        positions = torch.rand(batch_size, length, generator=generator).argsort(1)[:, :count]
        targets = window.gather(1, positions)
        fate = torch.rand(batch_size, count, generator=generator)
        low = len(SPECIAL)
        noise = torch.randint(
            low, self.streams.vocab_size, (batch_size, count), generator=generator
        )
        shown = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, noise, targets))
        tokens = window.scatter(1, positions, shown)
        tokens = torch.cat([torch.full((batch_size, 1), CLS), tokens], 1)
        return {"tokens": tokens, "positions": positions + 1, "targets": targets}
