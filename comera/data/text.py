"""Read text files as streams of tokens, and cut batches for language models from them."""

import codecs
import functools
import hashlib
import itertools
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from comera.data import vocabulary
from comera.extras import error_prefix

_STREAMS = ("train", "valid", "test")

_MOST_ODD = 1e-3  # share of characters that are none of UTF-8, as in a few test files of Python's
_TOKENIZER_SAMPLE = 4_000_000  # characters that a tokenizer is trained on


@dataclass
class TextData:
    """Source of the text of a language model.

    Args:
        folder: Folder of the text files, with its subfolders except those written by runs; by
            default the standard library of the running interpreter.
        pattern: Glob pattern of the text files; ``.gz`` and ``.xz`` files are decompressed.
        max_megabytes: Read files in a fixed pseudo-random order until they exceed so much text.
        vocab_size: Tokens of the byte-pair tokenizer, trained on the text.
        length: Tokens of a sequence.
        heldout: Share of the files, or of the text of a single file, kept for evaluation, by which
            settings are chosen: the first files in that order, at least one, or the text's end.
        test: Share kept in the same way for one evaluation of the trained model, after all settings
            are chosen: the files after the held-out files, or the text before the held-out end.
    """

    has_end = False  # whether runs may be as long as so many epochs

    folder: str | None = field(default=None, metadata=vocabulary.PATH)
    pattern: str = "**/*.py"
    max_megabytes: float = 12.0
    vocab_size: int = 8192
    length: int = 128
    heldout: float = 0.05
    test: float = 0.0

    def check(self, name: str = "text") -> None:
        """Raise ``ValueError`` for settings that are wrong for any text, in section ``name``."""
        if not self.max_megabytes > 0:
            raise ValueError(f"{name}.max_megabytes={self.max_megabytes} must be above 0")
        if self.length < 2:
            raise ValueError(f"{name}.length={self.length} must be at least 2")
        if self.vocab_size > vocabulary.MOST:
            raise ValueError(f"{name}.vocab_size={self.vocab_size} is above {vocabulary.MOST:,}")
        if self.vocab_size < (least := len(vocabulary.SPECIAL) + 256):
            raise ValueError(
                f"{name}.vocab_size={self.vocab_size} must be at least {least}: one for each byte"
            )
        if not 0 <= self.heldout < 1:
            raise ValueError(
                f"{name}.heldout={self.heldout} must be a share of the text, in [0, 1)"
            )
        if not 0 <= self.test < 1 - self.heldout:
            raise ValueError(
                f"{name}.test={self.test} must be a share of the text that leaves some to train "
                f"on, beside {name}.heldout={self.heldout}"
            )

    def find(self) -> None:
        """Raise ``FileNotFoundError`` if no text file matches; nothing is read."""
        _text_files(_folder(self), self.pattern)

    def digests(self) -> dict[str, str]:
        """Return digests of the files to read, by their names in the folder, in reading order.

        Raises ``FileNotFoundError`` if no file matches, and ``ValueError`` if decompression fails
        or too much is no text in UTF-8.
        """
        folder = _folder(self)
        found: dict[str, str] = {}
        characters, odd = 0, dict[str, int]()
        for path in _text_files(folder, self.pattern):
            digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")("replace")
            for block in vocabulary.read_blocks(path):  # a file may be larger than memory
                digest.update(block)
                text = decoder.decode(block)
                characters += len(text)
                odd[str(path)] = odd.get(str(path), 0) + text.count("\ufffd") + text.count("\0")
            characters += len(decoder.decode(b"", final=True))
            found[str(path.relative_to(folder))] = digest.hexdigest()
            if characters > self.max_megabytes * 1e6:
                break
        if (count := sum(odd.values())) > _MOST_ODD * characters:
            raise ValueError(
                f"{max(odd, key=odd.__getitem__)} must be text in UTF-8: {count:,} of "
                f"{characters:,} characters are none; convert it, or choose other files by pattern"
            )
        return found


