"""Tables are as wide as the terminal at most; what is left out for that is said."""

import io
import sys

import pytest

from comera.planning.printing import Table, show_column

HEADER = ("layer", "shape and ranks", "parameters / dense", "bytes")
ROWS = [
    ("model.layers.0.self_attn.q_proj", "linear 64 -> 256, ranks 4 8 8 8 8", "0.25x", "1.27 MiB"),
    ("model.layers.1.mlp.down_proj and 2 more", "linear 256 -> 64", "1.00x", "12 KiB"),
    ("head", "linear 64 -> 10", "0.50x", "4 KiB"),
]


@pytest.fixture
def table(monkeypatch):
    def make(columns, rows=ROWS, **options):
        monkeypatch.setenv("COLUMNS", str(columns))
        return Table("layers", HEADER, rows, left=(0, 1), names=0, **options).text()

    return make


def width(text):
    return max(map(len, text.splitlines()))


def test_with_room_nothing_is_broken(table):
    text = table(140, spare=["bytes"])
    for cell in (*HEADER, *ROWS[0], *ROWS[1]):
        assert f" {cell} " in text
    assert text.splitlines()[0].strip() == "layers"
    assert width(text) < 140  # no wider than it has to be


def test_headings_are_broken_before_names(table):
    text = table(width(table(140)) - 1)
    assert "parameters / dense" not in text
    assert "model.layers.1.mlp.down_proj and 2 more" in text


def test_shared_beginnings_of_names_are_said_once(table):
    text = table(100)
    assert width(text) <= 100
    assert text.splitlines()[0].strip() == "layers (… is model.layers.)"
    assert "│ …0.self_attn.q_proj " in text
    assert "│ …1.mlp.down_proj and 2 more " in text
    assert "│ head " in text


def test_names_are_broken_behind_dots(table):
    rows = [("first_part_of_a_name.second_part_of_it.third_part_of_it", *ROWS[0][1:])]
    lines = [line.split("│")[1].strip() for line in table(80, rows).splitlines() if "│" in line]
    assert lines[:2] == ["first_part_of_a_name.", "second_part_of_it."]


def test_words_are_broken_and_numbers_never(table):
    text = table(80)
    assert width(text) <= 80
    assert "linear 64 -> 256, ranks 4 8 8 8 8" not in text
    for number in ("0.25x", "1.27 MiB", "12 KiB"):
        assert f" {number} │" in text


def test_columns_that_can_be_spared_go_only_where_they_must(table):
    assert "wider" not in table(80, spare=["bytes", "parameters / dense"])
    rows = [(*row[:3], "1,234,567,890,123,456,789,012,345,678") for row in ROWS]
    text = table(80, rows, spare=["bytes", "parameters / dense"])
    assert width(text) <= 80
    assert "bytes" not in text.split("━┩")[0]
    assert "0.25x" in text
    assert text.endswith("\na wider terminal shows too: bytes")


def test_a_narrower_terminal_gets_80_columns(table):
    assert table(20) == table(80)


def test_a_file_gets_all_and_a_notebook_80_columns(table, monkeypatch):
    spare = ["bytes", "parameters / dense"]
    whole, narrow = table(10_000, spare=spare), table(80, spare=spare)
    assert width(narrow) <= 80 < width(whole)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())  # no terminal
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    made = Table("layers", HEADER, ROWS, left=(0, 1), names=0, spare=spare)
    assert made.text() == whole
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert made.text() == narrow


def test_a_notebook_gets_all_columns_with_those_that_can_be_spared_last():
    made = Table("a < b", HEADER, ROWS, spare=["bytes", "shape and ranks"])
    assert made.html() == (
        "<table><caption>a &lt; b</caption><thead><tr><th>layer</th><th>parameters / dense</th>"
        "<th>shape and ranks</th><th>bytes</th></tr></thead><tbody>"
        + "".join(
            f"<tr><td>{name}</td><td>{share}</td><td>{shape}</td><td>{size}</td></tr>"
            for name, shape, share, size in (
                (row[0], row[1].replace(">", "&gt;"), *row[2:]) for row in ROWS
            )
        )
        + "</tbody></table>"
    )


def test_names_without_a_beginning_in_common_stay_whole(table):
    rows = [(f"{'abcdefgh'[k] * 30}", *row[1:]) for k, row in enumerate(ROWS)]
    text = table(90, rows)
    assert "…" not in text
    assert "a" * 24 in text  # and are folded


def test_a_line_above_the_total(table):
    assert table(80, total=True).count("├") == 1


def test_a_table_of_no_rows():
    assert "layer" in Table("none", HEADER, []).text()


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([2.491, 2.51, None, 16.1], ["2.491", "2.510", "", "16.100"]),
        ([0.0, 3e-5, float("nan"), -0.5], ["0.000e+00", "3.000e-05", "nan", "-5.000e-01"]),
        ([0, None], ["0.000", ""]),
        ([1234567], ["1234567"]),
        ([], []),
    ],
)
def test_a_column_has_one_precision(values, shown):
    assert show_column(values, 4) == shown
