"""Read files of click logs, and encode their rows as inputs of the model."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from comera.extras import error_prefix, needed_by
from comera.files import naming_what_is_no_text, replacing

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = "categories.safetensors"
"""Name of the file of :class:`ClickRows` in the folder of a run."""

RARE = 0  # row of a table for all categories that are not in the vocabulary
_EMPTY = -(2**63)  # whole number that stands for an empty cell
_KEY = "comera.categories"


@dataclass
class Field:
    """Vocabulary of one column, which maps values to rows of the column's table."""

    name: str
    integers: bool  # values are whole numbers, which are their own codes; else text, hashed
    hash_rows: int | None  # number of rows that categories share by their hashes
    codes: np.ndarray  # (n,) uint64, sorted, of the categories that have a row of their own
    rows: np.ndarray  # (n,) int32, that row

    def rows_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the row of each code, or :data:`RARE` if a code has none; int32."""
        if self.hash_rows is not None:
            return (1 + codes % np.uint64(self.hash_rows - 1)).astype(np.int32)
        if not len(self.codes):
            return np.full(len(codes), RARE, np.int32)
        place = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[place] == codes, self.rows[place], RARE).astype(np.int32)

    def code_of(self, value: Any) -> np.uint64:
        """Return the code of a value (None, NaN: an empty cell); ``ValueError`` for a wrong one."""
        if isinstance(value, list | dict | np.ndarray):
            raise ValueError(f"{self.name} is {value!r}, expected a text or a number")
        value = "" if _pandas().isna(value) else value
        if not self.integers:
            texts = [value if isinstance(value, bytes) else str(value)]
            if isinstance(value, float) and value.is_integer():  # as pandas has 42 beside NaN
                texts.append(str(int(value)))
            codes = codes_of_text(texts)
            return codes[(self.rows_of(codes) != RARE).argmax()]
        try:  # int() raises for true and false, too
            number = _EMPTY if value == "" else int(str(value).removesuffix(".0"))
            return np.uint64(number) if number >= 0 else np.int64(number).astype(np.uint64)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.name} is {value!r}, expected a whole number") from None


@dataclass
class ClickRows:
    """Encoder of raw rows as inputs of a click predictor, learned from the training rows."""

    fields: list[Field]  # in the order of the model's tables
    continuous: list[str]  # columns of numbers
    transform: str  # see ClickData
    mean: np.ndarray  # (C,), for "standard"
    spread: np.ndarray  # (C,), standard deviations

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor, list[list[str]]]:
        """Return inputs ``(n, C)`` float32 and ``(n, F)`` int64, and each row's unknown columns.

        Rows are values by column. A number may be missing, None or NaN; a category may be None or
        NaN, which is an empty cell. A column counts as unknown if no or few training rows have its
        category; such categories share a row. Raises ``TypeError`` if a row is no mapping and
        ``ValueError`` if a column is missing, not one of the model's, or has a wrong value.
        """
        numbers = np.full((len(rows), len(self.continuous)), np.nan, np.float32)  # as in training
        codes = np.zeros((len(rows), len(self.fields)), np.uint64)
        names = [column.name for column in self.fields]
        known = {*names, *self.continuous}
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(
                    f"{row!r} must be a row, values by column: give a list of them, such as "
                    "frame.to_dict('records') of a data frame"
                )
            wrong = [f"{name!r} is missing" for name in names if name not in row]
            wrong += [f"{name!r} is no column of the model" for name in row if name not in known]
            if wrong:
                more = f", and may have {', '.join(self.continuous)}" if self.continuous else ""
                raise ValueError(f"{wrong[0]}: a row has {', '.join(names)}{more}")
            for k, name in enumerate(self.continuous):
                numbers[number, k] = _number(name, row.get(name))
            for k, column in enumerate(self.fields):
                codes[number, k] = column.code_of(row[column.name])
        found = [column.rows_of(codes[:, k]) for k, column in enumerate(self.fields)]
        places = np.stack(found, 1).astype(np.int64)
        unknown = [np.array(names)[line == RARE].tolist() for line in places]
        continuous = transformed(numbers, self.transform, self.mean, self.spread)
        return torch.from_numpy(continuous), torch.from_numpy(places), unknown

    def save(self, path: Path) -> None:
        """Write the encoder to a file."""
        arrays = {"mean": self.mean, "spread": self.spread}
        for k, column in enumerate(self.fields):
            arrays |= {f"codes.{k}": column.codes, f"rows.{k}": column.rows}
        fields = [[column.name, column.integers, column.hash_rows] for column in self.fields]
        described = {"continuous": self.continuous, "transform": self.transform, "fields": fields}
        with replacing(path) as temporary:
            save_file(arrays, temporary, {_KEY: json.dumps(described)})

    @classmethod
    def load(cls, path: Path) -> "ClickRows":
        """Read the file of :meth:`save`; raises ``ValueError`` if it is damaged."""
        kinds = (SafetensorError, KeyError, TypeError, ValueError)
        with error_prefix(f"{path} is damaged: ", kinds), safe_open(path, "numpy") as file:
            described = json.loads((file.metadata() or {})[_KEY])
            fields = [
                Field(name, whole, hashed, *map(file.get_tensor, (f"codes.{k}", f"rows.{k}")))
                for k, (name, whole, hashed) in enumerate(described["fields"])
            ]
            scale = file.get_tensor("mean"), file.get_tensor("spread")
            return cls(fields, described["continuous"], described["transform"], *scale)


def transformed(
    values: np.ndarray, transform: str, mean: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """Transform numbers ``(n, C)`` to float32 inputs; numbers that are not finite count as missing.

    ``transform`` is that of ``ClickData``; ``standard`` uses ``mean`` and ``spread``, ``(C,)``.
    """
    missing = ~np.isfinite(values)
    if transform == "log":
        values = np.log1p(np.where(missing, 0, values).clip(min=0), dtype=np.float64)
    elif values.shape[1]:
        values = ((values - mean) / np.where(spread > 0, spread, 1)).clip(-5, 5)
    return np.where(missing, 0, values).astype(np.float32)


def _number(name: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if _pandas().isna(value) or value == "":
            return np.nan
        if abs(float(value)) <= float(np.finfo(np.float32).max):
            return float(value)
    raise ValueError(f"{name} is {value!r}, expected a number that is finite")


CHUNK = 200_000  # lines or rows of a chunk
CRITEO_CONTINUOUS = tuple(f"I{k}" for k in range(1, 14))
CRITEO_FIELDS = tuple(f"C{k}" for k in range(1, 27))
CRITEO_COLUMNS = ["label", *CRITEO_CONTINUOUS, *CRITEO_FIELDS]
_MOVIELENS = ["user", "item", "rating", "time"]
EXPECTED = (
    "expected a table with named columns (.npz, .csv, .tsv, .parquet; .csv and .tsv also .gz), "
    "Criteo's train.txt (format: criteo) or the ratings of MovieLens (format: movielens)"
)
_TO_SKIP = "clicks.skip_bad_lines=true leaves such lines out"


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a click log that hold the label, numbers, and categories."""

    label: str
    continuous: tuple[str, ...]
    fields: tuple[str, ...]


