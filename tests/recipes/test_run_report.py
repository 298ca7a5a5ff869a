import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from comera.recipes.report.history import History, read_histories
from comera.recipes.report.plots import rank_shares
from comera.recipes.report.run_report import write_report

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
    assert "script" not in page.tags
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
    assert page.tags.count("svg") == 5
    assert page.text.count("my run") >= 2
    for number in (
        "6.4321", "0.8765", "7,654,321", "15,308,642", "1,920", "12,288", "987,654", "43.2", "30",
        "2.00", "6.40", "4,096", "640", "54,321", "30,000", "32,592", "17 ranks", "32,468",
    ):  # fmt: skip
        assert number in page.text, number
    for name, start in LAYERS.items():
        assert page.text.count(name) >= 2, "in the table and beside the heat map"
        assert f"{' '.join(map(str, start))} → {' '.join(map(str, RANKS[name]))}" in page.text
    assert "unfinished" not in page.text
    assert f'note: "{EVIL}"' in page.text
    after = set((tmp_path / "my run").rglob("*.*"))
    assert after - set(before) == {tmp_path / "my run" / "report.html"}
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())


def test_each_plot_says_what_it_shows(tmp_path):
    text, page = report(write_run(tmp_path))
    named = re.findall(r'<svg role="img" aria-label="([^"]+)"', text)
    assert len(named) == page.tags.count("svg") == page.tags.count("figcaption")
    assert len(set(named)) == len(named)


@pytest.mark.slow
def test_report_is_the_same_each_time(tmp_path):
    write_run(tmp_path)
    assert report(tmp_path)[0] == report(tmp_path)[0]


def test_an_unfinished_run_is_reported_as_far_as_it_is(tmp_path):
    _, page = report(write_run(tmp_path, finished=False))
    assert "The compressed model is unfinished: step 30, training loss 6.0000" in page.text
    assert "evaluation accuracy 0.4000" in page.text
    assert "After training" not in page.text
    assert page.tags.count("svg") == 5
    assert "4 6 4 → 2 3 2" in page.text


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


@pytest.mark.parametrize("folder", ["", "not there"])
def test_folder_that_is_no_run(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="is not a run"):
        write_report(tmp_path / folder)
    assert not list(tmp_path.iterdir())


def test_failure_leaves_the_old_report(tmp_path, monkeypatch):
    write_run(tmp_path)
    (tmp_path / "report.html").write_text("old")

    def fail(*_):
        raise RuntimeError("no page")

    monkeypatch.setattr("comera.recipes.report.run_report.page", fail)
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


def test_rank_shares_against_hand_counts():
    lines = [
        {"step": 10, "live_ranks": {"a": [4, 2], "b": [8]}},
        {"step": 20, "stage": "done"},
        {"step": 30, "live_ranks": {"a": [1, 2], "b": [0]}},
    ]
    edges, rows, layers = rank_shares(History("model", lines))
    assert edges.tolist() == [0, 10, 30]
    assert rows.tolist() == [[1, 0.25], [1, 1], [1, 0]]
    assert layers == [("a", 2), ("b", 1)]


def test_rank_shares_of_a_long_log_keep_its_ends():
    lines = [{"step": 10 * k, "live_ranks": {"a": [k]}} for k in range(1, 5001)]
    edges, rows, _ = rank_shares(History("model", lines))
    assert rows.shape == (1, len(edges) - 1)
    assert len(edges) <= 401
    assert edges[[0, 1, -1]].tolist() == [0, 10, 50000]
    assert rows[0, -1] == 5000


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        text, _ = report(write_run(tmp_path))
        assert dict(matplotlib.rcParams) == before
    assert "31px" not in text
    assert "#000000" not in text


@pytest.mark.slow
def test_importing_comera_does_not_import_matplotlib():
    code = (
        "import sys, comera, comera.recipes.report.run_report\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
