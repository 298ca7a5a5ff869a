"""Batches for a causal language model over a stream of tokens."""

from torch import Tensor

from comera.data.text import TextStreams, generator_of, windows


class CausalText:
    """Batches that depend only on a seed and a step number.

    Args:
        streams: The text; a sequence is ``settings.length`` tokens, each with the next as target.
    """

    def __init__(self, streams: TextStreams) -> None:
        self.streams = streams

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        """Return training batch number ``step``: ``tokens`` and ``targets``, both ``(B, T)``.

        Always the same for the same arguments.
        """
        length = self.streams.settings.length + 1
        return _shifted(windows(self.streams.train, batch_size, length, generator_of(seed, step)))

    def valid_batches(self, count: int | None, batch_size: int) -> list[dict[str, Tensor]]:
        """Return the held-out text in order, each token a target once; the same in every run.

        Args:
            count: Take so many batches from its start; None takes all.
            batch_size: Sequences a batch.
        """
        length = self.streams.settings.length
        valid = self.streams.valid
        rows = (len(valid) - 1) // length
        if count is not None:
            rows = min(rows, count * batch_size)
        pieces = valid[: rows * length + 1].long().unfold(0, length + 1, length)
        return [_shifted(part) for part in pieces.split(batch_size)]


def _shifted(window: Tensor) -> dict[str, Tensor]:
    return {"tokens": window[:, :-1], "targets": window[:, 1:]}
