"""A folder of text or source code as two streams of tokens, for training and for evaluation.

The default corpus is the Python source of the standard library of the running interpreter: real
input that every machine has.
"""

import gzip
import hashlib
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from comera.data.vocabulary import (
    cached_arrays,
    fingerprint,
    frequency_order,
    save_arrays,
    train_byte_pairs,
)
from comera.files import cache_folder

_TOKENIZER_SAMPLE = 4_000_000
"""Characters a tokenizer is trained on; more changes little and takes longer."""


@dataclass
class TextData:
    """Where the text of a language model comes from.

    Args:
        folder: Text files are taken from here and below; by default the standard library of the
            running interpreter.
        pattern: Which files; those ending in ``.gz`` or ``.xz`` are decompressed.
        max_megabytes: Stop reading after so much text, in a fixed pseudo-random order of files.
        vocab_size: Tokens of the byte-pair tokenizer, trained on the text.
        length: Tokens of a sequence.
        heldout: Share of the text kept for evaluation: the files that come first in that order,
            and the end of the text where there is only one file.
    """

    folder: str | None = None
    pattern: str = "**/*.py"
    max_megabytes: float = 12.0
    vocab_size: int = 8192
    length: int = 128
    heldout: float = 0.05


@dataclass
class TextStreams:
    """Token numbers, sorted by falling frequency after the special ones.

    Attributes:
        settings: Where the text comes from.
        train: Tokens of the training files, one file after the other.
        valid: The same of the held-out files.
    """

    settings: TextData
    train: Tensor
    valid: Tensor

    @property
    def vocab_size(self) -> int:
        return self.settings.vocab_size

    @classmethod
    def prepare(cls, settings: TextData) -> "TextStreams":
        """Read, train the tokenizer and encode, or take all that from the cache.

        Raises:
            FileNotFoundError: If no file matches.
            ValueError: If there is too little text.
        """
        folder = Path(settings.folder or sysconfig.get_paths()["stdlib"]).expanduser()
        files = _text_files(folder, settings.pattern)
        described = {**vars(settings), "length": None, "corpus": "text-2"}
        cache = cache_folder() / f"text-{fingerprint(described, files)}.npz"
        arrays = cached_arrays(cache)
        if arrays is None:
            arrays = _encode(files, settings)
            save_arrays(cache, arrays)
        if min(len(arrays["train"]), len(arrays["valid"])) <= 2 * settings.length:
            raise ValueError(
                f"{folder} holds too little text ({len(arrays['train'])} training and "
                f"{len(arrays['valid'])} held-out tokens) for sequences of {settings.length}"
            )
        return cls(settings, *(torch.from_numpy(arrays[key]) for key in ("train", "valid")))


def windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``(count, length)`` int64: pieces of a stream from places drawn at random."""
    starts = torch.randint(len(stream) - length, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)].long()


def generator_of(seed: int, step: int) -> torch.Generator:
    """The random numbers of one batch: the same for the same arguments, in any order of calls."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _text_files(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    skip = {"site-packages", "dist-packages", "__pycache__"}
    files = [
        path
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not skip & set(path.relative_to(folder).parts)
    ]
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r} under {folder}")
    return files


def _encode(files: list[Path], settings: TextData) -> dict[str, np.ndarray]:
    folder = Path(settings.folder or sysconfig.get_paths()["stdlib"]).expanduser()

    def scramble(path: Path) -> bytes:
        return hashlib.sha256(str(path.relative_to(folder)).encode()).digest()

    texts, total = [], 0
    for path in sorted(files, key=scramble):
        texts.append(_read(path))
        total += len(texts[-1])
        if total > settings.max_megabytes * 1e6:
            break
    heldout, training = _held_out(texts, settings.heldout)
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


def _read(path: Path) -> str:
    if path.suffix == ".gz":
        data = gzip.decompress(path.read_bytes())
    elif path.suffix == ".xz":
        data = lzma.decompress(path.read_bytes())
    else:
        data = path.read_bytes()
    return data.decode("utf-8", errors="replace")


def _held_out(texts: list[str], share: float) -> tuple[list[str], list[str]]:
    """Held-out texts and those to train on."""
    if len(texts) == 1:
        cut = round((1 - share) * len(texts[0]))
        return [texts[0][cut:]], [texts[0][:cut]]
    count = max(1, round(share * len(texts)))
    return texts[:count], texts[count:]
