"""Rows of click logs as their files have them, a chunk at a time: labels, numbers, categories.

Read are tables with named columns (``.npz``, ``.csv``, ``.tsv``, ``.parquet``), the ``train.txt``
of the Criteo challenges as distributed, and the ratings of MovieLens.

Rows of a click log as a trained model takes them: raw values in, numbers of rows out.

What the preparation of a log has learned from its training rows is kept with a run: the row of
each category that has one, by its code, and how numbers are scaled.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from comera.extras import needed_by
from comera.files import naming_what_is_no_text, replacing

if TYPE_CHECKING:
    import pandas as pd


CATEGORIES = "categories.safetensors"
"""Name of the file in the folder of a run."""

RARE = 0
"""Row of a table for all categories that are not in the vocabulary."""

_KEY = "comera.categories"


@dataclass
class Field:
    """How the values of one column become rows of its table.

    Attributes:
        name: The column.
        integers: Values are whole numbers, which are their own codes; else text, which is hashed.
        hash_rows: Rows that categories share by their hashes; None where each has its own.
        codes: ``(n,)`` uint64, sorted, of the categories that have a row of their own.
        rows: ``(n,)`` int32, that row.
    """

    name: str
    integers: bool
    hash_rows: int | None
    codes: np.ndarray
    rows: np.ndarray

    def rows_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the row of each code, :data:`RARE` where it has none; int32."""
        if self.hash_rows is not None:
            return (1 + codes % np.uint64(self.hash_rows - 1)).astype(np.int32)
        if not len(self.codes):
            return np.full(len(codes), RARE, np.int32)
        place = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[place] == codes, self.rows[place], RARE).astype(np.int32)

    def code_of(self, value: Any) -> np.uint64:
        """Return the code of a value as it stands in JSON; null is an empty cell.

        Raises:
            ValueError: If it is none.
        """
        if isinstance(value, list | dict):
            raise ValueError(f"{self.name} is {value!r}, expected a text or a number")
        if not self.integers:
            return codes_of_text(["" if value is None else str(value)])[0]
        try:
            number = int(str(value))  # of true and false that fails, too
            return np.uint64(number) if number >= 0 else np.int64(number).astype(np.uint64)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.name} is {value!r}, expected a whole number") from None