def fields_named(format: str, fields: Sequence[str]) -> Sequence[str]:
    """Return the columns of categories if the settings determine them, else none."""
    if format == "criteo":
        return CRITEO_FIELDS
    return fields or (["user", "item"] if format == "movielens" else [])


def columns_of(
    path: Path, format: str, label: str | None, continuous: Sequence[str], fields: Sequence[str]
) -> Columns:
    """Return the columns that the settings name, with defaults from the file.

    Raises ``ValueError`` without label, or if a column is missing, named twice or label and
    feature.
    """
    if format == "criteo":
        return Columns("label", CRITEO_CONTINUOUS, CRITEO_FIELDS)
    names = _layout(path, format).names
    listed = ", ".join(name for name in names if name) or "none"
    label = label or ("rating" if format == "movielens" else None)
    if label is None:
        raise ValueError(f"clicks.label names no column of {path}; it has {listed}")
    fields = fields_named(format, fields) or [
        name for name in names if name != label and name not in continuous
    ]
    for name in (label, *continuous, *fields):
        if name not in names:
            raise ValueError(f"{path} has no column {name!r}; it has {listed}")
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
        if twice := _repeated(chosen):
            raise ValueError(f"clicks.{kind} names {twice!r} more than once")
    return Columns(label, tuple(continuous), tuple(fields))


