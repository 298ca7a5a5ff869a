"""Prepare click logs: rows of categories and numbers with a label, for recommendation models.

Prepared rows are cached; an interrupted preparation resumes with the first missing chunk.
Categories are numbered by falling frequency.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from comera.data import click_files, vocabulary
from comera.files import cache_folder, replacing, write_text

log = logging.getLogger("comera")


@dataclass
class ClickData:
    """Source of a click log.

    Args:
        file: A table with named columns (``.npz``, ``.csv``, ``.tsv``, ``.parquet``), Criteo's
            ``train.txt`` or the ratings of MovieLens.
        format: ``table``, ``criteo`` or ``movielens``.
        label: Column of the label; known for the other formats.
        positive: A label above this is a click.
        fields: Columns of categories; all but the label and ``continuous`` if none is named.
        continuous: Columns of numbers.
        transform: What becomes of continuous numbers x: ``log`` is ``log(1 + max(x, 0))``,
            ``standard`` shifts and scales them to mean 0 and variance 1, cut at 5; missing numbers
            (empty, or NaN in ``.npz`` and ``.parquet``) become 0.
        min_count: Categories seen less often in training share one row.
        hash_rows: Number of rows that the categories of a field share by their hashes, in each
            field with at least so many categories in training; null shares no rows by hash.
        heldout: Share of the rows for evaluation, by which settings are chosen.
        test: Share of the rows for one last evaluation, after all settings are chosen.
        split: ``random``, or ``last`` for the last rows of the file, such as a log's last day, of
            which a test takes the very last.
        skip_bad_lines: Leave malformed lines out and say how many, instead of stopping there: lines
            of more or fewer columns, without label, or with words, ``nan`` or ``inf`` for numbers.
    """

    has_end = True  # whether runs may be as long as so many epochs

    file: str = field(default="", metadata=vocabulary.PATH)
    format: Literal["table", "criteo", "movielens"] = "table"
    label: str | None = None
    positive: float = 0.0
    fields: list[str] = field(default_factory=list)
    continuous: list[str] = field(default_factory=list)
    transform: Literal["log", "standard"] = "log"
    min_count: int = 1
    hash_rows: int | None = None
    heldout: float = 0.1
    test: float = 0.0
    split: Literal["random", "last"] = "random"
    skip_bad_lines: bool = False

    def check(self, name: str = "clicks") -> None:
        """Raise ``ValueError`` for settings that no data could fit; ``name`` is the section."""
        if self.min_count < 1:
            raise ValueError(f"{name}.min_count={self.min_count} must be at least 1")
        if self.hash_rows is not None and self.hash_rows < 2:
            raise ValueError(
                f"{name}.hash_rows={self.hash_rows} must be at least 2, or null for a row a "
                "category: the first row is that of rare ones"
            )
        for key, share in (("heldout", self.heldout), ("test", self.test)):
            if not 0 <= share < 1:
                raise ValueError(f"{name}.{key}={share} must be a share of the rows, in [0, 1)")
        named = [key for key in ("label", "fields", "continuous") if getattr(self, key)]
        if self.format == "criteo" and named:
            raise ValueError(f"{name}.{named[0]} is not for format=criteo, whose columns are known")

    def find(self) -> None:
        """Raise ``FileNotFoundError`` if there is no such file; nothing is read."""
        vocabulary.find_file(self.file, click_files.EXPECTED)

    def digests(self) -> dict[str, str]:
        path = vocabulary.find_file(self.file, click_files.EXPECTED)
        return {self.file: vocabulary.content_digest(path)}


class Clicks:
    """Prepared rows, and batches that depend only on a seed and a step number.

    ``splits`` are the row numbers of ``train``, ``valid`` and ``test``, ``skipped`` is how many
    malformed lines were left out, ``digests`` that of the file, ``prepared`` that of the rows.
    """

    def __init__(self, settings: ClickData, folder: Path, digests: Mapping[str, str]) -> None:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        self.settings, self.digests = settings, digests
        self.prepared: str = facts["prepared"]
        self.table_sizes: list[int] = facts["table_sizes"]
        self.field_names: list[str] = facts["fields"]
        self.skipped: int = facts["skipped"]
        self._folder = folder
        self._arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        self.num_continuous = int(self._arrays["continuous"].shape[1])
        self.splits = {name: np.load(folder / f"{name}.npy") for name in _SPLITS}
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    @classmethod
    def prepare(cls, settings: ClickData, digests: Mapping[str, str] | None = None) -> "Clicks":
        """Read the file and number its categories, or load the prepared rows from the cache.

        ``digests`` is the result of ``settings.digests()``, if known already. Raises
        ``FileNotFoundError`` if there is no such file, and ``ValueError`` if a column is missing, a
        line malformed, or a share leaves no rows.
        """
        settings.check()
        path = vocabulary.find_file(settings.file, click_files.EXPECTED)
        digests = settings.digests() if digests is None else digests
        relevant = {**vars(settings), "file": [path.name, digests[settings.file]]}
        folder = cache_folder() / f"clicks-{vocabulary.short_digest([6, relevant])}"
        if not (folder / _FACTS).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):  # another run may be preparing the same
                if not (folder / _FACTS).is_file():
                    _prepare(settings, path, folder, digests)
        return cls(settings, folder, digests)

    @property
    def categories(self) -> click_files.ClickRows:
        """Encoder of raw rows as inputs of the model; each access reads it from the cache."""
        return click_files.ClickRows.load(self._folder / click_files.CATEGORIES)

    def batch(self, step: int, batch_size: int, seed: int) -> dict[str, Tensor]:
        """Return training batch number ``step``.

        ``continuous`` is float32 (B, C), ``fields`` is int64 (B, F), ``labels`` is float32 (B,).
        """
        epoch, position = divmod(step, len(self.splits["train"]) // batch_size)
        if self._order is None or self._order[0] != (epoch, seed):
            rng = np.random.default_rng([seed % 2**32, epoch])
            self._order = (epoch, seed), rng.permutation(self.splits["train"])
        return self._rows(self._order[1][position * batch_size : (position + 1) * batch_size])

    def held_out(
        self, split: str, batch_size: int, limit: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the rows of ``valid`` or ``test``, or the first ``limit``, in batches."""
        rows = self.splits[split][:limit]
        return (self._rows(rows[k : k + batch_size]) for k in range(0, len(rows), batch_size))

    def _rows(self, rows: np.ndarray) -> dict[str, Tensor]:
        found = {name: torch.from_numpy(array[rows]) for name, array in self._arrays.items()}
        return {**found, "fields": found["fields"].long()}


