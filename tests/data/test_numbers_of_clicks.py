"""Numbers of a click log that are none: named with their line, or left out and counted."""

import numpy as np
import pytest

from comera.data.clicks import ClickData, Clicks


def log(path, column: str, value: str) -> ClickData:
    """Forty rows; the seventh, line 8 of the file, has ``value`` in ``column``."""
    rows = [{"rating": str(k % 2), "user": str(k % 5), "age": str(k)} for k in range(40)]
    rows[6][column] = value
    lines = ["rating,user,age", *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return ClickData(str(path), label="rating", continuous=["age"], split="last")


@pytest.mark.parametrize("column", ["rating", "age"])
@pytest.mark.parametrize(
    "value", ["inf", "-inf", "Infinity", "nan", "NaN", "1e999", "-3e38000", "1e39", "x"]
)
def test_what_is_no_finite_number_is_named_with_its_line_or_left_out(tmp_path, column, value):
    data = log(tmp_path / "a.csv", column, value)
    with pytest.raises(ValueError, match=rf"line 8 of .*a\.csv: {column} is '{value}', expected a"):
        Clicks.prepare(data)
    data.skip_bad_lines = True
    clicks = Clicks.prepare(data)
    assert clicks.skipped == 1
    assert clicks.num_train == 35


def test_an_empty_cell_is_missing_and_an_empty_label_malformed(tmp_path):
    clicks = Clicks.prepare(log(tmp_path / "a.csv", "age", ""))
    assert (clicks.skipped, clicks.num_train) == (0, 36)
    with pytest.raises(
        ValueError, match=r"line 8 of .*: rating is '', expected a number that is finite"
    ):
        Clicks.prepare(log(tmp_path / "b.csv", "rating", ""))


@pytest.mark.parametrize(
    ("column", "value"),
    [("age", np.inf), ("age", -np.inf), ("age", 1e39), ("rating", np.nan), ("rating", np.inf)],
)
def test_a_typed_column_is_held_to_the_same(tmp_path, column, value):
    table = {"rating": np.arange(40.0) % 2, "user": np.arange(40) % 5, "age": np.arange(40.0)}
    table[column][6] = value
    np.savez(tmp_path / "a.npz", **table)
    data = ClickData(str(tmp_path / "a.npz"), label="rating", continuous=["age"], split="last")
    with pytest.raises(
        ValueError, match=rf"row 7 of .*a\.npz: {column} is .*, expected a number that is finite"
    ):
        Clicks.prepare(data)
    data.skip_bad_lines = True
    clicks = Clicks.prepare(data)
    assert (clicks.skipped, clicks.num_train) == (1, 35)


def test_nan_in_a_typed_column_of_numbers_is_missing(tmp_path):
    ages = np.where(np.arange(40) < 20, np.nan, 3.0)
    np.savez(tmp_path / "a.npz", rating=np.arange(40) % 2, user=np.arange(40) % 5, age=ages)
    data = ClickData(str(tmp_path / "a.npz"), label="rating", continuous=["age"], split="last")
    clicks = Clicks.prepare(data)
    (held,) = clicks.valid_batches(40)
    assert held["continuous"][:, 0].tolist() == [np.float32(np.log1p(3.0))] * 4
    assert clicks.skipped == 0


def test_a_column_of_words_is_named(tmp_path):
    np.savez(
        tmp_path / "a.npz", rating=np.arange(4) % 2, user=np.arange(4), age=np.array(list("abcd"))
    )
    data = ClickData(str(tmp_path / "a.npz"), label="rating", continuous=["age"])
    with pytest.raises(ValueError, match=r"a\.npz: age must hold numbers"):
        Clicks.prepare(data)