def read_chunks(
    path: Path, format: str, columns: Columns, skip_bad: bool, first: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of a file in chunks of ``CHUNK`` lines, from chunk ``first`` on, as arrays.

    The arrays are ``labels`` ``(n,)`` and ``continuous`` ``(n, C)``, float32 with NaN for missing
    values; ``field0``, ``field1``, ... ``(n,)`` uint64, codes of categories; ``integers`` ``(F,)``,
    whether a field holds whole numbers, which are their own codes; ``skipped`` ``()``, the number
    of malformed lines, which ``skip_bad`` leaves out. Raises ``ValueError`` with the number of a
    malformed line or cell. A number that is not finite is malformed, except a feature's empty cell
    or NaN in a typed column.
    """
    layout = _layout(path, format)
    if twice := _repeated(layout.names):
        raise ValueError(f"{path} has more than one column {twice!r}: give each its own name")
    if not layout.separator:
        frame = _typed_frame(path, columns)
        for start in range(first * CHUNK, len(frame), CHUNK):
            yield _chunk(path, "row", frame.iloc[start : start + CHUNK], columns, skip_bad)
        return
    before = layout.header + first * CHUNK
    with _open(path) as file:
        rest = itertools.islice(file, before, None)
        while lines := list(itertools.islice(rest, CHUNK)):
            frame = _text_frame(path, lines, before + 1, layout, skip_bad)
            yield _chunk(path, "line", frame, columns, skip_bad, len(lines) - len(frame))
            before += len(lines)


def _chunk(
    path: Path, unit: str, frame: "pd.DataFrame", columns: Columns, skip_bad: bool, skipped: int = 0
) -> dict[str, np.ndarray]:
    """Check numbers and encode fields of a frame; its index holds line numbers, for errors."""
    pd = _pandas()
    numbers, good = {}, np.ones(len(frame), bool)
    for name in (columns.label, *columns.continuous):
        cells = frame[name]
        numbers[name] = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
        finite = np.abs(numbers[name]) <= np.finfo(np.float32).max  # False for NaN
        missing = (cells.isna() | (cells == "")).to_numpy() & (name != columns.label)
        if not (finite | missing).all() and not skip_bad:
            row = int(np.argmin(finite | missing))
            cell = cells.iloc[row]
            raise ValueError(
                f"{unit} {frame.index[row]} of {path}: {name} is "
                f"{repr(cell) if isinstance(cell, str) else cell}, expected a number that is "
                f"finite; {_TO_SKIP}"
            )
        good &= finite | missing
    fields = [frame[name][good] for name in columns.fields]
    continuous = [numbers[name][good] for name in columns.continuous]
    shape = len(continuous), int(good.sum())
    return {
        "labels": numbers[columns.label][good],
        "continuous": np.array(continuous, np.float32).reshape(shape).T,
        "integers": np.array([pd.api.types.is_integer_dtype(each.dtype) for each in fields]),
        "skipped": np.array(skipped + int((~good).sum())),
        **{f"field{k}": _codes(each) for k, each in enumerate(fields)},
    }


def _text_frame(
    path: Path, lines: list[bytes], start: int, layout: "_Layout", skip_bad: bool
) -> "pd.DataFrame":
    """Return the cells of well-formed lines as text; the frame's index holds line numbers."""
    separator, expected = layout.separator, len(layout.names)
    numbers, kept = [], []
    for number, line in enumerate(lines, start):
        if (count := _count(line, separator.encode())) == expected:
            numbers.append(number)
            kept.append(line)
        elif line.strip() and not skip_bad:
            found = f"{count} values" if count else "quotes that do not close"
            raise ValueError(
                f"line {number} of {path} has {found}, expected {expected} values: "
                f"{line[:80]!r}; {_TO_SKIP}"
            )
    text = b"".join(kept).replace(b"\r\n", b"\n")
    if separator == "::":  # pandas' parser in C takes separators of one character
        text, separator = text.replace(b"::", b"\t"), "\t"
    try:
        frame = _pandas().read_csv(
            io.BytesIO(text), sep=separator, header=None, names=layout.names, dtype=str,
            keep_default_na=False, skip_blank_lines=False, lineterminator="\n",
            quoting=csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE,
        )  # fmt: skip
    except UnicodeDecodeError:
        for number, line in zip(numbers, kept, strict=True):
            with naming_what_is_no_text(f"line {number} of {path}"):
                line.decode("utf-8")
        raise
    frame.index = numbers
    return frame


def _count(line: bytes, separator: bytes) -> int:
    """Count the values of a line; 0 if quotes in a .csv do not close."""
    if separator != b"," or b'"' not in line:
        return line.count(separator) + 1
    try:
        return len(_cells(line.decode("latin-1")))  # bytes one by one: no text is made of them
    except csv.Error:
        return 0


def _cells(line: str) -> list[str]:
    return next(csv.reader([line], strict=True), [""])


def _typed_frame(path: Path, columns: Columns) -> "pd.DataFrame":
    """Return the columns of an .npz or .parquet; the frame's index holds row numbers from 1."""
    pd = _pandas()
    wanted = [columns.label, *columns.continuous, *columns.fields]
    with _naming_a_damaged(path):
        if path.suffix == ".npz":
            with _open_npz(path) as file:
                table = {name: file[name] for name in wanted}
        else:
            # Else whole numbers with an empty cell become floats, which are equal beyond 2^53.
            table = dict(pd.read_parquet(path, columns=wanted, dtype_backend="numpy_nullable"))
    for name, column in table.items():
        if column.ndim != 1:
            raise ValueError(
                f"{path}: {name} has the shape {column.shape}, expected one value a row"
            )
        if np.iscomplexobj(column):
            raise ValueError(f"{path}: {name} has complex numbers, expected real ones")
        if len(column) != (rows := len(table[columns.label])):
            raise ValueError(f"{path}: {name} has {len(column)} values, the label {rows}")
        for cell in column if pd.api.types.infer_dtype(column).startswith("mixed") else ():
            if isinstance(cell, list | dict | np.ndarray):
                raise ValueError(f"{path}: {name} has {cell!r}, expected one value a row")
        if name not in columns.fields:
            with error_prefix(f"{path}: {name} must hold numbers: ", (TypeError, ValueError)):
                table[name] = column.astype(np.float64)
        elif pd.api.types.is_any_real_numeric_dtype(cells := pd.Series(column)):
            kind: Any = getattr(cells.dtype, "numpy_dtype", cells.dtype)
            numbers = cells.fillna(0).to_numpy(kind)
            if kind.kind in "iu" or ((np.trunc(numbers) == numbers) & (abs(numbers) < 2**53)).all():
                table[name] = np.where(cells.isna(), _EMPTY, numbers.astype(np.int64))
    frame = pd.DataFrame(table)
    frame.index += 1
    return frame


def _pandas() -> Any:
    with needed_by("a file of clicks"):
        import pandas
    return pandas


def codes_of_text(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    return _pandas().util.hash_array(np.asarray(values, object), categorize=False)  # dates as text


def _codes(values: "pd.Series") -> np.ndarray:
    if _pandas().api.types.is_integer_dtype(values.dtype):
        return values.to_numpy().astype(np.int64).view(np.uint64)
    return codes_of_text(values.astype(object).where(values.notna(), "").to_numpy(dtype=object))


@dataclass(frozen=True)
class _Layout:
    """Columns of a file, which its first line may name; .npz and .parquet have no separator."""

    names: list[str]
    separator: str = ""
    header: bool = False


def _layout(path: Path, format: str) -> _Layout:
    if format == "criteo":
        return _Layout(CRITEO_COLUMNS, "\t", _first_line(path).startswith("label\t"))
    if format == "movielens":
        first = _first_line(path)
        if first.startswith("userId,"):
            return _Layout(_MOVIELENS, ",", header=True)
        return _Layout(_MOVIELENS, "::" if "::" in first else "\t")
    if path.suffix == ".npz":
        with _naming_a_damaged(path), _open_npz(path) as file:
            return _Layout(list(file.files))
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from None
        with _naming_a_damaged(path):
            return _Layout(list(pyarrow.parquet.read_schema(path).names))
    if ".tsv" in path.suffixes:
        return _Layout(_first_line(path).split("\t"), "\t", header=True)
    if ".csv" not in path.suffixes:
        raise ValueError(f"{path}: {EXPECTED}")
    with error_prefix(f"line 1 of {path}, which names the columns: ", csv.Error):
        return _Layout(_cells(_first_line(path)), ",", header=True)


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _first_line(path: Path) -> str:
    with _open(path) as file, naming_what_is_no_text(f"line 1 of {path}"):
        return file.readline().decode("utf-8-sig").rstrip("\r\n")  # Excel begins with a mark


def _open_npz(path: Path) -> NpzFile:
    # np.load would suggest allow_pickle=True.
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no archive as numpy.savez writes it, or was cut short")
    return np.load(path)


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
