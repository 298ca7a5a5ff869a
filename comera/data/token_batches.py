"""Draw batches of a stream of tokens, for masked and for causal language models."""

import torch
from torch import Tensor

from comera.data.text import TextStreams, generator_of, windows
from comera.data.vocabulary import CLS, MASK, SPECIAL

_PREDICTED_SHARE = 0.15
"""Share of the tokens to be predicted: 80 % of them masked, 10 % replaced, 10 % kept (BERT)."""


class MaskedText:
    """Batches of a masked language model, which depend only on a seed and a step number.

    Args:
        streams: The text; a sequence is a leading ``[CLS]`` and ``settings.length - 1`` tokens.
    """

    def __init__(self, streams: TextStreams) -> None:
        self.streams = streams

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        """Draw training batch number ``step``; always the same for the same arguments.

        ``tokens (B, T)``, ``positions (B, M)`` of those that are predicted, ``targets (B, M)``; all
        int64.
        """
        return self._masked(self.streams.train, batch_size, generator_of(seed, step))

    def valid_batches(self, count: int, batch_size: int) -> list[dict[str, Tensor]]:
        """Draw ``count`` evaluation batches like those of training; the same in every run."""
        return self._drawn(self.streams.valid, count, batch_size)

    def test_batches(self, count: int, batch_size: int) -> list[dict[str, Tensor]]:
        """Draw the same of the test text; none where there is no such text."""
        return self._drawn(self.streams.test, count, batch_size)

    def _drawn(self, stream: Tensor, count: int, batch_size: int) -> list[dict[str, Tensor]]:
        numbers = range(count) if len(stream) else ()
        return [self._masked(stream, batch_size, generator_of(-1, k)) for k in numbers]

    def _masked(
        self, stream: Tensor, batch_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Draw ``tokens (B, T)``, ``positions (B, M)`` to be predicted and ``targets (B, M)``."""
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


class CausalText:
    """Batches of a causal language model, which depend only on a seed and a step number.

    Args:
        streams: The text; a sequence is ``settings.length`` tokens, each with the next as target.
    """

    def __init__(self, streams: TextStreams) -> None:
        self.streams = streams

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        """Draw training batch number ``step``: ``tokens`` and ``targets``, both int64 ``(B, T)``.

        Always the same for the same arguments.
        """
        length = self.streams.settings.length + 1
        return _shifted(windows(self.streams.train, batch_size, length, generator_of(seed, step)))

    def valid_batches(self, count: int | None, batch_size: int) -> list[dict[str, Tensor]]:
        """Cut the held-out text in order, each token a target once; the same in every run.

        Args:
            count: Take so many batches from its start; None takes all.
            batch_size: Sequences a batch.
        """
        return self._cut(self.streams.valid, count, batch_size)

    def test_batches(self, count: int | None, batch_size: int) -> list[dict[str, Tensor]]:
        """Cut the test text likewise; no batches where there is no such text."""
        return self._cut(self.streams.test, count, batch_size) if len(self.streams.test) else []

    def _cut(self, stream: Tensor, count: int | None, batch_size: int) -> list[dict[str, Tensor]]:
        length = self.streams.settings.length
        rows = (len(stream) - 1) // length
        if count is not None:
            rows = min(rows, count * batch_size)
        pieces = stream[: rows * length + 1].long().unfold(0, length + 1, length)
        return [_shifted(part) for part in pieces.split(batch_size)]


def _shifted(window: Tensor) -> dict[str, Tensor]:
    return {"tokens": window[:, :-1], "targets": window[:, 1:]}
