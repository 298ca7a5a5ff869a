"""Train and load tokenizers, compute digests of content, and load cached data.

Tokens are numbered by falling frequency, special tokens first. Data are identified by content.
"""

import gzip
import hashlib
import json
import logging
import lzma
import os
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from comera.extras import error_prefix, needed_by
from comera.files import cache_folder, naming_what_is_no_text, replacing, write_text

with needed_by("a vocabulary of text"):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

log = logging.getLogger("comera")

PATH = {"path": True}  # mark of a setting that is a path to data, or a list of them

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""The first tokens of every vocabulary, in this order."""
MOST = 1 << 24
"""Tokens of a vocabulary that is to be trained: room for more ends the process, with no error."""


def train_byte_pairs(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, ``SPECIAL`` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_word_pieces(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = _word_piece(models.WordPiece(unk_token=SPECIAL[UNKNOWN]))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_word_pieces(path: str | Path) -> Tokenizer:
    """Load the WordPiece tokenizer of a ``vocab.txt``, one token a line.

    It lowercases text unless a token without brackets has a capital. Raises ``FileNotFoundError``
    if the file is missing, ``ValueError`` without BERT's special tokens.
    """
    path = find_vocabulary(path)
    with naming_what_is_no_text(path):
        tokens = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    if missing := [token for token in SPECIAL if token not in tokens]:
        raise ValueError(f"{path} is not a BERT vocabulary: it lacks {', '.join(missing)}")
    vocab = {token: number for number, token in enumerate(tokens)}
    cased = any(re.search("[A-Z]", token) for token in tokens if not token.startswith("["))
    return _word_piece(models.WordPiece(vocab, unk_token=SPECIAL[UNKNOWN]), lowercase=not cased)


def find_file(source: str | Path, expected: str, kind: str = "data file") -> Path:
    """Return the path of a file, or raise ``FileNotFoundError``."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no {kind} at {path}; {expected}")
    return path


def find_vocabulary(path: str | Path) -> Path:
    return find_file(path, "expected a text file with one WordPiece token a line", "vocabulary")


def _word_piece(model: Any, lowercase: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def by_frequency(tokenizer: Tokenizer, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number tokens by falling count ``(vocab,)``, special ones first.

    Returns the new number of each token, and the bytes of the tokenizer with these numbers.
    """
    texts = [tokenizer.id_to_token(k) for k in range(tokenizer.get_vocab_size())]
    place: dict[str | None, int] = {token: k - len(SPECIAL) for k, token in enumerate(SPECIAL)}
    # Trainers number equal candidates in no fixed order, so ties are sorted by text.
    order = sorted(range(len(texts)), key=lambda k: (place.get(texts[k], 0), -counts[k], texts[k]))
    number = np.argsort(order)
    described = json.loads(tokenizer.to_str())
    vocab = {token: int(number[old]) for token, old in described["model"]["vocab"].items()}
    described["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda pair: pair[1]))
    for token in described["added_tokens"]:
        token["id"] = int(number[token["id"]])
    described["added_tokens"].sort(key=lambda token: token["id"])
    made = Tokenizer.from_str(json.dumps(described))
    return number, np.frombuffer(made.to_str().encode(), np.uint8)


def from_array(kept: np.ndarray) -> Tokenizer:
    return Tokenizer.from_str(kept.tobytes().decode())


def cached_arrays(name: str, prepare: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Load arrays from the cache; prepare and cache them if there is no file that is readable."""
    path = cache_folder() / f"{name}.npz"
    if path.is_file():
        try:
            with path.open("rb") as raw, np.load(raw) as file:
                return {key: file[key] for key in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as problem:
            log.warning("the cache %s is unreadable (%s); preparing the data again", path, problem)
    arrays = prepare()
    save_arrays(path, arrays)
    return arrays


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


LARGE = 1 << 26  # bytes from which the digest of a file is cached
_SETTLED_SECONDS = 2.0
"""Age of the last change after which another one is sure to change the file's times."""


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, decompressed if its name ends in .gz or .xz.

    The digest of a file of ``LARGE`` bytes or more is cached until its :func:`signature` changes.
    Raises ``ValueError`` if the file cannot be decompressed, or changes meanwhile.
    """
    before = signature(path)
    large = path.stat().st_size >= LARGE
    memory = cache_folder() / "digests" / short_digest(before)
    if large and memory.is_file():
        return memory.read_text(encoding="ascii")
    settled = time.time() - path.stat().st_ctime > _SETTLED_SECONDS
    running = hashlib.sha256()
    for block in read_blocks(path):
        running.update(block)
    check_unchanged(path, before)
    if large and settled:
        try:
            write_text(memory, running.hexdigest())
        except OSError as problem:  # as where the cache may only be read
            log.info("the digest of %s is not cached, and is computed each time: %s", path, problem)
    return running.hexdigest()


def array_digest(arrays: Mapping[str, np.ndarray]) -> str:
    running = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        running.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        running.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return running.hexdigest()


def short_digest(content: Any) -> str:
    """Return 32 hexadecimal digits that identify plain values."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def signature(path: Path) -> list[Any]:
    """Return path, inode, size and times of a file, which show changes: ``ctime`` only grows."""
    facts = path.stat()
    times = [facts.st_mtime_ns, facts.st_ctime_ns]
    return [os.fspath(path.resolve()), facts.st_dev, facts.st_ino, facts.st_size, *times]


def check_unchanged(path: Path, before: list[Any]) -> None:
    """Raise ``ValueError`` if a file no longer has an earlier :func:`signature`."""
    if signature(path) != before:
        raise changed_meanwhile(path)


def changed_meanwhile(what: object) -> ValueError:
    """Return the error for data that changed while they were read."""
    return ValueError(
        f"{what} changed while it was read: run the same command again once nothing writes to it"
    )


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces, .gz and .xz decompressed; ``ValueError`` if damaged."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    kinds = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError)
    with error_prefix(f"{path} cannot be decompressed: ", kinds), opener(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block
