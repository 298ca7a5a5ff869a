"""Read sentence pairs of natural-language inference, as in the files of SNLI, MNLI and RTE."""

import gzip
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.data import vocabulary
from comera.files import naming_what_is_no_text

log = logging.getLogger("comera")

_SHORTEST = 5  # tokens of the shortest pair: [CLS], one of each sentence, [SEP] after both
LABELS = ("entailment", "neutral", "contradiction")
_LABEL_NUMBERS = {
    "entailment": 0, "neutral": 1, "contradiction": 2, "not_entailment": 1, "0": 0, "1": 1, "2": 2,
}  # fmt: skip
_FIELDS = {
    "premise": ("premise", "sentence1"),
    "hypothesis": ("hypothesis", "sentence2"),
    "label": ("label", "gold_label"),
}
_EXPECTED = (
    "expected JSON lines or tab-separated values (.jsonl, .tsv, .txt, each also .gz) with the "
    "fields premise/sentence1, hypothesis/sentence2 and label/gold_label, as SNLI and MNLI are "
    "distributed, or 'datasets:NAME' for a Hugging Face data set"
)


@dataclass
class NliData:
    """Source of sentence pairs.

    Args:
        train: A training file or several, or ``datasets:NAME@SPLIT``.
        dev: Files for evaluation, given in the same way; settings are chosen by their results.
        test: Files for one evaluation of the trained model, after all settings are chosen.
        vocab: A WordPiece ``vocab.txt``; by default one is trained on the training text. Text is
            lowercased unless the file has capitals.
        vocab_size: Tokens to train where ``vocab`` is not given.
        length: Longest pair in tokens, ``[CLS]`` and both ``[SEP]`` included; longer pairs are
            cut, the longer sentence first.
    """

    has_end = True  # whether runs may be as long as so many epochs

    train: str | list[str] = field(default_factory=list, metadata=vocabulary.PATH)
    dev: str | list[str] = field(default_factory=list, metadata=vocabulary.PATH)
    test: str | list[str] = field(default_factory=list, metadata=vocabulary.PATH)
    vocab: str | None = field(default=None, metadata=vocabulary.PATH)
    vocab_size: int = 30522
    length: int = 128

    def __post_init__(self) -> None:
        for name in ("train", "dev", "test"):
            if isinstance(source := getattr(self, name), str):
                setattr(self, name, [source])

    def check(self, name: str = "nli") -> None:
        """Raise ``ValueError`` for settings that no data could fit; ``name`` is the section."""
        if self.length < _SHORTEST:
            raise ValueError(
                f"{name}.length={self.length} must be at least {_SHORTEST}: [CLS], a token of each "
                "sentence and [SEP] after both"
            )
        if not 1 <= self.vocab_size <= vocabulary.MOST:
            raise ValueError(
                f"{name}.vocab_size={self.vocab_size} must be from 1 to {vocabulary.MOST:,}"
            )

    @property
    def splits(self) -> dict[str, list[str]]:
        """Files and data sets of ``train``, ``dev`` and, if given, ``test``, by these names."""
        given = {"train": self.train, "dev": self.dev, "test": self.test}
        return {name: list(sources) for name, sources in given.items() if sources or name != "test"}

    def find(self) -> None:
        """Raise ``FileNotFoundError`` if a file is missing, ``ValueError`` if no file is named."""
        for name, sources in self.splits.items():
            if not sources:
                raise ValueError(f"nli.{name} names no file; {_EXPECTED}")
            for source in sources:
                if not _is_on_hub(source):
                    vocabulary.find_file(source, _EXPECTED)
        if self.vocab:
            vocabulary.find_vocabulary(self.vocab)

    def digests(self) -> dict[str, str]:
        """Return digests of all files and data sets, by their names in the settings.

        Raises ``FileNotFoundError``, which describes the expected format, if a file is missing, and
        ``ValueError`` if no file is named, or a file cannot be decompressed.
        """
        self.find()
        found = {s: _digest(s) for sources in self.splits.values() for s in sources}
        if self.vocab:
            found[self.vocab] = vocabulary.content_digest(vocabulary.find_vocabulary(self.vocab))
        return found


