"""Raw rows of a click log become what training has read of the same rows."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from comera.data import click_files
from comera.data.click_files import ClickRows
from comera.data.clicks import ClickData, Clicks
from tests.data.test_clicks import criteo_lines, settings, table


def prepared(tmp_path, ending=".csv", frame=None, **more):
    frame = table() if frame is None else frame
    path = tmp_path / f"clicks{ending}"
    if ending == ".csv":
        frame.to_csv(path, index=False)
    else:
        columns = {name: frame[name].to_numpy() for name in frame}
        np.savez(path, **{**columns, "city": columns["city"].astype(str)})
    return Clicks.prepare(settings(path, **more)), frame


def raw(frame, text):
    rows = frame.drop(columns="rating").to_dict("records")
    return [{k: str(v) for k, v in row.items()} if text else row for row in rows]


@pytest.mark.parametrize("ending", [".csv", ".npz"])
@pytest.mark.parametrize(
    "more",
    [{}, {"min_count": 5}, {"hash_rows": 12}, {"transform": "standard"}, {"split": "last"}],
    ids=str,
)
def test_it_reads_what_training_has_read(ending, more, tmp_path):
    data, frame = prepared(tmp_path, ending, **more)
    every = data._rows(np.arange(len(frame)))
    assert data.categories.fields[0].integers == (ending == ".npz")
    for text in (True, False):
        continuous, fields, unknown = data.categories.encode(raw(frame, text))
        assert torch.equal(continuous, every["continuous"])
        assert torch.equal(fields, every["fields"])
        for names, row in zip(unknown, fields, strict=True):
            hashed = [field.hash_rows is not None for field in data.categories.fields]
            wanted = [
                name
                for name, place, shared in zip(("user", "city"), row, hashed, strict=True)
                if place == 0 and not shared
            ]
            assert names == wanted


def test_criteo_is_read_too(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join(criteo_lines()) + "\n")
    data = Clicks.prepare(ClickData(str(path), "criteo", heldout=0.2))
    names = [f"I{k}" for k in range(1, 14)] + [f"C{k}" for k in range(1, 27)]
    rows = [dict(zip(names, line.split("\t")[1:], strict=True)) for line in criteo_lines()]
    continuous, fields, _ = data.categories.encode(rows)
    every = data._rows(np.arange(len(rows)))
    assert torch.equal(continuous, every["continuous"])
    assert torch.equal(fields, every["fields"])


def test_it_comes_back_from_its_file(tmp_path):
    data, frame = prepared(tmp_path, transform="standard")
    data.categories.save(tmp_path / "kept")
    again = ClickRows.load(tmp_path / "kept")
    for mine, theirs in zip(
        again.encode(raw(frame, True)), data.categories.encode(raw(frame, True)), strict=True
    ):
        assert mine == theirs if isinstance(mine, list) else torch.equal(mine, theirs)


def test_what_is_missing_is_an_empty_cell(tmp_path):
    frame = table().astype({"city": object})
    frame.loc[:40, "city"] = ""
    frame.loc[5:9, "age"] = np.nan
    data, _ = prepared(tmp_path, frame=frame)
    found = data.categories.encode(
        [{"user": 1, "city": None}, {"user": 1, "city": "", "age": None}, {"user": 1, "city": ""}]
    )
    assert torch.equal(found[0], torch.zeros(3, 1))
    assert len(set(found[1][:, 1].tolist())) == 1
    assert "city" not in found[2][0]
    for empty in (math.nan, pd.NA):  # as pandas has them
        again = data.categories.encode([{"user": 1, "city": empty, "age": empty}])
        assert torch.equal(again[0][0], found[0][0])
        assert torch.equal(again[1][0], found[1][0])


@pytest.mark.parametrize(
    "values",
    [
        np.array([2**63 + 5, 7], np.uint64),
        np.array([-4, 7]),
        np.array([True, False]),
        np.array([1.5, np.nan]),
        np.array([42.0, np.nan]),
        np.array([42.0, np.inf]),
        np.array([b"a", b"b"]),
        np.array(["2024-01-01", "2024-01-02"], "datetime64[s]"),
    ],
    ids=lambda values: str(values.dtype),
)
def test_typed_values_are_found_again(tmp_path, values):
    path = tmp_path / "clicks.npz"
    np.savez(path, rating=np.arange(40) % 5, user=np.resize(values, 40), age=np.ones(40))
    data = Clicks.prepare(settings(path))
    plain = [v.decode() if isinstance(v, bytes) else v for v in values.tolist()]
    for cells in (plain, values.tolist()):
        rows = [{"user": None if v != v else v} for v in cells]  # NaN is what JSON has null for
        _, fields, unknown = data.categories.encode(rows)
        assert unknown == [[], []]
        assert torch.equal(fields, data._rows(np.arange(2))["fields"])


def test_numbers_that_pandas_reads_beside_empty_cells_are_found_again(tmp_path):
    path = tmp_path / "clicks.csv"
    text = "".join(f"{k % 5},{k % 7 or ''},{'7.0' if k % 2 else '1.5'},1\n" for k in range(40))
    path.write_text("rating,user,city,age\n" + text)
    data = Clicks.prepare(settings(path))
    frame = pd.read_csv(path)
    assert frame["user"].dtype == np.float64
    rows = frame.drop(columns="rating").to_dict("records")
    _, fields, unknown = data.categories.encode(rows)
    assert not any(unknown)
    assert torch.equal(fields, data._rows(np.arange(40))["fields"])


def test_truth_values_are_numbers_as_in_training(tmp_path):
    ages = np.resize([True, False, False], 40)
    np.savez(tmp_path / "a.npz", rating=np.arange(40) % 5, user=np.ones(40), age=ages)
    data = Clicks.prepare(settings(tmp_path / "a.npz", transform="standard"))
    continuous, _, _ = data.categories.encode([{"user": 1, "age": age} for age in ages.tolist()])
    assert torch.equal(continuous, data._rows(np.arange(40))["continuous"])


def test_whole_numbers_are_the_same_beside_empty_cells(tmp_path):
    users = np.resize([42.0, np.nan, 7.0], 40)
    np.savez(tmp_path / "a.npz", rating=np.arange(40) % 5, user=users, age=np.ones(40))
    data = Clicks.prepare(settings(tmp_path / "a.npz"))
    rows = [{"user": value} for value in (42, None, 7, 42.0, "", 8)]
    _, fields, unknown = data.categories.encode(rows)
    assert torch.equal(fields[:5], data._rows(np.array([0, 1, 2, 0, 1]))["fields"])
    assert unknown == [*[[]] * 5, ["user"]]


def test_large_whole_numbers_of_a_parquet_are_told_apart_beside_empty_cells(tmp_path, monkeypatch):
    users = pd.array([2**60, 2**60 + 1, None, 2**63 + 5], "UInt64")
    frame = pd.DataFrame({"rating": [1.0, 2, 3, 4], "user": users})
    asked = {}
    monkeypatch.setattr(pd, "read_parquet", lambda *_, **more: asked.update(more) or frame)
    columns = click_files.Columns("rating", (), ("user",))
    found = click_files._typed_frame(tmp_path / "a.parquet", columns)["user"]
    assert asked["dtype_backend"] == "numpy_nullable"  # else pandas makes floats of them
    assert found.tolist() == [2**60, 2**60 + 1, -(2**63), 5 - 2**63]


def test_an_empty_cell_that_training_has_not_seen_is_unknown(tmp_path):
    data, _ = prepared(tmp_path, ".npz")
    _, fields, unknown = data.categories.encode([{"user": None, "city": "Ulm"}])
    assert (int(fields[0, 0]), unknown) == (0, [["user"]])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"user": 1}, "'city' is missing: a row has user, city, and may have age"),
        ({"user": 1, "city": "Ulm", "town": 3}, "'town' is no column of the model"),
        ({"user": [1], "city": "Ulm"}, r"user is \[1\], expected a text or a number"),
        ({"user": np.ones(2), "city": "Ulm"}, r"user is array.*, expected a text or a number"),
        ({"user": "x", "city": "Ulm"}, "user is 'x', expected a whole number"),
        ({"user": 2**70, "city": "Ulm"}, "expected a whole number"),
        ({"user": 1, "city": "Ulm", "age": "old"}, "age is 'old', expected a number"),
        ({"user": 1, "city": "Ulm", "age": 1e40}, r"age is 1e\+40, expected a number"),
        ({"user": 1, "city": "Ulm", "age": "inf"}, "age is 'inf', expected a number"),
    ],
)
def test_what_is_no_row_is_named(row, message, tmp_path):
    data, _ = prepared(tmp_path, ".npz")
    with pytest.raises(ValueError, match=message):
        data.categories.encode([row])


def test_rows_are_a_list(tmp_path):
    data, _ = prepared(tmp_path, ".npz")
    row = {"user": 1, "city": "Ulm"}
    for rows in (row, pd.DataFrame([row])):
        with pytest.raises(TypeError, match=r"'user' must be a row.*frame\.to_dict\('records'\)"):
            data.categories.encode(rows)
    assert len(data.categories.encode(pd.DataFrame([row, row]).to_dict("records"))[1]) == 2


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "kept").write_bytes(content)
    with pytest.raises(ValueError, match="kept is damaged"):
        ClickRows.load(tmp_path / "kept")
