import json
import math
import re
from dataclasses import replace

import pytest

import comera
from comera.recipes.cli import main
from comera.recipes.report.page import show_difference
from comera.recipes.report.sweep_report import (
    Failed,
    Trained,
    compare,
    comparison_text,
    gather_sweep,
    read_comparison,
    read_trained,
    write_comparison,
    write_sweep_report,
)
from tests.recipes.test_run_report import result, write_lines


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


def test_the_front_goes_down_where_less_is_better():
    by_loss = compare(
        [Trained("a", 0, 10, {"loss": 2.0}, 1, 1.0), Trained("b", 0, 20, {"loss": 1.0}, 1, 1.0)],
        ["a", "b"],
        [0],
        "a",
        "loss",
    )
    front = gather_sweep("Sweep", by_loss)["charts"][0].lines[0]
    ends = list(dict.fromkeys((point.x, point.y) for point in front.points))
    assert ends == [(10, 2.0), (20, 2.0), (20, 1.0)]
    assert not by_loss.higher_is_better


def test_the_table_reads_as_it_should(comparison, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write_comparison(comparison, tmp_path)
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
    assert read_comparison(tmp_path) == comparison


def test_figures_that_are_not_finite_are_kept_and_not_drawn(tmp_path):
    runs = [trained("dense", 0, 0.7, 1000), trained("small", 0, math.nan, 100)]
    write_comparison(compare(runs, NAMES, [0], "dense", "accuracy"), tmp_path)
    text = (tmp_path / "results.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(read_comparison(tmp_path).rows[1].mean)
    assert math.isnan(comera.load_sweep(tmp_path)["accuracy"][1])
    page = gather_sweep("Sweep", read_comparison(tmp_path))
    assert [p.name for p in page["charts"][0].lines[1].points] == ["dense"]
    assert [row[0] for row in page["table"].rows] == ["dense", "small"]
    assert "NaN" not in write_sweep_report(tmp_path).read_text()


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "results.json").write_text('{"runs": [')
    with pytest.raises(ValueError, match=r"results\.json is damaged .* comera sweep FILE writes"):
        write_sweep_report(tmp_path)


@pytest.mark.parametrize("runs", [RUNS[:2], []], ids=["some", "all"])
def test_what_failed_is_listed_with_the_reason(tmp_path, runs):
    failed = [Failed("small", 1, "the loss is nan at step 3")]
    written = compare(runs, NAMES, [0, 1], "dense", "accuracy", failed)
    write_comparison(written, tmp_path)
    assert read_comparison(tmp_path) == written
    assert "* small, seed 1: the loss is nan at step 3" in (tmp_path / "results.md").read_text()
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["failed"] == [
        {"variant": "small", "seed": 1, "reason": "the loss is nan at step 3"}
    ]
    page = write_sweep_report(tmp_path).read_text()
    assert "small, seed 1: the loss is nan at step 3" in page


def test_the_page_begins_with_all_figures_losses_over_seconds_and_a_line_completed(tmp_path):
    runs = [Trained(name, 0, 500 * k, {"loss": 3.0 - k}, 4, 7.6) for k, name in enumerate("ab", 1)]
    write_comparison(compare(runs, ["a", "b"], [0], "a", "loss"), tmp_path)
    pages = [write_sweep_report(tmp_path).read_text(encoding="utf-8")]  # of runs that have moved
    for name in "ab":
        write_lines(tmp_path / name / "seed-0", [{"step": 1, "loss": 9.0, "seconds": 2.0}])
        facts = result("dense", layers=False) | {"completion": ["    f(", f"<{name}>)"]}
        (tmp_path / name / "seed-0/result.json").write_text(json.dumps(facts))
    pages.append(write_sweep_report(tmp_path).read_text(encoding="utf-8"))
    first = "Best: b, loss 1.000, 1,000 parameters."
    assert all(f'<main>\n<p class="finding">{first}</p>' in each for each in pages)
    without, top = (each.partition("<h2>What each")[0] for each in pages)
    assert "<svg" not in without
    picture, lines = top.split("</svg>")
    for name in "ab":
        assert f"<title>{name}, training loss: 9.0000, step 1, 2.0 seconds</title>" in picture
    cells = re.findall(r"<t[hd]\b[^>]*>([^<]*)", lines)[3:]
    assert cells == ["b", "    f(", "&lt;b&gt;)", "a", "    f(", "&lt;a&gt;)"]


def test_without_a_run_of_the_reference_nothing_is_compared(tmp_path):
    comparison = compare(RUNS[3:5], NAMES, [0, 1], "dense", "accuracy")
    (row,) = comparison.rows
    assert (row.fewer, row.difference, row.speed) == (None, None, None)
    assert row.mean == pytest.approx(0.71)
    write_comparison(comparison, tmp_path)
    assert "71.00 ± 2.83" in write_sweep_report(tmp_path).read_text(encoding="utf-8")


def scored(variant: str, seed: int, accuracy: float, test: float):
    metrics, on_test = {"accuracy": accuracy}, {"accuracy": test, "loss": 1.0}
    return Trained(variant, seed, 10, metrics, 1, 1.0, test=on_test)


def test_figures_on_test_data_are_compared_where_all_runs_have_them(tmp_path):
    runs = [
        scored("dense", 0, 0.70, 0.68),
        scored("dense", 1, 0.72, 0.70),
        scored("small", 0, 0.75, 0.67),
        scored("small", 1, 0.75, 0.71),
    ]
    comparison = compare(runs, ["dense", "small"], [0, 1], "dense", "accuracy")
    dense, small = comparison.rows
    assert (dense.mean, dense.dev_mean) == (pytest.approx(0.69), pytest.approx(0.71))
    assert (small.mean, small.dev_mean) == (pytest.approx(0.69), pytest.approx(0.75))
    assert small.differences == pytest.approx({0: -0.01, 1: 0.01})
    write_comparison(comparison, tmp_path)
    assert read_comparison(tmp_path) == comparison
    table = (tmp_path / "results.md").read_text()
    assert table.startswith("# accuracy on test data (higher is better), compared with dense\n")
    assert "| test accuracy % |" in table
    assert "| dev accuracy % |" in table
    assert (
        "| small | 2/2 | 10 | 1.00x | 69.00 ± 2.83 | +0.00 ± 1.00 | 1 | 1.0 | 1.00x | 75.00 |"
        in (table)
    )
    first = gather_sweep("Sweep", comparison)["answer"][0]
    assert first == (
        "Best: dense, accuracy 69.0 ± 1.6, 10 parameters. Level with the best within its error: "
        "small."
    )


def test_sizes_of_checkpoints_are_shown_where_they_differ(tmp_path):
    def run(variant: str, size: int | None):
        more = {"layer_params": 5, "checkpoint_bytes": size}
        return Trained(variant, 0, 10, {"loss": 1.0}, 1, 1.0, more=more)

    runs = [run("exact", 18 << 20), run("lossy", 512 << 10)]
    comparison = compare(runs, ["exact", "lossy"], [0], "exact", "loss")
    write_comparison(comparison, tmp_path)
    assert read_comparison(tmp_path) == comparison
    assert read_comparison(tmp_path).runs == comparison.runs
    table = (tmp_path / "results.md").read_text()
    assert "| a checkpoint |" in table
    assert "| 18 MiB |" in table
    assert "| 512 KiB |" in table
    alike = compare([run("exact", 9), run("lossy", 9)], ["exact", "lossy"], [0], "exact", "loss")
    assert "a checkpoint" not in comparison_text(alike)


def test_one_run_without_test_data_leaves_all_with_what_they_share():
    runs = [scored("dense", 0, 0.70, 0.68), trained("small", 0, 0.75, 100)]
    comparison = compare(runs, ["dense", "small"], [0], "dense", "accuracy")
    assert not comparison.tested
    assert [row.mean for row in comparison.rows] == [0.70, 0.75]
    assert "test" not in comparison_text(comparison)


def test_a_result_is_read_whole_but_for_its_layers(tmp_path):
    facts = {"params": 5, "metrics": {"loss": 1.5}, "steps": 3, "seconds": 0.5, "bytes": 20}
    facts["test"] = {"loss": 1.75}
    (tmp_path / "result.json").write_text(json.dumps({**facts, "layers": [{"name": "fc"}]}))
    run = read_trained("tt", 4, tmp_path)
    assert (run.params, run.metrics, run.steps, run.seconds) == (5, {"loss": 1.5}, 3, 0.5)
    assert run.test == {"loss": 1.75}
    assert run.more == {"folder": str(tmp_path), "bytes": 20}


def test_the_page_shows_what_variants_reach_at_which_cost():
    runs = [replace(run, more={"bytes": 4 * run.params, "peak_memory": 9.0}) for run in RUNS]
    small = {"bytes": 50, "peak_memory": 9.0, "layer_dense_params": 9}
    runs[3:5] = [replace(run, more=small) for run in runs[3:5]]
    page = gather_sweep("Sweep", compare(runs, NAMES, [0, 1, 2, 7], "dense", "accuracy"))
    assert page["answer"][0].startswith("Best: once, accuracy 75.0 ± 4.2, 500 param")
    assert page["answer"][0].endswith("Level with the best within its error: dense, small.")
    size, disk, memory, step = page["charts"]
    assert [chart.x.label for chart in (disk, memory, step)] == [
        "bytes on disk", "memory of training", "seconds of a step",
    ]  # fmt: skip
    best, dense, _, compressed = size.lines
    assert {(p.x, p.y) for p in best.points} == {(500, 0.75), (2000, 0.75)}
    assert [(p.x, p.name) for p in dense.points] == [(500, "once"), (1000, ""), (2000, "")]
    (small,) = compressed.points
    assert (small.x, small.y) == (120, pytest.approx(0.71))
    variances = 2 * 0.02**2, (0.04**2 + 0.02**2 + 0.06**2) / 2  # over seeds of small and of dense
    assert small.error == pytest.approx(math.sqrt(sum(variances) / 2 / 2))
    assert "small\naccuracy 71.0 ± 3.0\nparameters 120\n" in small.text
    assert (step.lines[3].points[0].x, disk.lines[3].points[0].x) == (0.25, 50)


def test_the_command_writes_the_page_of_a_sweep_from_its_results(comparison, tmp_path, capsys):
    write_comparison(comparison, tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "wrote" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for part in ("3/4", "+0.00 ± 1.00", "Accuracy over seconds of a step"):
        assert part in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("metric", "value", "other", "words"),
    [
        ("perplexity", 22.2, 20.0, "11 % higher than"),
        ("perplexity", 19.7, 20.0, "1.5 % lower than"),
        ("accuracy", 0.7, 0.75, "5.00 points lower than"),
        ("loss", 2.5, 2.25, "0.2500 higher than"),
        ("auc", 0.8, 0.8, "the same as"),
    ],
)
def test_differences_in_words(metric, value, other, words):
    assert show_difference(metric, value, other) == words


def test_a_sweep_is_a_data_frame(comparison, tmp_path):
    tested = Trained("once", 3, 500, {"accuracy": 0.7}, 200, 25.0, test={"accuracy": 0.6})
    write_comparison(replace(comparison, runs=(*RUNS, tested)), tmp_path)
    frame = comera.load_sweep(tmp_path)
    assert list(frame["variant"]) == [run.variant for run in (*RUNS, tested)]
    assert frame.groupby("variant")["accuracy"].mean()["dense"] == pytest.approx(0.74)
    assert frame["test/accuracy"].dropna().to_list() == [0.6]
    assert frame["params"].to_list() == [run.params for run in (*RUNS, tested)]
    assert frame.attrs == {"metric": "accuracy", "reference": "dense"}


def test_what_is_no_sweep_is_named(comparison, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere holds no figures of a sweep: comera sw"):
        comera.load_sweep(tmp_path / "nowhere")
    write_comparison(compare([], NAMES, [0], "dense", "accuracy"), tmp_path)
    assert list(comera.load_sweep(tmp_path)) == ["variant", "seed", "params", "steps", "seconds"]
    for damaged in ("{", "[]", '{"runs": [{"variant": "a"}]}'):
        (tmp_path / "results.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"results\.json is damaged, or another program's: "):
            comera.load_sweep(tmp_path)