@dataclass
class ClickRows:
    """What turns raw rows into the inputs of a click predictor.

    Attributes:
        fields: Columns of categories, in the order of the model's tables.
        continuous: Columns of numbers, in the order in which the model takes them.
        transform: What becomes of them, see ``ClickData``.
        mean: ``(C,)``, of ``standard``.
        spread: ``(C,)``, the same.
    """

    fields: list[Field]
    continuous: list[str]
    transform: str
    mean: np.ndarray = field(default_factory=lambda: np.empty(0))
    spread: np.ndarray = field(default_factory=lambda: np.empty(0))

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor, list[list[str]]]:
        """Return the two inputs of the model, and of each row the columns it does not know.

        Args:
            rows: Values by column. A number may be missing or null, a category null, which is an
                empty cell.

        Returns:
            ``(n, C)`` float32, ``(n, F)`` int64; and of each row the names of columns whose value
            was not in the training rows, or seldom, and is read as a rare one.

        Raises:
            ValueError: If a column is missing, unknown, or holds what it cannot.
        """
        numbers = np.full((len(rows), len(self.continuous)), np.nan, np.float32)  # as in training
        codes = np.zeros((len(rows), len(self.fields)), np.uint64)
        for number, row in enumerate(rows):
            self._check_names(row)
            for k, name in enumerate(self.continuous):
                numbers[number, k] = _number(name, row.get(name))
            for k, column in enumerate(self.fields):
                codes[number, k] = column.code_of(row[column.name])
        found = [column.rows_of(codes[:, k]) for k, column in enumerate(self.fields)]
        places = np.stack(found, 1).astype(np.int64)
        unknown = [
            [
                column.name
                for column, place in zip(self.fields, line, strict=True)
                if place == RARE and column.hash_rows is None
            ]
            for line in places
        ]
        continuous = transformed(numbers, self.transform, self.mean, self.spread)
        return torch.from_numpy(continuous), torch.from_numpy(places), unknown

    def _check_names(self, row: Mapping[str, Any]) -> None:
        names = [column.name for column in self.fields]
        lost = [name for name in names if name not in row]
        odd = [name for name in row if name not in names and name not in self.continuous]
        if lost or odd:
            what = f"{lost[0]!r} is missing" if lost else f"{odd[0]!r} is no column of the model"
            numbers = f", and may have {', '.join(self.continuous)}" if self.continuous else ""
            raise ValueError(f"{what}: a row has {', '.join(names)}{numbers}")

    def save(self, path: Path) -> None:
        """Write everything to a file."""
        arrays = {"mean": self.mean, "spread": self.spread}
        for k, column in enumerate(self.fields):
            arrays |= {f"codes.{k}": column.codes, f"rows.{k}": column.rows}
        described = {
            "fields": [[c.name, c.integers, c.hash_rows] for c in self.fields],
            "continuous": self.continuous,
            "transform": self.transform,
        }
        with replacing(path) as temporary:
            save_file(arrays, temporary, {_KEY: json.dumps(described)})

    @classmethod
    def load(cls, path: Path) -> "ClickRows":
        """Read what :meth:`save` has written.

        Raises:
            ValueError: If the file is damaged or of another program.
        """
        try:
            with safe_open(path, "numpy") as file:
                described = json.loads((file.metadata() or {})[_KEY])
                fields = [
                    Field(
                        str(name),
                        bool(integers),
                        hashed,
                        file.get_tensor(f"codes.{k}"),
                        file.get_tensor(f"rows.{k}"),
                    )
                    for k, (name, integers, hashed) in enumerate(described["fields"])
                ]
                scale = file.get_tensor("mean"), file.get_tensor("spread")
                return cls(fields, described["continuous"], described["transform"], *scale)
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path} is damaged: {problem}") from None


def codes_of_text(values: Sequence[Any]) -> np.ndarray:
    """Return uint64, hashes of 64 bits, equal for equal values."""
    with needed_by("categories of clicks"):
        import pandas as pd
    array = np.empty(len(values), object)
    array[:] = values
    return pd.util.hash_array(array, categorize=True)


