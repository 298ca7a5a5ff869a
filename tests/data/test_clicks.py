import csv
import gzip
import math

import numpy as np
import pandas as pd
import pytest
import torch

from comera.data import click_files
from comera.data.click_files import CRITEO_COLUMNS
from comera.data.clicks import ClickData, Clicks
from tests.data.test_real_files import DATA, real


def table(rows=400) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "rating": rng.integers(0, 6, rows),
            "user": rng.zipf(1.7, rows) % 50,
            "city": rng.choice(["Bonn", "Köln", "Ulm"], rows),
            "age": rng.integers(10, 90, rows).astype(float),
        }
    )


def settings(path, **more):
    return ClickData(str(path), label="rating", continuous=["age"], positive=3, **more)


def criteo_lines(count=60) -> list[str]:
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(count):
        numbers = [str(n) if n > 2 else "" for n in rng.integers(-1, 30, 13)]
        categories = [f"{n:08x}" if n else "" for n in rng.integers(0, 6, 26)]
        lines.append("\t".join([str(rng.integers(2)), *numbers, *categories]))
    return lines


def test_a_table_of_excel_begins_with_a_mark(tmp_path):
    frame = table()
    frame.to_csv(tmp_path / "plain.csv", index=False)
    frame.to_csv(tmp_path / "excel.csv", index=False, encoding="utf-8-sig")
    one, two = (Clicks.prepare(settings(tmp_path / name)) for name in ("plain.csv", "excel.csv"))
    assert one.prepared == two.prepared


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_a_table_keeps_its_rows(tmp_path, name):
    frame = table()
    frame.to_csv(tmp_path / name, sep="\t" if "tsv" in name else ",", index=False)
    clicks = Clicks.prepare(settings(tmp_path / name))
    assert clicks.field_names == ["user", "city"]
    assert clicks.table_sizes[1] == 1 + 3
    assert len(clicks.splits["train"]) == 360
    seen = [clicks.batch(step, 60, seed=0) for step in range(6)]
    seen += list(clicks.held_out("valid", 64))
    got = {
        tuple(row)
        for batch in seen
        for row in zip(batch["labels"].tolist(), batch["continuous"][:, 0].tolist(), strict=True)
    }
    log = np.log1p(frame["age"].to_numpy()).astype(np.float32).tolist()
    want = set(zip((frame["rating"] > 3).astype(float), log, strict=True))
    assert got == want
    assert sum(len(batch["labels"]) for batch in seen) == 400


def test_rows_are_numbered_by_falling_frequency(tmp_path):
    frame = table()
    np.savez(tmp_path / "a.npz", rating=frame["rating"], user=frame["user"])
    clicks = Clicks.prepare(ClickData(str(tmp_path / "a.npz"), label="rating"))
    rows = torch.cat([clicks.batch(step, 36, 0)["fields"][:, 0] for step in range(10)])
    counts = torch.bincount(rows, minlength=clicks.table_sizes[0])
    assert counts[0] == 0  # row 0 is for what training has not seen
    assert (counts[1:].diff() <= 0).all()
    rare = Clicks.prepare(ClickData(str(tmp_path / "a.npz"), label="rating", min_count=4))
    rows = torch.cat([rare.batch(step, 36, 0)["fields"][:, 0] for step in range(10)])
    assert int((rows == 0).sum()) == int(counts[1:][counts[1:] < 4].sum())
    assert torch.bincount(rows)[1:].min() >= 4


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    table().to_csv(tmp_path / "a.csv", index=False)
    one, two = (Clicks.prepare(settings(tmp_path / "a.csv")) for _ in range(2))
    for step in (3, 0, 7):
        for key, value in one.batch(step, 60, 1).items():
            assert torch.equal(value, two.batch(step, 60, 1)[key])
    assert not torch.equal(one.batch(0, 60, 1)["fields"], one.batch(0, 60, 2)["fields"])
    assert not torch.equal(one.batch(0, 60, 1)["fields"], one.batch(6, 60, 1)["fields"])


def test_the_last_rows_can_be_held_out(tmp_path):
    frame = table()
    frame["age"] = np.arange(len(frame))
    frame.to_csv(tmp_path / "a.csv", index=False)
    clicks = Clicks.prepare(settings(tmp_path / "a.csv", split="last", heldout=0.25))
    (held,) = clicks.held_out("valid", 1000)
    assert torch.equal(held["continuous"][:, 0], torch.arange(300.0, 400).log1p())


def test_continuous_numbers_can_be_standardised(tmp_path):
    frame = table()
    frame.loc[5, "age"] = np.nan
    frame.to_csv(tmp_path / "a.csv", index=False)
    clicks = Clicks.prepare(settings(tmp_path / "a.csv", transform="standard"))
    numbers = torch.cat([clicks.batch(step, 36, 0)["continuous"] for step in range(10)])
    assert abs(float(numbers.mean())) < 0.01
    assert abs(float(numbers.std()) - 1) < 0.01


