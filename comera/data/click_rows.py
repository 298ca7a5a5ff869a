"""Rows of a click log as a trained model takes them: raw values in, numbers of rows out.

What the preparation of a log has learned from its training rows is kept with a run: the row of
each category that has one, by its code, and how numbers are scaled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from comera.extras import needed_by
from comera.files import replacing

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
