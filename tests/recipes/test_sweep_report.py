import json
import math

import pytest

from comera.recipes.report.sweep_report import (
    Trained,
    compare,
    comparison_text,
    pareto_front,
    read_trained,
    write_comparison,
)


def trained(variant: str, seed: int, accuracy: float, params: int, steps=100, seconds=50.0):
    return Trained(variant, seed, params, {"accuracy": accuracy, "loss": 1.0}, steps, seconds)


RUNS = [
    trained("dense", 0, 0.70, 1000),
    trained("dense", 1, 0.72, 1000),
    trained("dense", 2, 0.80, 1000),
    trained("small", 0, 0.69, 100, seconds=20.0),
    trained("small", 1, 0.73, 140, seconds=30.0),
    trained("once", 2, 0.75, 500, steps=200, seconds=25.0),
    trained("other-seed", 7, 0.60, 2000),
]
NAMES = ["dense", "small", "once", "other-seed", "not-yet"]


@pytest.fixture
def comparison():
    return compare(RUNS, NAMES, [0, 1, 2, 7], "dense", "accuracy")


def test_figures_as_computed_by_hand(comparison):
    dense, small, once, other = comparison.rows  # nothing of the variant without a run
    assert dense.mean == pytest.approx(0.74)
    assert dense.deviation == pytest.approx(math.sqrt((0.04**2 + 0.02**2 + 0.06**2) / 2))
    assert (dense.fewer, dense.difference, dense.speed) == (1, 0, 1)
    assert small.seeds == (0, 1)
    assert small.params == 120
    assert small.fewer == pytest.approx(1000 / 120)
    # -1 and +1 points: no difference in the mean, and its error is theirs over the root of two
    assert small.difference == pytest.approx(0)
    assert small.difference_error == pytest.approx(math.sqrt(2) * 0.01 / math.sqrt(2))
    assert small.speed == pytest.approx(100 / 50)
    assert (once.deviation, once.difference_error) == (None, None)
    assert once.difference == pytest.approx(-0.05)  # against seed 2 alone
    assert once.speed == pytest.approx(0.5 / 0.125)
    assert (other.difference, other.speed) == (None, None)


def test_the_front_is_what_nothing_smaller_beats(comparison):
    assert [row.variant for row in pareto_front(comparison)] == ["small", "once"]
    by_loss = compare(
        [Trained("a", 0, 10, {"loss": 2.0}, 1, 1.0), Trained("b", 0, 20, {"loss": 1.0}, 1, 1.0)],
        ["a", "b"],
        [0],
        "a",
        "loss",
    )
    assert [row.variant for row in pareto_front(by_loss)] == ["a", "b"]
    assert not by_loss.higher_is_better


def test_the_table_reads_as_it_should(comparison, tmp_path):
    write_comparison(comparison, RUNS, tmp_path)
    table = (tmp_path / "results.md").read_text()
    assert "| dense | 3/4 | 1,000 | 1.00x | 74.00 ± 5.29 | – | 100 | 50.0 | 1.00x |" in table
    assert "| small | 2/4 | 120 | 8.33x | 71.00 ± 2.83 | +0.00 ± 1.00 |" in table
    assert "| once | 1/4 | 500 | 2.00x | 75.00 ± – | -5.00 ± – | 200 | 25.0 | 4.00x |" in table
    assert "| other-seed | 1/4 | 2,000 | 0.50x | 60.00 ± – | – | 100 | 50.0 | – |" in table
    shown = comparison_text(comparison)
    for cell in ("accuracy %", "difference, points", "71.00 ± 2.83"):
        assert cell in table
        assert cell in shown
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["reference"] == "dense"
    assert [row["variant"] for row in facts["summary"]] == NAMES[:4]
    assert len(facts["runs"]) == len(RUNS)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_run_of_the_reference_nothing_is_compared():
    (row,) = compare(RUNS[3:5], NAMES, [0, 1], "dense", "accuracy").rows
    assert (row.fewer, row.difference, row.speed) == (None, None, None)
    assert row.mean == pytest.approx(0.71)


def test_a_result_is_read_whole_but_for_its_layers(tmp_path):
    facts = {"params": 5, "metrics": {"loss": 1.5}, "steps": 3, "seconds": 0.5, "bytes": 20}
    (tmp_path / "result.json").write_text(json.dumps({**facts, "layers": [{"name": "fc"}]}))
    run = read_trained("tt", 4, tmp_path)
    assert (run.params, run.metrics, run.steps, run.seconds) == (5, {"loss": 1.5}, 3, 0.5)
    assert run.more == {"folder": str(tmp_path), "bytes": 20}