class NliPairs:
    """Encoded pairs, and batches that depend only on a seed and a step number.

    Batches hold pairs of similar length, padded to the longest. ``digests`` has the digests of the
    files and data sets that were read, ``prepared`` is the digest of the encoded pairs.
    """

    def __init__(
        self, settings: NliData, arrays: Mapping[str, np.ndarray], digests: Mapping[str, str]
    ) -> None:
        arrays = dict(arrays)
        self.tokenizer = vocabulary.from_array(arrays.pop("tokenizer"))
        self.settings, self.digests = settings, digests
        self.prepared = vocabulary.array_digest(arrays)
        self.vocab_size = int(arrays["vocab_size"])
        self.splits = {name: _Split(arrays, name) for name in settings.splits}
        self.train = self.splits["train"]
        self._order: tuple[tuple[int, int, int], np.ndarray] | None = None

    @classmethod
    def prepare(cls, settings: NliData, digests: Mapping[str, str] | None = None) -> "NliPairs":
        """Read and encode the pairs, or load them from the cache; ``digests`` are computed if None.

        Raises ``FileNotFoundError``, and ``ValueError`` if a row has no label or sentence.
        """
        digests = settings.digests() if digests is None else digests
        first: dict[str, tuple[str, str]] = {}
        for part, sources in settings.splits.items():
            for source in sources:
                other, same = first.setdefault(digests[source], (part, source))
                if other != part:
                    log.warning(
                        "nli.%s=%s is what nli.%s=%s is: its figures are not of data kept apart",
                        part, source, other, same,
                    )  # fmt: skip
        relevant = vars(settings) | {
            **{name: [digests[s] for s in sources] for name, sources in settings.splits.items()},
            "vocab": settings.vocab and digests[settings.vocab],
        }
        key = ["nli-3", relevant]
        if settings.vocab and not vocabulary.load_word_pieces(settings.vocab).normalizer.lowercase:
            key.append("cased")  # earlier versions lowercased these, too
        name = f"nli-{vocabulary.short_digest(key)}"
        arrays = vocabulary.cached_arrays(name, lambda: _encode(settings, digests))
        return cls(settings, arrays, digests)

    def batch(
        self, step: int, batch_size: int, seed: int, length: int | None = None
    ) -> dict[str, Tensor]:
        """Return training batch number ``step``.

        It has ``tokens`` and ``segments`` int64 ``(B, T)``, ``labels`` int64 ``(B,)``; T is
        ``length``, or the length of the longest row.
        """
        per_epoch = len(self.train.labels) // batch_size
        epoch, position = divmod(step, per_epoch)
        key = (epoch, batch_size, seed)
        if self._order is None or self._order[0] != key:  # random batches of similar length
            rng = np.random.default_rng([seed % 2**32, epoch])
            order = rng.permutation(len(self.train.labels))[: per_epoch * batch_size]
            chunk = 32 * batch_size
            for start in range(0, len(order), chunk):
                part = order[start : start + chunk]
                by_length = np.argsort(self.train.lengths[part], kind="stable")
                order[start : start + chunk] = part[by_length]
            self._order = key, order.reshape(-1, batch_size)[rng.permutation(per_epoch)]
        return self.train.collate(self._order[1][position], length)

    def held_out(
        self, split: str, batch_size: int, limit: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return rows of ``dev`` or ``test``, at most ``limit``, in batches sorted by length."""
        if (part := self.splits.get(split)) is None:
            return []
        rows = np.arange(len(part.labels))[:limit]
        rows = rows[np.argsort(part.lengths[rows], kind="stable")]
        return [part.collate(rows[k : k + batch_size]) for k in range(0, len(rows), batch_size)]


class _Split:
    """The encoded pairs of one split, with all tokens in one array."""

    def __init__(self, arrays: Mapping[str, np.ndarray], name: str) -> None:
        self.tokens = arrays[f"{name}_tokens"]
        self.first_lengths = arrays[f"{name}_first"]
        self.lengths = arrays[f"{name}_lengths"]
        self.labels = arrays[f"{name}_labels"]
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def collate(self, rows: np.ndarray, width: int | None = None) -> dict[str, Tensor]:
        """Pad rows to ``tokens`` and ``segments`` ``(B, T)``, with ``labels`` ``(B,)``."""
        width = width or int(self.lengths[rows].max())
        tokens = np.full((len(rows), width), vocabulary.PAD, np.int64)
        segments = np.zeros((len(rows), width), np.int64)
        for k, row in enumerate(rows):
            start, length = self.starts[row], self.lengths[row]
            tokens[k, :length] = self.tokens[start : start + length]
            segments[k, self.first_lengths[row] : length] = 1
        arrays = {"tokens": tokens, "segments": segments}
        arrays["labels"] = self.labels[rows].astype(np.int64)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _digest(source: str) -> str:
    if not _is_on_hub(source):
        return vocabulary.content_digest(vocabulary.find_file(source, _EXPECTED))
    running = hashlib.sha256()
    for row in _hub_rows(source):
        running.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return running.hexdigest()


def read_pairs(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield premise, hypothesis and label number of each row that has a label (not ``-`` or -1)."""
    number, labelled = 0, False
    for number, row in enumerate(_rows(source), start=1):
        found = {
            name: next((row[key] for key in keys if row.get(key) is not None), None)
            for name, keys in _FIELDS.items()
        }
        if lacking := [name for name, value in found.items() if value is None]:
            raise ValueError(
                f"row {number} of {source} has no {' or '.join(lacking)} "
                f"(its fields: {', '.join(map(str, row))}); {_EXPECTED}"
            )
        label = str(found["label"])
        if label in ("-", "-1"):
            continue
        if label not in _LABEL_NUMBERS:
            raise ValueError(
                f"row {number} of {source} has the label {label!r}; "
                f"expected {', '.join(LABELS)} or 0 to {len(LABELS) - 1}"
            )
        labelled = True
        yield str(found["premise"]), str(found["hypothesis"]), _LABEL_NUMBERS[label]
    if not number:
        raise ValueError(f"{source} holds no rows; {_EXPECTED}")
    if not labelled:
        raise ValueError(f"{source} has no label but '-' in {number:,} rows, and pairs need labels")


def _rows(source: str) -> Iterator[Mapping[str, Any]]:
    if _is_on_hub(source):
        yield from _hub_rows(source)
        return
    path = vocabulary.find_file(source, _EXPECTED)
    open_text = gzip.open if path.suffix == ".gz" else open
    # Files of Windows' programs may begin with a mark.
    with naming_what_is_no_text(path), open_text(path, "rt", encoding="utf-8-sig") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first = next(lines, (1, ""))
        if first[1].lstrip().startswith("{"):
            for number, line in itertools.chain([first], lines):
                try:
                    row = json.loads(line, object_pairs_hook=_of_pairs)
                except KeyError as problem:
                    raise ValueError(f"line {number} of {source} has {problem} twice") from None
                except json.JSONDecodeError as problem:
                    raise ValueError(
                        f"line {number} of {source} is no JSON: {problem.msg} at character "
                        f"{problem.pos + 1}"
                    ) from None
                if not isinstance(row, dict):
                    raise ValueError(
                        f"line {number} of {source} must be a JSON object, not {line.strip()[:80]}"
                    )
                yield row
            return
        names = first[1].rstrip("\n").split("\t")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the first line of {source} has the column {twice[0]!r} twice")
        for _, line in lines:
            yield dict(zip(names, line.rstrip("\n").split("\t"), strict=False))


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a line of JSON; raise ``KeyError`` for a key that is there twice."""
    if len(made := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise KeyError(next(key for key in keys if keys.count(key) > 1))
    return made


def _is_on_hub(source: str) -> bool:
    return source.startswith("datasets:")


def _hub_rows(source: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{source} needs the datasets package: pip install 'comera[hf]'; or {_EXPECTED}"
        ) from None
    name, _, split = source.removeprefix("datasets:").partition("@")
    yield from datasets.load_dataset(name, split=split or "train")


def _encode(settings: NliData, digests: Mapping[str, str]) -> dict[str, np.ndarray]:
    splits = {
        name: [pair for source in sources for pair in read_pairs(source)]
        for name, sources in settings.splits.items()
    }
    if settings.vocab:
        tokenizer = vocabulary.load_word_pieces(settings.vocab)
    else:
        sentences = (text for pair in splits["train"] for text in pair[:2])
        tokenizer = vocabulary.train_word_pieces(sentences, settings.vocab_size)
    encoded = {
        name: [
            [np.asarray(e.ids, np.int64) for e in tokenizer.encode_batch([p[side] for p in pairs])]
            for side in (0, 1)
        ]
        for name, pairs in splits.items()
    }
    size = tokenizer.get_vocab_size()
    if not settings.vocab and size > settings.vocab_size:
        raise ValueError(
            f"nli.vocab_size={settings.vocab_size} must be at least {size} with these sentences: "
            "so many are their characters and the special tokens"
        )
    seen = np.concatenate([*encoded["train"][0], *encoded["train"][1]])
    number, kept = vocabulary.by_frequency(tokenizer, np.bincount(seen, minlength=size))
    arrays: dict[str, np.ndarray] = {"vocab_size": np.asarray(size), "tokenizer": kept}
    for name, (premises, hypotheses) in encoded.items():
        rows, first = zip(
            *(
                joined(number[premise], number[hypothesis], settings.length)
                for premise, hypothesis in zip(premises, hypotheses, strict=True)
            ),
            strict=True,
        )
        arrays[f"{name}_tokens"] = np.concatenate(rows).astype(np.int32)
        arrays[f"{name}_lengths"] = np.asarray([len(row) for row in rows], np.int32)
        arrays[f"{name}_first"] = np.asarray(first, np.int32)
        arrays[f"{name}_labels"] = np.asarray([pair[2] for pair in splits[name]], np.int8)
    if settings.digests() != digests:
        raise vocabulary.changed_meanwhile(", ".join(digests))
    return arrays


def joined(premise: np.ndarray, hypothesis: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Join and cut the tokens of a pair; return them and the start of the hypothesis."""
    left, right = len(premise), len(hypothesis)
    excess = max(0, left + right - (length - 3))  # the longer is cut first, then both
    cut_left = min(excess, max(0, left - right))
    cut_right = min(excess - cut_left, max(0, right - left))
    rest = excess - cut_left - cut_right
    left, right = left - cut_left - (rest + 1) // 2, right - cut_right - rest // 2
    return np.concatenate(
        [[vocabulary.CLS], premise[:left], [vocabulary.SEP], hypothesis[:right], [vocabulary.SEP]]
    ), left + 2