def test_the_mean_of_many_rows_is_exact(tmp_path):
    years = np.resize([1900.0, 2054.0], 150_000)
    np.savez(tmp_path / "a.npz", y=np.arange(len(years)) % 2, user=years, one=years, two=years)
    numbers = {"continuous": ["one", "two"], "transform": "standard"}
    rows = Clicks.prepare(ClickData(str(tmp_path / "a.npz"), label="y", **numbers)).categories
    np.testing.assert_allclose([rows.mean, rows.spread], [[1977] * 2, [77] * 2], atol=0.1)


def test_a_column_may_begin_after_the_training_rows(tmp_path):
    frame = table()
    frame["age"] = np.where(np.arange(len(frame)) < 300, np.nan, 3.5)
    frame.to_csv(tmp_path / "a.csv", index=False)
    clicks = Clicks.prepare(
        settings(tmp_path / "a.csv", transform="standard", split="last", heldout=0.25)
    )
    (held,) = clicks.held_out("valid", 1000)
    assert torch.equal(held["continuous"], torch.full((100, 1), 3.5))
    assert not clicks.batch(0, 60, 1)["continuous"].any()


def test_criteo_is_read_as_distributed(tmp_path):
    lines = criteo_lines()
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    with gzip.open(tmp_path / "headed.txt.gz", "wt") as file:
        file.write("\n".join(["\t".join(CRITEO_COLUMNS), *lines]) + "\n")
    one, two = (
        Clicks.prepare(ClickData(str(tmp_path / name), "criteo", heldout=0.2))
        for name in ("train.txt", "headed.txt.gz")
    )
    assert one.num_continuous == 13
    assert len(one.table_sizes) == 26
    assert max(one.table_sizes) <= 7
    for key, value in one.batch(0, 48, 0).items():
        assert torch.equal(value, two.batch(0, 48, 0)[key])


def test_more_categories_than_rows_are_hashed(tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(criteo_lines()) + "\n")
    data = ClickData(str(tmp_path / "train.txt"), "criteo", hash_rows=4)
    clicks = Clicks.prepare(data)
    assert set(clicks.table_sizes) == {4}
    assert int(clicks.batch(0, 54, 0)["fields"].max()) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("u.data", "1\t7\t5\t88\n2\t7\t1\t89\n"),
        ("ratings.dat", "1::7::5::88\n2::7::1::89\n"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,7,5.0,88\n2,7,1.0,89\n"),
    ],
)
def test_movielens_in_its_three_forms(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    data = ClickData(str(tmp_path / name), "movielens", positive=3.5, heldout=0.5, split="last")
    clicks = Clicks.prepare(data)
    assert clicks.field_names == ["user", "item"]
    assert clicks.batch(0, 1, 0)["labels"].tolist() == [1.0]
    (held,) = clicks.held_out("valid", 4)
    assert held["labels"].tolist() == [0.0]
    assert held["fields"].tolist() == [[0, 1]]  # a user that training has not seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line + "\tmore", r"line 8 of .* has 41 values, expected 40"),
        (lambda line: line[: line.rindex("\t")], r"line 8 of .* has 39 values, expected 40"),
        (lambda line: "click" + line[1:], r"line 8 of .*: label is 'click', expected a number"),
        (lambda line: "" + line[1:], r"line 8 of .*: label is '', expected a number"),
        (lambda line: line.replace("\t", "\tx", 1), r"line 8 of .*: I1 is 'x.*expected a number"),
    ],
)
def test_a_malformed_line_is_named_or_left_out(tmp_path, caplog, change, message):
    lines = criteo_lines()
    lines[7] = change(lines[7])
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        Clicks.prepare(ClickData(str(path), "criteo"))
    clicks = Clicks.prepare(ClickData(str(path), "criteo", skip_bad_lines=True))
    assert clicks.skipped == 1
    assert len(clicks.splits["train"]) == round(0.9 * 59)
    assert "1 malformed lines were left out" in caplog.text


def test_empty_lines_are_left_out(tmp_path, caplog):
    path = tmp_path / "train.txt"
    path.write_text("\n\n".join(criteo_lines()) + "\n\r\n")
    clicks = Clicks.prepare(ClickData(str(path), "criteo"))
    assert len(clicks.splits["train"]) == round(0.9 * 60)
    assert clicks.skipped == 60
    assert "60 malformed lines were left out" in caplog.text