_FACTS = "facts.json"
_ARRAYS = ("continuous", "fields", "labels")
_SPLITS = ("train", "valid", "test")


def _prepare(settings: ClickData, path: Path, folder: Path, digests: Mapping[str, str]) -> None:
    columns = click_files.columns_of(
        path, settings.format, settings.label, settings.continuous, settings.fields
    )
    chunks = _read(settings, path, columns, folder / "chunks")
    labels = np.concatenate([_load(chunk, "labels") for chunk in chunks])
    labels = (labels > settings.positive).astype(np.float32)
    if len(labels) and labels.min() == labels.max():
        log.warning(
            "%s: %s row is a click, since clicks.positive is %g and %s is never on its other side: "
            "there is nothing to learn",
            path, "every" if labels[0] else "no", settings.positive, columns.label,
        )  # fmt: skip
    splits = _split(settings, len(labels))
    if skipped := sum(int(_load(chunk, "skipped")) for chunk in chunks):
        log.warning("%s: %d malformed lines were left out", path, skipped)
    fields, sizes = np.empty((len(labels), len(columns.fields)), np.int32), []
    integers, known = _load(chunks[0], "integers"), []
    # One field at a time: the codes of all of them, 64 bits each, may be more than memory holds.
    for k, name in enumerate(columns.fields):
        values = np.concatenate([_load(chunk, f"field{k}") for chunk in chunks])
        numbered, size = _numbered(name, bool(integers[k]), values[splits["train"]], settings)
        fields[:, k] = numbered.rows_of(values)
        sizes.append(size)
        known.append(numbered)
    continuous = np.concatenate([_load(chunk, "continuous") for chunk in chunks])
    with warnings.catch_warnings():  # a column may be empty in the training rows
        warnings.simplefilter("ignore", RuntimeWarning)
        seen = continuous[splits["train"]]
        scale = tuple(np.nan_to_num(of(seen, 0, dtype=float)) for of in (np.nanmean, np.nanstd))
    arrays = {
        "labels": labels,
        "fields": fields,
        "continuous": click_files.transformed(continuous, settings.transform, *scale),
        **splits,
    }
    rows = click_files.ClickRows(known, list(columns.continuous), settings.transform, *scale)
    rows.save(folder / click_files.CATEGORIES)
    for name, array in arrays.items():
        with replacing(folder / f"{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, array)
    # The folder is named after these digests: rows of another content must not be found there.
    if settings.digests() != digests:
        shutil.rmtree(folder / "chunks")
        raise vocabulary.changed_meanwhile(path)
    facts = {
        "table_sizes": sizes, "fields": list(columns.fields), "skipped": skipped,
        "prepared": vocabulary.array_digest(arrays),
    }  # fmt: skip
    write_text(folder / _FACTS, json.dumps(facts))
    shutil.rmtree(folder / "chunks")


def _read(
    settings: ClickData, path: Path, columns: click_files.Columns, folder: Path
) -> list[Path]:
    """Write the chunks that an earlier preparation has not written to files, and list all."""
    folder.mkdir(parents=True, exist_ok=True)
    found, before = sorted(folder.glob("*.npz")), vocabulary.signature(path)
    chunks = click_files.read_chunks(
        path, settings.format, columns, settings.skip_bad_lines, len(found)
    )
    for number, chunk in enumerate(chunks, start=len(found)):
        vocabulary.check_unchanged(path, before)
        found.append(folder / f"{number:06d}.npz")
        vocabulary.save_arrays(found[-1], chunk)
    if not found:
        raise ValueError(f"{path} holds no rows")
    return found


def _load(chunk: Path, name: str) -> np.ndarray:
    with np.load(chunk) as file:
        return file[name]


def _split(settings: ClickData, rows: int) -> dict[str, np.ndarray]:
    held, tested = round(settings.heldout * rows), round(settings.test * rows)
    if not held or held + tested >= rows or (settings.test and not tested):
        raise ValueError(
            f"clicks.heldout={settings.heldout} and clicks.test={settings.test} of {rows} rows "
            "must be one row at least, a test of 0 apart, and leave some to train on"
        )
    order = np.arange(rows)
    if settings.split == "random":
        order = np.random.default_rng(0).permutation(rows)
    parts = np.split(order, [rows - held - tested, rows - tested])
    return {name: np.sort(part) for name, part in zip(_SPLITS, parts, strict=True)}


def _numbered(
    name: str, integers: bool, codes: np.ndarray, settings: ClickData
) -> tuple[click_files.Field, int]:
    """Number the categories of training rows, and count the rows of their table."""
    known, counts = np.unique(codes, return_counts=True)
    none = np.empty(0, np.uint64), np.empty(0, np.int32)
    if settings.hash_rows is not None and len(known) >= settings.hash_rows:
        return click_files.Field(name, integers, settings.hash_rows, *none), settings.hash_rows
    frequent = counts >= settings.min_count
    order = np.argsort(-counts[frequent], kind="stable")
    number = np.empty(len(order), np.int32)
    number[order] = 1 + np.arange(len(order))
    return click_files.Field(name, integers, None, known[frequent], number), 1 + len(order)
