import json

import pytest
import torch

from benchmarks.commands import main
from benchmarks.updates import spectral_norm


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (1, 5)], ids=str)
def test_the_spectral_norm_is_the_largest_singular_value(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    assert spectral_norm(matrix) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)))


def test_steps_of_layers_gates_and_hot_rows_are_measured(tmp_path, capsys):
    out = tmp_path / "updates.json"
    words = "--widths 24:32 --order 1,2 --rank 6 --lr 1e-4 --hot_rows 60:16:4 --threads 1"
    assert main(["updates", *words.split(), f"--json={out}"]) == 0
    layers, tables = json.loads(out.read_text())["results"]
    assert [row["layer"] for row in layers["rows"]] == [
        f"24 -> 32, order {order}, rank 6, {name}" for order in (1, 2) for name in ("muon", "adamw")
    ]
    for row in layers["rows"]:
        # Muon on a dense layer: 0.6 learning rates times the root of the longer side, and what
        # Newton-Schulz leaves of singular values of one.
        assert 0.7 < row["dense"]["first"] / (1e-4 * 0.6 * 32**0.5) < 1.25
        assert 0 < row["cores"]["first"] < row["cores"]["all"] < 0.2 * row["cores"]["start"]
        # A step of Adam moves every gate by its rate, 0.002, and each bond has them once.
        bonds = 1 if "order 1" in row["layer"] else 3
        assert 0 < row["gates"]["first"] / row["gates"]["start"] < bonds * 2.1e-3
    assert [row["table"] for row in tables["rows"]] == [
        f"60 hot rows of 16, rank 4, {name}" for name in ("muon", "adamw")
    ]
    assert all(0 < row["first"] < row["all"] for row in tables["rows"])
    shown = capsys.readouterr().out
    assert "24 -> 32, order 1" in shown
    assert "60 hot rows" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hot_rows", "60:16"], "hot_rows='60:16' must be rows, width and rank"),
        (["--hot_rows", "60:x:4"], "hot_rows='60,x,4' must be whole numbers"),
        (["--lr", "0"], "lr=0.0 must be above 0"),
    ],
    ids=["two numbers", "no number", "no rate"],
)
def test_what_makes_no_sense_is_refused(words, message, capsys):
    assert main(["updates", *words]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