def test_an_interrupted_preparation_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(click_files, "CHUNK", 10)
    path = tmp_path / "train.txt"
    path.write_text("\n".join(criteo_lines()) + "\n")
    data, parse, parsed = ClickData(str(path), "criteo"), click_files._text_frame, []

    def interrupted(*args):
        if len(parsed) == 4:
            raise KeyboardInterrupt
        parsed.append(args[2])
        return parse(*args)

    monkeypatch.setattr(click_files, "_text_frame", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Clicks.prepare(data)
    monkeypatch.setattr(
        click_files, "_text_frame", lambda *args: parsed.append(args[2]) or parse(*args)
    )
    clicks = Clicks.prepare(data)
    assert parsed == [1, 11, 21, 31, 41, 51]
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "other"))
    fresh = Clicks.prepare(data)
    for key, value in clicks.batch(0, 54, 0).items():
        assert torch.equal(value, fresh.batch(0, 54, 0)[key])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"label": None}, "clicks.label names no column of .*; it has rating, user, city, age"),
        ({"label": "click"}, "has no column 'click'; it has rating, user"),
        ({"fields": ["user", "town"]}, "has no column 'town'"),
        ({"fields": ["user", "rating"]}, "clicks.fields names 'rating', which is clicks.label"),
        ({"continuous": ["rating"]}, "clicks.continuous names 'rating', which is clicks.label"),
        ({"fields": ["user", "user"]}, "clicks.fields names 'user' more than once"),
        ({"min_count": 0}, "clicks.min_count=0 must be at least 1"),
        ({"hash_rows": 1}, "clicks.hash_rows=1 must be at least 2"),
        ({"heldout": 0.0}, "clicks.heldout=0.0 and clicks.test=0.0 of 400 rows must be one"),
        ({"test": 0.001}, "clicks.test=0.001 of 400 rows must be one row at least"),
        ({"heldout": math.nan}, "clicks.heldout=nan must be a share of the rows"),
        ({"format": "criteo"}, "clicks.label is not for format=criteo"),
    ],
)
def test_wrong_settings_are_named(tmp_path, more, message):
    path = tmp_path / "a.csv"
    table().to_csv(path, index=False)
    with pytest.raises(ValueError, match=message):
        Clicks.prepare(ClickData(str(path), **{"label": "rating", **more}))


def test_a_log_has_a_column_of_categories(tmp_path):
    path = tmp_path / "a.csv"
    table()[["rating", "age"]].to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"no column of categories beside rating and .*\['age'\]"):
        Clicks.prepare(settings(path))


@pytest.mark.parametrize("odd", [np.zeros((40, 2), int), np.int64(3)], ids=["2-d", "0-d"])
@pytest.mark.parametrize("name", ["rating", "user", "age"])
def test_columns_of_an_archive_have_a_value_a_row(tmp_path, name, odd):
    columns = {key: np.arange(40) % 5 for key in ("rating", "user", "age")}
    np.savez(tmp_path / "a.npz", **columns | {name: odd})
    with pytest.raises(ValueError, match=rf"a\.npz: {name} has the shape \(.*\), expected one"):
        Clicks.prepare(settings(tmp_path / "a.npz"))


@pytest.mark.parametrize("name", ["age", "rating", "user"])
def test_complex_numbers_are_named(tmp_path, name):
    columns = {key: np.arange(40) % 5 for key in ("rating", "user", "age")}
    np.savez(tmp_path / "a.npz", **columns | {name: columns[name] + 1j})
    with pytest.raises(ValueError, match=rf"a\.npz: {name} has complex numbers, expected real"):
        Clicks.prepare(settings(tmp_path / "a.npz"))


def test_a_column_of_lists_is_named(tmp_path, monkeypatch):
    frame = pd.DataFrame({"rating": [1, 2], "user": [np.array([1, 2]), None]})
    monkeypatch.setattr(pd, "read_parquet", lambda *_, **__: frame)
    columns = click_files.Columns("rating", (), ("user",))
    with pytest.raises(ValueError, match=r"user has array\(\[1, 2\]\), expected one value a row"):
        click_files._typed_frame(tmp_path / "a.parquet", columns)


def test_labels_of_one_kind_are_noticed(tmp_path, caplog):
    path = tmp_path / "a.csv"
    table().assign(rating=5).to_csv(path, index=False)
    Clicks.prepare(ClickData(str(path), label="rating"))
    assert "every row is a click, since clicks.positive is" in caplog.text