@dataclass
class TextStreams:
    """Streams of tokens, numbered by falling frequency after the special tokens.

    Files of each stream follow one another; ``test`` is empty without a test. ``digests`` has the
    digests of the files that were read, by name, ``prepared`` is the digest of all streams.
    """

    settings: TextData
    train: Tensor
    valid: Tensor
    test: Tensor
    digests: Mapping[str, str] = field(default_factory=dict)
    prepared: str = ""
    tokenizer: vocabulary.Tokenizer | None = None

    @classmethod
    def prepare(cls, settings: TextData, digests: Mapping[str, str] | None = None) -> "TextStreams":
        """Read texts, train the tokenizer and encode, or load the streams from the cache.

        ``digests`` is the result of ``settings.digests()``, if known already. Raises
        ``FileNotFoundError`` if no file matches, and ``ValueError`` if there is too little text.
        """
        settings.check()
        folder = _folder(settings)
        digests = settings.digests() if digests is None else digests
        relevant = {key: getattr(settings, key) for key in ("vocab_size", "heldout", "test")}
        key = vocabulary.short_digest(["text-5", relevant, list(digests.items())])
        arrays = vocabulary.cached_arrays(f"text-{key}", lambda: _encode(settings, digests))
        for name in _STREAMS if settings.test else _STREAMS[:2]:
            if len(arrays[name]) <= 2 * settings.length:
                raise ValueError(
                    f"{folder} holds too little text ({len(arrays['train'])} tokens for training, "
                    f"{len(arrays['valid'])} for evaluation, {len(arrays['test'])} for a test) for "
                    f"sequences of {settings.length}"
                )
        train, valid, test = (torch.from_numpy(arrays[name]) for name in _STREAMS)
        # Not in the digest: its order may vary.
        tokenizer = vocabulary.from_array(arrays.pop("tokenizer"))
        prepared = vocabulary.array_digest(arrays)
        return cls(settings, train, valid, test, digests, prepared, tokenizer)


def _folder(settings: TextData) -> Path:
    return Path(settings.folder or sysconfig.get_paths()["stdlib"]).expanduser()


def windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut pieces of a stream at random places; int64 ``(count, length)``."""
    starts = torch.randint(len(stream) - length, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)].long()


def generator_of(seed: int, step: int) -> torch.Generator:
    """Return a random generator for one batch, which depends on the arguments alone."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _text_files(folder: Path, pattern: str) -> list[Path]:
    """List the text files in a fixed pseudo-random order, without folders of runs and sweeps."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    skip = {"site-packages", "dist-packages", "__pycache__"}

    @functools.cache  # most files share their folders
    def is_of_a_run(inner: Path) -> bool:
        return inner != folder and ((inner / ".lock").is_file() or is_of_a_run(inner.parent))

    with error_prefix(f"pattern={pattern!r}: ", (NotImplementedError, ValueError)):
        files = [
            path
            for path in folder.glob(pattern)
            if path.is_file()
            and not skip & set(path.relative_to(folder).parts)
            and not is_of_a_run(path.parent)
        ]
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r} under {folder}")
    return sorted(
        files, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest()
    )


def _encode(settings: TextData, digests: Mapping[str, str]) -> dict[str, np.ndarray]:
    folder = _folder(settings)
    texts = [
        b"".join(vocabulary.read_blocks(folder / name)).decode("utf-8", errors="replace")
        for name in digests
    ]
    parts = _split(texts, settings)
    before = itertools.accumulate(map(len, parts["train"]), initial=0)
    pairs = zip(parts["train"], before, strict=False)
    sample = [text for text, used in pairs if used <= _TOKENIZER_SAMPLE]
    tokenizer = vocabulary.train_byte_pairs(sample, settings.vocab_size)
    encoded = {
        name: np.concatenate([np.asarray(e.ids, np.int64) for e in tokenizer.encode_batch(part)])
        if part
        else np.empty(0, np.int64)
        for name, part in parts.items()
    }
    seen = np.bincount(encoded["train"], minlength=settings.vocab_size)
    number, kept = vocabulary.by_frequency(tokenizer, seen)
    arrays = {name: number[tokens].astype(np.int32) for name, tokens in encoded.items()}
    if settings.digests() != digests:
        raise vocabulary.changed_meanwhile(folder)
    return {**arrays, "tokenizer": kept}


def _split(texts: list[str], settings: TextData) -> dict[str, list[str]]:
    """Split texts for training, evaluation and test; cut the text if there is only one."""
    held, tested = settings.heldout, settings.test
    if len(texts) == 1:
        (text,) = texts
        first, second = (round(share * len(text)) for share in (1 - held - tested, 1 - held))
        return {"train": [text[:first]], "test": [text[first:second]], "valid": [text[second:]]}
    first = max(1, round(held * len(texts)))
    second = first + (max(1, round(tested * len(texts))) if tested else 0)
    return {"train": texts[second:], "valid": texts[:first], "test": texts[first:second]}


_PREDICTED_SHARE = 0.15
"""Share of the tokens to predict: 80 % of them masked, 10 % replaced, 10 % kept (BERT)."""


@dataclass
class MaskedText:
    """Batches of a masked language model, which depend only on a seed and a step number.

    A sequence is a leading ``[CLS]`` and ``settings.length - 1`` tokens of the streams. Batches
    hold ``tokens (B, T)``, ``positions (B, M)`` to predict and ``targets (B, M)``, all int64.
    """

    streams: TextStreams

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        return self._masked(self.streams.train, batch_size, generator_of(seed, step))

    def held_out(self, split: str, batch_size: int, count: int) -> list[dict[str, Tensor]]:
        """Draw ``count`` batches of ``valid`` or ``test``, the same in every run."""
        stream = getattr(self.streams, split)
        numbers = range(count) if len(stream) else ()
        return [self._masked(stream, batch_size, generator_of(-1, k)) for k in numbers]

    def _masked(
        self, stream: Tensor, batch_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        length = self.streams.settings.length - 1
        count = max(1, round(_PREDICTED_SHARE * length))
        window = windows(stream, batch_size, length, generator)
        positions = torch.rand(batch_size, length, generator=generator).argsort(1)[:, :count]
        targets = window.gather(1, positions)
        fate = torch.rand(batch_size, count, generator=generator)
        low, high = len(vocabulary.SPECIAL), self.streams.settings.vocab_size
        noise = torch.randint(low, high, (batch_size, count), generator=generator)
        shown = torch.where(fate < 0.8, vocabulary.MASK, torch.where(fate < 0.9, noise, targets))
        tokens = window.scatter(1, positions, shown)
        tokens = torch.cat([torch.full((batch_size, 1), vocabulary.CLS), tokens], 1)
        return {"tokens": tokens, "positions": positions + 1, "targets": targets}


@dataclass
class CausalText:
    """Batches of a causal language model, which depend only on a seed and a step number.

    ``tokens`` and ``targets``, the next ones, are both int64 ``(B, T)``.
    """

    streams: TextStreams

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        length = self.streams.settings.length + 1
        return _shifted(windows(self.streams.train, batch_size, length, generator_of(seed, step)))

    def held_out(
        self, split: str, batch_size: int, count: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Cut the first ``count`` batches of ``valid`` or ``test``, by default all, in order."""
        stream, length = getattr(self.streams, split), self.streams.settings.length
        if not len(stream):
            return []
        rows = (len(stream) - 1) // length
        if count is not None:
            rows = min(rows, count * batch_size)
        pieces = stream[: rows * length + 1].long().unfold(0, length + 1, length)
        return [_shifted(part) for part in pieces.split(batch_size)]


def _shifted(window: Tensor) -> dict[str, Tensor]:
    return {"tokens": window[:, :-1], "targets": window[:, 1:]}
