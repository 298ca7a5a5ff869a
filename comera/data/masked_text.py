"""Masked-language-model batches over source code or any folder of text.

The default corpus is the Python source of the standard library of the running interpreter: real
input that every machine has.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from comera.data.vocabulary import (
    CLS,
    MASK,
    SPECIAL,
    cached_arrays,
    fingerprint,
    frequency_order,
    save_arrays,
    train_byte_pairs,
)
from comera.files import cache_folder

_TOKENIZER_SAMPLE = 4_000_000
"""Characters a tokenizer is trained on; more changes little and takes longer."""

_PREDICTED_SHARE = 0.15
"""Share of the tokens to be predicted: 80 % of them masked, 10 % replaced, 10 % kept (BERT)."""


@dataclass
class MaskedTextData:
    """Where masked-language-model text comes from.

    Args:
        folder: Text files are taken from here and below; by default the standard library of the
            running interpreter.
        pattern: Which files.
        max_megabytes: Stop reading after so much text, in a fixed pseudo-random order of files.
        vocab_size: Tokens of the byte-pair tokenizer, trained on the text.
        length: Tokens of a sequence, the leading ``[CLS]`` included.
        heldout: Share of the files kept for evaluation.
    """

    folder: str | None = None
    pattern: str = "**/*.py"
    max_megabytes: float = 12.0
    vocab_size: int = 8192
    length: int = 128
    heldout: float = 0.05


class MaskedText:
    """Token streams, and batches that depend only on a seed and a step number.

    Args:
        settings: Where the text comes from.
        train: Token numbers of the training files, one after the other.
        valid: The same of the held-out files.
    """

    def __init__(self, settings: MaskedTextData, train: np.ndarray, valid: np.ndarray) -> None:
        self.settings = settings
        self.train, self.valid = torch.from_numpy(train), torch.from_numpy(valid)
        self.vocab_size = settings.vocab_size

    @classmethod
    def prepare(cls, settings: MaskedTextData) -> "MaskedText":
        """Read, train the tokenizer and encode, or take all that from the cache.

        Raises:
            FileNotFoundError: If no file matches.
            ValueError: If there is too little text.
        """
        folder = Path(settings.folder or sysconfig.get_paths()["stdlib"]).expanduser()
        files = _text_files(folder, settings.pattern)
        described = {**vars(settings), "length": None, "corpus": "masked-text-1"}
        cache = cache_folder() / f"masked-text-{fingerprint(described, files)}.npz"
        arrays = cached_arrays(cache)
        if arrays is None:
            arrays = _encode(files, settings)
            save_arrays(cache, arrays)
        if min(len(arrays["train"]), len(arrays["valid"])) <= 2 * settings.length:
            raise ValueError(
                f"{folder} holds too little text ({len(arrays['train'])} training and "
                f"{len(arrays['valid'])} held-out tokens) for sequences of {settings.length}"
            )
        return cls(settings, arrays["train"], arrays["valid"])

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        """Training batch number ``step``; always the same for the same arguments."""
        return self._masked(self.train, batch_size, _generator(seed, step))

    def valid_batches(self, count: int, batch_size: int) -> list[dict[str, Tensor]]:
        """Evaluation batches; the same in every run."""
        return [self._masked(self.valid, batch_size, _generator(-1, k)) for k in range(count)]

    def _masked(
        self, stream: Tensor, batch_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """``tokens (B, T)``, ``positions (B, M)`` of what is predicted, ``targets (B, M)``."""
        length = self.settings.length - 1
        count = max(1, round(_PREDICTED_SHARE * length))
        starts = torch.randint(len(stream) - length, (batch_size,), generator=generator)
        window = stream[starts[:, None] + torch.arange(length)].long()
        positions = torch.rand(batch_size, length, generator=generator).argsort(1)[:, :count]
        targets = window.gather(1, positions)
        fate = torch.rand(batch_size, count, generator=generator)
        low = len(SPECIAL)
        noise = torch.randint(low, self.vocab_size, (batch_size, count), generator=generator)
        shown = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, noise, targets))
        tokens = window.scatter(1, positions, shown)
        tokens = torch.cat([torch.full((batch_size, 1), CLS), tokens], 1)
        return {"tokens": tokens, "positions": positions + 1, "targets": targets}


def _generator(seed: int, step: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _text_files(folder: Path, pattern: str) -> list[Path]:
    skip = {"site-packages", "dist-packages", "__pycache__"}
    files = [
        path
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not skip & set(path.relative_to(folder).parts)
    ]
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r} under {folder}")
    return files


def _encode(files: list[Path], settings: MaskedTextData) -> dict[str, np.ndarray]:
    folder = Path(settings.folder or sysconfig.get_paths()["stdlib"]).expanduser()

    def scramble(path: Path) -> bytes:
        return hashlib.sha256(str(path.relative_to(folder)).encode()).digest()

    texts, total = [], 0
    for path in sorted(files, key=scramble):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
        if total > settings.max_megabytes * 1e6:
            break
    count = max(1, round(settings.heldout * len(texts)))
    heldout, training = texts[:count], texts[count:]
    sample, used = [], 0
    for text in training:
        sample.append(text)
        used += len(text)
        if used > _TOKENIZER_SAMPLE:
            break
    tokenizer = train_byte_pairs(sample, settings.vocab_size)
    encoded = [
        np.concatenate([np.asarray(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(part)])
        if part
        else np.empty(0, np.int64)
        for part in (training, heldout)
    ]
    number = frequency_order(tokenizer, np.bincount(encoded[0], minlength=settings.vocab_size))
    train, valid = (number[part].astype(np.int32) for part in encoded)
    return {"train": train, "valid": valid}