NO_TEXT = r".*a\.csv must be text in UTF-8: the byte 0xe9"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"y\n1\n", "expected a table with named columns"),
        ("a.csv", b"", r"has no column 'y'; it has none"),
        ("a.csv", b"x,y\n", r"a\.csv holds no rows"),
        ("a.csv", b"x,y\n" + b"a,1\n" * 5 + b"caf\xe9,0\n", rf"line 7 of {NO_TEXT}"),
        ("a.csv", "é,z,y\na,b,1\n".encode("latin-1"), rf"line 1 of {NO_TEXT}"),
        (
            "a.csv",
            b"x,x,y\na,b,1\n",
            r"a\.csv has more than one column 'x': give each its own name",
        ),
        (
            "a.csv",
            b'"x,z,y\na,b,1\n',
            r"line 1 of .*a\.csv, which names the columns: unexpected end",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Clicks.prepare(ClickData(str(tmp_path / name), label="y", fields=["x"] * (b"," in content)))


def test_a_missing_file_says_what_is_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data file at .*; expected a table"):
        Clicks.prepare(ClickData(str(tmp_path / "none.csv"), label="x"))


def test_a_damaged_table_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(400) % 3, y=np.arange(400) % 2)
    whole = path.read_bytes()
    damaged = [whole[: len(whole) // 2], b"junk", b"", whole.replace(b"NUMPY", b"NUMPI")]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.npz cannot be read: ") as caught:
            Clicks.prepare(ClickData(str(path), label="y"))
        assert "pickle" not in str(caught.value)
    np.savez(path, x=np.array(["a", None] * 200, object), y=np.arange(400) % 2)
    with pytest.raises(ValueError, match=r"a\.npz cannot be read: it holds arrays of Python obj"):
        Clicks.prepare(ClickData(str(path), label="y"))


def test_values_of_a_csv_may_be_in_quotes(tmp_path):
    """Pandas and most other programs write values so that have commas or quotes in them."""
    frame = table().assign(city=np.resize(["Bonn, am Rhein", 'the "Ulm"', "Köln", ""], 400))
    for name, quoting in (("some", csv.QUOTE_MINIMAL), ("every", csv.QUOTE_ALL)):
        frame.to_csv(tmp_path / f"{name}.csv", index=False, quoting=quoting)
    some, every = (Clicks.prepare(settings(tmp_path / f"{n}.csv")) for n in ("some", "every"))
    assert len(some._arrays["labels"]) == 400
    assert some.prepared == every.prepared
    row = {"user": "1", "city": "Bonn, am Rhein", "age": 30}
    _, _, (unknown,) = some.categories.encode([row])
    assert unknown == []


def test_quotes_that_do_not_close_are_named_and_those_inside_are_kept(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + '12" pipe,1\nz,0\n' * 5 + '"open,1\n')
    with pytest.raises(ValueError, match=r"line 12 of .*a\.csv has quotes that do not close"):
        Clicks.prepare(ClickData(str(path), label="y"))
    data = Clicks.prepare(ClickData(str(path), label="y", skip_bad_lines=True))
    assert data.skipped == 1
    assert data.categories.encode([{"x": '12" pipe'}])[2] == [[]]


def test_a_carriage_return_inside_a_line_ends_no_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\r\n" + b"a,1\r\nb\r1,0\r\n" * 10)
    data = Clicks.prepare(ClickData(str(path), label="y"))
    assert len(data._arrays["labels"]) == 20
    assert data.categories.encode([{"x": "b\r1"}])[2] == [[]]


def test_a_real_sample_of_criteo_is_read():
    path = real(DATA / "criteo_8k" / "train.tsv.gz")
    data = ClickData(str(path), "criteo", min_count=3)
    clicks = Clicks.prepare(data)
    assert len(clicks.splits["train"]) == round(0.9 * 7344)
    assert 0.15 < float(clicks.batch(0, 6000, 0)["labels"].mean()) < 0.3


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
    assert len(clicks.splits["train"]) == 35


def test_an_empty_cell_is_missing_and_an_empty_label_malformed(tmp_path):
    clicks = Clicks.prepare(log(tmp_path / "a.csv", "age", ""))
    assert (clicks.skipped, len(clicks.splits["train"])) == (0, 36)
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
    assert (clicks.skipped, len(clicks.splits["train"])) == (1, 35)


def test_nan_in_a_typed_column_of_numbers_is_missing(tmp_path):
    ages = np.where(np.arange(40) < 20, np.nan, 3.0)
    np.savez(tmp_path / "a.npz", rating=np.arange(40) % 2, user=np.arange(40) % 5, age=ages)
    data = ClickData(str(tmp_path / "a.npz"), label="rating", continuous=["age"], split="last")
    clicks = Clicks.prepare(data)
    (held,) = clicks.held_out("valid", 40)
    assert held["continuous"][:, 0].tolist() == [np.float32(np.log1p(3.0))] * 4
    assert clicks.skipped == 0


def test_a_column_of_words_is_named(tmp_path):
    np.savez(
        tmp_path / "a.npz", rating=np.arange(4) % 2, user=np.arange(4), age=np.array(list("abcd"))
    )
    data = ClickData(str(tmp_path / "a.npz"), label="rating", continuous=["age"])
    with pytest.raises(ValueError, match=r"a\.npz: age must hold numbers"):
        Clicks.prepare(data)
