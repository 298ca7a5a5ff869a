import json
import math
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from comera.recipes.cli import main
from comera.recipes.report.page import Axis, axis_around
from comera.recipes.report.run_report import (
    MOST_COLUMNS,
    MOST_POINTS,
    History,
    gather,
    layer_ranks,
    loss_by_clock,
    loss_by_step,
    read_histories,
    write_report,
)

EVIL = "<script>alert(1)</script>$x$ & 'co'"
LAYERS = {"encoder.query": [4, 6, 4], "encoder.fc1": [8, 8], EVIL: [5]}
RANKS = {name: [rank // 2 for rank in ranks] for name, ranks in LAYERS.items()}


def write_lines(folder: Path, lines: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def logged(step: int, ranks: bool = True) -> dict:
    line = {"step": step, "time": 0.0, "loss": 9.0 - step / 10, "seconds": 1.0, "lr": 1e-3}
    if ranks:
        live = LAYERS if step < 20 else RANKS
        stage = "early" if step < 10 else "late" if step < 25 else "done"
        line |= {
            "stage": stage,
            "size": 54321 - 1000 * step,
            "relaxed_size": 54000.5 - 1100 * step,
            "live_ranks": live,
        }
    return line


def result(name: str, layers: bool = True) -> dict:
    rows = [
        {
            "name": layer,
            "kind": "TTLinear",
            "modes": "8x8 | 8x8",
            "start_ranks": ranks,
            "ranks": RANKS[layer],
            "dense_params": 4096,
            "params": 640,
        }
        for layer, ranks in LAYERS.items()
    ]
    return {
        "name": name,
        "metrics": {"loss": 6.4321, "accuracy": 0.8765},
        "params": 7_654_321,
        "layer_params": 1920 if layers else 12288,
        "layer_dense_params": 12288,
        "bytes": 987_654,
        "seconds": 43.21,
        "steps": 30,
        "ranks": None,
        "layers": rows if layers else [],
    }


def write_run(folder: Path, ranks: bool = True, finished: bool = True) -> Path:
    lines = [logged(step, ranks) for step in range(5, 31, 5)]
    if ranks and finished:
        done = {"size": 30000, "target_size": 32592, "start_size": 54321}
        done |= {"forced": 17, "reached": 32468}
        lines.insert(5, {"step": 25, "stage": "done", **done})
    lines.insert(2, {"step": 10, "eval/loss": 8.5, "eval/accuracy": 0.4})
    write_lines(folder, lines)
    config = f'out: {folder.name}\ntensorize:\n  rank: 8\nnote: "{EVIL}"\n'
    config += "two_stage:\n  target: 0.6\n" if ranks else "two_stage: null\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    if finished:
        (folder / "result.json").write_text(json.dumps(result("compressed")), encoding="utf-8")
    return folder


def write_twin(folder: Path) -> None:
    write_lines(folder / "dense", [logged(step, ranks=False) for step in range(5, 31, 5)])
    facts = result("dense", layers=False) | {"params": 15_308_642}
    (folder / "dense" / "result.json").write_text(json.dumps(facts), encoding="utf-8")


class Page(HTMLParser):
    """Tags and text of a page, its end tags checked against its start tags."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(folder: Path) -> tuple[str, Page]:
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 1
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", text)
    assert not re.search(r"url\(\s*[\"']?http|@import", text)
    assert len(page.ids) == len(set(page.ids))
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    return text, page


def test_report_of_a_finished_run_with_a_twin(tmp_path):
    write_run(tmp_path / "my run")
    write_twin(tmp_path / "my run")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "my run").rglob("*.*")}
    _, page = report(tmp_path / "my run")
    assert page.tags.count("svg") == 4 + len(LAYERS)
    assert page.text.count("my run") >= 2
    for number in (
        "6.4321", "0.8765", "7,654,321", "15,308,642", "1,920", "12,288", "987,654", "43.2", "30",
        "2.00", "6.40", "4,096", "640", "54,321", "30,000", "32,592", "17 ranks", "32,468",
    ):  # fmt: skip
        assert number in page.text, number
    for name, start in LAYERS.items():
        assert page.text.count(name) >= 2, "in the table and beside the picture of ranks"
        assert f"{' '.join(map(str, start))} → {' '.join(map(str, RANKS[name]))}" in page.text
    assert "unfinished" not in page.text
    assert f'note: "{EVIL}"' in page.text
    after = set((tmp_path / "my run").rglob("*.*"))
    assert after - set(before) == {tmp_path / "my run" / "report.html"}
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())


def test_the_page_says_in_words_how_the_twin_compares(tmp_path):
    write_run(tmp_path)
    write_twin(tmp_path)
    for folder, perplexity, seconds in (("", 22.2, 43.21), ("dense", 20.0, 129.63)):
        file = tmp_path / folder / "result.json"
        facts = json.loads(file.read_text(encoding="utf-8"))
        facts["metrics"] |= {"perplexity": perplexity, "loss": math.log(perplexity)}
        facts["metrics"] |= {"accuracy": perplexity / 100}
        file.write_text(json.dumps(facts | {"seconds": seconds}), encoding="utf-8")
    assert gather(tmp_path)["findings"] == [
        "Trained for 30 steps in 43.2 seconds.",
        "Its 3 tensor-train layers store 1,920 parameters in place of 12,288 in dense layers, 6.4 "
        "times fewer.",
        "Its evaluation loss is 3.1001, 0.1044 higher than the dense twin's 2.9957.",
        "Its evaluation accuracy is 22.20 %, 2.20 points higher than the dense twin's 20.00 %.",
        "Its evaluation perplexity is 22.20, 11 % higher than the dense twin's 20.00.",
        "The whole model has 7,654,321 parameters, 2.00 times fewer than the dense twin's "
        "15,308,642.",
        "By the wall clock a training step takes 1.44 seconds, 3.00 times faster than the dense "
        "twin's 4.32.",
    ]


def test_every_point_of_a_chart_says_what_it_is(tmp_path):
    write_run(tmp_path)
    write_twin(tmp_path)
    models = read_histories(tmp_path)
    training, evaluation = loss_by_step(models).lines[:2]
    assert [(p.x, p.y) for p in training.points] == [(s, 9 - s / 10) for s in range(5, 31, 5)]
    assert training.points[0].text == "compressed, training loss: 8.5000, step 5"
    assert [p.text for p in evaluation.points] == ["compressed, evaluation loss: 8.5000, step 10"]
    by_clock = loss_by_clock(models).lines[1].points[0]
    assert (by_clock.x, by_clock.y) == (1.0, 8.5)  # of the line logged at the same step
    assert by_clock.text.endswith(", step 10, 1.0 seconds")
    text, page = report(tmp_path)
    marks = re.findall(r'class="mark[^>]*>\s*<title>([^<]+)</title>', text)
    assert len(marks) == text.count('class="mark') > 50
    assert page.tags.count("polyline") == 2 + 2 + 3 + 2


def test_a_chart_puts_values_where_they_belong():
    axis = Axis("steps", 0, 200)
    assert [axis.place(v) for v in (0, 50, 200)] == [0, 250, 1000]
    assert axis.ticks == [(0, "0"), (250, "50"), (500, "100"), (750, "150"), (1000, "200")]
    axis = Axis("parameters", 1e3, 1e5, log=True)
    assert [axis.place(v) for v in (1e3, 1e4, 1e5)] == [0, 500, 1000]
    assert [text for _, text in axis.ticks if text.startswith("1")] == ["1k", "10k", "100k"]


def test_neighbours_on_an_axis_have_labels_of_their_own():
    close = Axis("loss", 0.09995, 0.10035)
    assert [text for _, text in close.ticks] == ["0.1", "0.1001", "0.1002", "0.1003"]
    assert [text for _, text in Axis("size", 12_340, 12_370).ticks][:2] == ["12.34k", "12.345k"]


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-2.0], [1e-9, 1e9], [0.0, 5.0]])
@pytest.mark.parametrize("options", [{}, {"log": True}, {"zero": True}])
def test_an_axis_holds_all_its_values(values, options):
    axis = axis_around("x", values, **options)
    assert all(0 <= axis.place(value) <= 1000 for value in values)
    assert all(0 <= place <= 1000 for place, _ in axis.ticks)


def test_each_picture_says_what_it_shows(tmp_path):
    text, page = report(write_run(tmp_path))
    named = re.findall(r'role="img" aria-label="([^"]+)"', text)
    assert len(named) == page.tags.count("svg")
    assert len(set(named)) == len(named)


def test_what_is_missing_or_damaged_is_said_on_the_page_and_by_the_command(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    write_twin(folder)
    for place in ("", "dense"):
        (folder / place / "model.safetensors").touch()
    assert gather(folder)["gaps"] == []
    (folder / "config.yaml").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:3], '{"step": 15, "lo', *lines[4:]]))
    (folder / "dense" / "metrics.jsonl").write_text("\n".join(lines[:3]))
    (folder / "dense" / "model.safetensors").unlink()
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    said = capsys.readouterr().out
    for gap in (
        "config.yaml is missing: the settings are not shown.",
        f"metrics.jsonl is damaged in line 4 of {len(lines)}: what was logged from there on",
        "dense/metrics.jsonl ends at step 10, and the model was trained for 30: what was",
        f"dense/model.safetensors is missing: comera train {folder} writes it again",
    ):
        assert f"in {folder}, {gap}" in said
        assert gap in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "a: [1", r"config\.yaml is not readable as YAML"),
        ("config.yaml", "[1]", r"config\.yaml must hold keys and values, not \[1\]"),
        ("result.json", '{"name": "dense"}', r"result\.json is damaged: it lacks metrics, params"),
    ],
)
def test_settings_or_a_result_that_are_damaged_are_named(tmp_path, name, text, message):
    write_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


@pytest.mark.slow
def test_report_is_the_same_each_time(tmp_path):
    write_run(tmp_path)
    assert report(tmp_path)[0] == report(tmp_path)[0]


def test_an_unfinished_run_is_reported_as_far_as_it_is(tmp_path):
    _, page = report(write_run(tmp_path, finished=False))
    assert "The compressed model is unfinished: step 30, training loss 6.0000" in page.text
    assert "evaluation accuracy 0.4000" in page.text
    assert "After training" not in page.text
    assert page.tags.count("svg") == 4 + len(LAYERS)
    assert "4 6 4 → 2 3 2" in page.text


def test_figures_of_test_data_stand_below_those_of_the_evaluation(tmp_path):
    write_run(tmp_path)
    write_twin(tmp_path)
    for folder, accuracy in (("", 0.81), ("dense", 0.8)):
        file = tmp_path / folder / "result.json"
        facts = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(facts | {"test": {"accuracy": accuracy}}), encoding="utf-8")
    found = gather(tmp_path)
    said = "Its test accuracy is 81.00 %, 1.00 points higher than the dense twin's 80.00 %."
    assert said in found["findings"]
    assert found["figures"].rows[2] == ["test accuracy", "0.8100", "0.8000", "0.99"]


def test_a_run_that_ended_in_nan_says_so(tmp_path):
    write_run(tmp_path, finished=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "failed": "the loss is nan at step 31"}) + "\n")
    _, page = report(tmp_path)
    assert "The compressed model failed: the loss is nan at step 31. It is unfinished" in page.text
    assert "unfinished: step 30, training loss 6.0000" in page.text


def test_finished_run_whose_twin_is_still_training(tmp_path):
    write_run(tmp_path)
    write_twin(tmp_path)
    (tmp_path / "dense" / "result.json").unlink()
    _, page = report(tmp_path)
    assert "The dense model is unfinished: step 30" in page.text
    assert "7,654,321" in page.text
    assert "dense / compressed" not in page.text


def test_a_run_without_rank_learning_has_no_section_on_ranks(tmp_path):
    _, page = report(write_run(tmp_path, ranks=False))
    assert page.tags.count("svg") == 3
    assert "Ranks" not in page.text.replace("Ranks are given", "")
    assert "encoder.fc1" in page.text


def test_a_dense_run_is_reported_without_layers(tmp_path):
    write_lines(tmp_path, [logged(5, ranks=False)])
    (tmp_path / "config.yaml").write_text("tensorize: null\ntwo_stage: null\n")
    facts = result("dense", layers=False)
    (tmp_path / "result.json").write_text(json.dumps(facts), encoding="utf-8")
    _, page = report(tmp_path)
    assert "dense, training" in page.text
    assert "Layers" not in page.text


@pytest.mark.parametrize("text", ["", '{"step": 5, "lo'])
def test_run_that_has_logged_nothing_yet(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    _, page = report(tmp_path)
    assert "nothing has been logged yet" in page.text
    assert "svg" not in page.tags


def test_vanished_layer_has_no_ratio(tmp_path):
    write_run(tmp_path)
    facts = result("compressed")
    facts["layers"][0] |= {"params": 0, "ranks": [0, 0, 0]}
    (tmp_path / "result.json").write_text(json.dumps(facts), encoding="utf-8")
    assert "4 6 4 → 0 0 0" in report(tmp_path)[1].text


def test_figures_that_are_not_finite_do_not_stop_the_report(tmp_path):
    lines = [logged(5), {"step": 5, "eval/loss": float("nan"), "eval/accuracy": float("inf")}]
    write_lines(tmp_path, lines)
    assert "evaluation loss nan" in report(tmp_path)[1].text


def test_long_run_gives_a_small_page(tmp_path):
    rng = np.random.default_rng(0)
    lines = [logged(step) | {"loss": float(rng.normal())} for step in range(1, 1201)]
    write_lines(tmp_path, lines)
    text, _ = report(tmp_path)
    assert len(text) < 200_000


def test_a_folder_of_several_runs_is_listed_instead(tmp_path, capsys):
    for name in ("one", "two"):
        (write_run(tmp_path / name) / "config.yaml").write_text("train: {steps: 3}\n")
    assert main(["report", str(tmp_path)]) == 1
    said = f"is not a run but holds some: give one of those that comera list {tmp_path} shows\n"
    assert capsys.readouterr().err == f"error: {tmp_path} {said}"


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["report", f"{tmp_path}/nothing"]) == 1
    assert capsys.readouterr().err == f"error: there is no folder {tmp_path}/nothing\n"


@pytest.mark.parametrize("folder", ["", "not there"])
def test_folder_that_is_no_run(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="is not a run"):
        write_report(tmp_path / folder)
    assert not list(tmp_path.iterdir())


def test_failure_leaves_the_old_report(tmp_path, monkeypatch):
    write_run(tmp_path)
    (tmp_path / "report.html").write_text("old")

    def fail(*_, **__):
        raise RuntimeError("no page")

    monkeypatch.setattr("jinja2.Template.render", fail)
    with pytest.raises(RuntimeError, match="no page"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.glob(".report*"))


def test_stages_and_targets_from_the_log(tmp_path):
    model = read_histories(write_run(tmp_path))[0]
    assert model.stages == [("early", 0, 10), ("late", 10, 25), ("done", 25, 30)]
    assert model.target_size == 32592
    (tmp_path / "unfinished").mkdir()
    model = read_histories(write_run(tmp_path / "unfinished", finished=False))[0]
    assert model.target_size == int(0.6 * (54321 - 5000))


def test_ranks_of_layers_against_hand_counts():
    lines = [
        {"step": 10, "live_ranks": {"a": [4, 2], "b": [8]}},
        {"step": 20, "stage": "done"},
        {"step": 25, "live_ranks": {"a": [4, 2], "b": [4]}},
        {"step": 30, "live_ranks": {"a": [1, 2], "b": [0]}},
    ]
    a, b = layer_ranks(History("model", lines))
    assert [(s.first, s.last, s.ranks, s.share) for s in a.spans] == [
        (0, 25, [4, 2], 1),
        (25, 30, [1, 2], 0.5),
    ]
    assert [(s.first, s.last, s.share) for s in b.spans] == [(0, 10, 1), (10, 25, 0.5), (25, 30, 0)]
    assert (a.start, a.now, b.start, b.now) == (6, 3, 8, 0)


def test_ranks_over_a_long_log_keep_its_ends():
    lines = [{"step": 10 * k, "live_ranks": {"a": [k]}} for k in range(1, 5001)]
    (layer,) = layer_ranks(History("model", lines))
    assert len(layer.spans) == MOST_COLUMNS
    assert (layer.spans[0].first, layer.spans[0].last) == (0, 10)
    assert (layer.spans[-1].last, layer.now) == (50000, 5000)


def test_many_losses_are_averaged_and_none_is_left_out():
    lines = [{"step": k, "loss": float(k)} for k in range(1, 1001)]
    (line,) = loss_by_step([History("model", lines)]).lines
    assert len(line.points) == MOST_POINTS
    assert line.points[-1].x == 1000
    assert line.points[0].y == statistics.fmean(range(1, int(line.points[0].x) + 1))


@pytest.mark.slow
def test_importing_comera_imports_nothing_that_draws():
    code = (
        "import sys, comera, comera.recipes.report.run_report\n"
        "assert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