def transformed(
    values: np.ndarray, transform: str, mean: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """Return numbers as a model takes them, float32; those that are not finite are missing.

    Args:
        values: ``(n, C)``.
        transform: ``log`` or ``standard``, see ``ClickData``.
        mean: ``(C,)``, of ``standard``.
        spread: ``(C,)``, the same.
    """
    missing = ~np.isfinite(values)
    if transform == "log":
        values = np.log1p(np.where(missing, 0, values).clip(min=0), dtype=np.float64)
    elif values.shape[1]:
        values = ((values - mean) / np.where(spread > 0, spread, 1)).clip(-5, 5)
    return np.where(missing, 0, values).astype(np.float32)


def _number(name: str, value: Any) -> float:
    if value is None or value == "":
        return np.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if isinstance(value, bool) or not abs(number) <= np.finfo(np.float32).max:
        raise ValueError(f"{name} is {value!r}, expected a number that is finite")
    return number


CHUNK = 200_000
"""Lines that are read at a time."""

CRITEO_CONTINUOUS = tuple(f"I{k}" for k in range(1, 14))
CRITEO_FIELDS = tuple(f"C{k}" for k in range(1, 27))
CRITEO_COLUMNS = ["label", *CRITEO_CONTINUOUS, *CRITEO_FIELDS]
_EXPECTED = (
    "expected a table with named columns (.npz, .csv, .tsv, .parquet; .csv and .tsv also .gz), "
    "Criteo's train.txt (format: criteo) or the ratings of MovieLens (format: movielens)"
)
_MOVIELENS = ["user", "item", "rating", "time"]


@dataclass
class Chunk:
    """Consecutive rows of a click log.

    Attributes:
        labels: ``(n,)``, of which what is above ``positive`` is a click.
        continuous: ``(n, C)`` float64; NaN where nothing is given.
        fields: ``(n, F)`` uint64: the category itself or its hash, so that equal ones are equal.
        integers: ``(F,)``, whether a column holds whole numbers, which are their own codes.
        skipped: Malformed lines among them that were left out.
    """

    labels: np.ndarray
    continuous: np.ndarray
    fields: np.ndarray
    integers: np.ndarray
    skipped: int = 0


@dataclass(frozen=True)
class Columns:
    """The columns of a click log by what they hold.

    Attributes:
        label: The column with the label.
        continuous: Numbers.
        fields: Categories.
    """

    label: str
    continuous: tuple[str, ...]
    fields: tuple[str, ...]


def find_file(source: str) -> Path:
    """Return the path of a data file; a ``FileNotFoundError`` says what is expected."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no data file at {path}; {_EXPECTED}")
    return path


def fields_named(format: str, fields: Sequence[str]) -> Sequence[str]:
    """Return the columns of categories as far as the settings tell; none where the file has to."""
    if format == "criteo":
        return CRITEO_FIELDS
    return fields or (["user", "item"] if format == "movielens" else [])


def columns_of(
    path: Path, format: str, label: str | None, continuous: Sequence[str], fields: Sequence[str]
) -> Columns:
    """Take the columns from the settings, and what those leave open from the file.

    Raises:
        ValueError: If a named column is not there or is named twice, if no label is named, or if
            it is a feature as well.
    """
    if format == "criteo":
        return Columns("label", CRITEO_CONTINUOUS, CRITEO_FIELDS)
    names = _MOVIELENS if format == "movielens" else _column_names(path)
    fields = fields_named(format, fields)
    if format == "movielens":
        label = label or "rating"
    if label is None:
        raise ValueError(f"clicks.label names no column of {path}; it has {_listed(names)}")
    if not fields:
        fields = [name for name in names if name != label and name not in continuous]
    for name in (label, *continuous, *fields):
        if name not in names:
            raise ValueError(f"{path} has no column {name!r}; it has {_listed(names)}")
    if not fields:
        raise ValueError(
            f"{path} has no column of categories beside {label} and clicks.continuous="
            f"{list(continuous)}: a model of clicks needs at least one"
        )
    for kind, chosen in (("continuous", continuous), ("fields", fields)):
        if label in chosen:
            raise ValueError(
                f"clicks.{kind} names {label!r}, which is clicks.label: a model that reads what "
                "it has to predict learns nothing else"
            )
        twice = [name for name in chosen if list(chosen).count(name) > 1]
        if twice:
            raise ValueError(f"clicks.{kind} names {twice[0]!r} more than once")
    return Columns(label, tuple(continuous), tuple(fields))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name for name in names if name) or "none"


def read_chunks(
    path: Path, format: str, columns: Columns, skip_bad: bool, first: int = 0
) -> Iterator[Chunk]:
    """Yield the rows of a file in chunks.

    Args:
        path: The file.
        format: ``"table"``, ``"criteo"`` or ``"movielens"``.
        columns: Which columns are what.
        skip_bad: Leave malformed lines out and count them, instead of raising.
        first: Number of the first chunk that is wanted.

    Raises:
        ValueError: If a line or cell is malformed: says its number and what was expected. Malformed
            is a number that is not finite too; only an empty cell, or in a typed column NaN, is
            missing, and not where the label should be.
    """
    if format == "table" and path.suffix in (".npz", ".parquet"):
        yield from itertools.islice(_whole(path, columns, skip_bad), first, None)
        return
    names, separator, header = _layout(path, format)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{path} has more than one column {twice[0]!r}: give each its own name")
    with _open(path) as file:
        start = 1
        if header:
            file.readline()
            start = 2
        start += sum(1 for _ in itertools.islice(file, first * CHUNK))
        while lines := list(itertools.islice(file, CHUNK)):
            yield _parse(path, lines, start, names, separator, columns, skip_bad)
            start += len(lines)


def _parse(
    path: Path,
    lines: list[bytes],
    start: int,
    names: Sequence[str],
    separator: str,
    columns: Columns,
    skip_bad: bool,
) -> Chunk:
    """Read the rows of lines, the first of them number ``start`` of the file."""
    pd = _pandas()
    mark, cells = separator.encode(), len(names)
    numbers = np.arange(start, start + len(lines))
    counts = np.array([_count(line, mark) for line in lines])
    good = counts == cells
    if not good.all() and not skip_bad:
        first = int(np.flatnonzero(~good)[0])
        found = f"{counts[first]} values" if counts[first] else "quotes that do not close"
        raise ValueError(
            f"line {numbers[first]} of {path} has {found}, expected {cells} values: "
            f"{lines[first][:80]!r}; clicks.skip_bad_lines=true leaves such lines out"
        )
    kept = [line for line, fine in zip(lines, good, strict=True) if fine]
    numbers = numbers[good]
    text = b"".join(kept).replace(b"\r\n", b"\n")
    text = text.replace(b"::", b"\t") if separator == "::" else text
    try:
        frame = pd.read_csv(
            io.BytesIO(text), sep="\t" if separator == "::" else separator, header=None,
            names=list(names), dtype=str, keep_default_na=False, skip_blank_lines=False,
            quoting=csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE, lineterminator="\n",
        )  # fmt: skip
    except UnicodeDecodeError:
        for number, line in zip(numbers, kept, strict=True):
            with naming_what_is_no_text(f"line {number} of {path}"):
                line.decode("utf-8")
        raise
    broken = np.zeros(len(frame), bool)
    numeric = {}
    for name in (columns.label, *columns.continuous):
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(np.float64)
        wrong = ~_holds(values) & ((frame[name] != "").to_numpy() | (name == columns.label))
        if wrong.any() and not skip_bad:
            row = int(np.flatnonzero(wrong)[0])
            raise _no_number(f"line {numbers[row]}", path, name, repr(frame[name].iloc[row]))
        broken |= wrong
        numeric[name] = values
    keep = ~broken
    fields = [_codes(frame[name])[keep] for name in columns.fields]
    return Chunk(
        numeric[columns.label][keep],
        _side_by_side([numeric[name][keep] for name in columns.continuous], keep.sum()),
        np.stack(fields, 1),
        np.zeros(len(fields), bool),
        skipped=len(lines) - int(keep.sum()),
    )


def _count(line: bytes, mark: bytes) -> int:
    """Count the values of a line; 0 where quotes around one of a .csv do not close in it."""
    if mark != b"," or b'"' not in line:
        return line.count(mark) + 1
    try:
        return len(_cells(line.decode("latin-1")))  # bytes one by one: no text is made of them
    except csv.Error:
        return 0


def _cells(line: str) -> list[str]:
    """Part a line of a .csv, in which values in quotes may have commas."""
    return next(csv.reader([line], strict=True), [""])


def _holds(values: np.ndarray) -> np.ndarray:
    """Tell which numbers float32 can hold, in which they are kept; NaN and infinity are not."""
    return np.abs(values) <= np.finfo(np.float32).max


def _no_number(where: str, path: Path, name: str, value: str) -> ValueError:
    return ValueError(
        f"{where} of {path}: {name} is {value}, expected a number that is finite; "
        "clicks.skip_bad_lines=true leaves such lines out"
    )


def _whole(path: Path, columns: Columns, skip_bad: bool) -> Iterator[Chunk]:
    """Yield a file of typed columns in chunks; NaN is where nothing is given."""
    pd = _pandas()
    wanted = [columns.label, *columns.continuous, *columns.fields]
    table: dict[str, np.ndarray] = {}
    if path.suffix == ".npz":
        with _open_npz(path) as file:
            table = {name: file[name] for name in wanted}
    else:
        with _naming_a_damaged(path):
            frame = pd.read_parquet(path, columns=wanted)
        table = {name: frame[name].to_numpy() for name in wanted}
    for name in wanted:
        if table[name].ndim != 1:
            raise ValueError(
                f"{path}: {name} has the shape {table[name].shape}, expected one value a row"
            )
    rows = len(table[columns.label])
    for name in wanted:
        if len(table[name]) != rows:
            raise ValueError(f"{path}: {name} has {len(table[name])} values, the label {rows}")
    numeric, broken = {}, np.zeros(rows, bool)
    for name in (columns.label, *columns.continuous):
        numeric[name] = values = _floats(table[name], path, name)
        wrong = ~_holds(values) & (~np.isnan(values) | (name == columns.label))
        if wrong.any() and not skip_bad:
            row = int(np.flatnonzero(wrong)[0])
            raise _no_number(f"row {row + 1}", path, name, str(values[row]))
        broken |= wrong
    series = [pd.Series(table[name]) for name in columns.fields]
    fields = np.stack([_codes(column) for column in series], 1)
    integers = np.array([pd.api.types.is_integer_dtype(column.dtype) for column in series])
    continuous = _side_by_side([numeric[name] for name in columns.continuous], rows)
    for start in range(0, rows, CHUNK):
        skipped = broken[start : start + CHUNK]
        part = start + np.flatnonzero(~skipped)
        labels = numeric[columns.label][part]
        skipped_lines = int(skipped.sum())
        yield Chunk(labels, continuous[part], fields[part], integers, skipped=skipped_lines)


def _floats(column: np.ndarray, path: Path, name: str) -> np.ndarray:
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{path}: {name} must hold numbers: {problem}") from None


def _pandas() -> Any:
    """Import pandas, which takes as long as all else that a command needs, only for its work."""
    with needed_by("a file of clicks"):
        import pandas
    return pandas


def _codes(values: "pd.Series") -> np.ndarray:
    """Return uint64: whole numbers as they are, all else by a hash of 64 bits of its text.

    What is not there, NaN in a column of numbers, is an empty text, as the empty cell of a .csv is.
    """
    if _pandas().api.types.is_integer_dtype(values.dtype):
        return values.to_numpy().astype(np.int64).view(np.uint64)
    return codes_of_text(values.astype(object).where(values.notna(), "").to_numpy(dtype=object))


def _side_by_side(columns: Sequence[np.ndarray], rows: int) -> np.ndarray:
    return np.stack(columns, 1) if columns else np.empty((rows, 0))


def _layout(path: Path, format: str) -> tuple[Sequence[str], str, bool]:
    """Return names of the columns, what separates them, and whether a first line names them."""
    if format == "table":
        return _column_names(path), _separator(path), True
    first = _first_line(path)
    if format == "criteo":
        return CRITEO_COLUMNS, "\t", first.startswith("label\t")
    if first.startswith("userId,"):
        return _MOVIELENS, ",", True
    return _MOVIELENS, "::" if "::" in first else "\t", False


def _column_names(path: Path) -> list[str]:
    if path.suffix == ".npz":
        with _open_npz(path) as file:
            return list(file.files)
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from None
        with _naming_a_damaged(path):
            return list(pyarrow.parquet.read_schema(path).names)
    separator, first = _separator(path), _first_line(path)
    try:
        return _cells(first) if separator == "," else first.split(separator)
    except csv.Error as problem:
        raise ValueError(f"line 1 of {path}, which names the columns: {problem}") from None


def _separator(path: Path) -> str:
    if ".csv" in path.suffixes:
        return ","
    if ".tsv" in path.suffixes:
        return "\t"
    raise ValueError(f"{path}: {_EXPECTED}")


def _first_line(path: Path) -> str:
    with _open(path) as file, naming_what_is_no_text(f"line 1 of {path}"):
        return file.readline().decode("utf-8-sig").rstrip("\r\n")  # Excel begins with a mark


@contextlib.contextmanager
def _open_npz(path: Path) -> Iterator[NpzFile]:
    with _naming_a_damaged(path):
        # Of what is no archive np.load would say that it may be read with allow_pickle=True.
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive as numpy.savez writes it, or was cut short")
        with np.load(path) as file:
            yield file


@contextlib.contextmanager
def _naming_a_damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as problem:
        said = str(problem)
        if "allow_pickle" in said:
            said = "it holds arrays of Python objects: save texts as arrays of str"
        raise ValueError(f"{path} cannot be read: {said}") from None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
