"""``make gpu``, which goes on whatever fails, run in miniature on a CPU."""

import json
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import __main__, card
from benchmarks.card import GROUPS, STAGES, Stage, main

RESULT = {"results": [{"title": "A table", "rows": [{"a": 1}]}], "notes": []}


@pytest.fixture
def stages(monkeypatch):
    """Stages of all kinds: one that is well, one that hangs, one that fails, a benchmark."""
    codes = {
        "doctor": "print('all is well')",
        "hangs": "import time; print('begun', flush=True); time.sleep(60)",
        "tests": "print('3 failed, 9 passed'); raise SystemExit(1)",
        "layers": "import sys; print('a table')\nprint(*'1234')\nprint('x')\nprint('y')\n"
        f"open(sys.argv[1], 'w').write({json.dumps(RESULT)!r})",
    }
    words = {"layers": "linear"}
    made = tuple(Stage(name, 1, words.get(name, "")) for name in codes)
    monkeypatch.setattr(card, "STAGES", made)

    def command(stage, allowed, table, options):
        return [sys.executable, "-c", codes[stage.name], str(table)]

    monkeypatch.setattr(card, "_command", command)


def test_whatever_happens_to_a_stage_the_others_go_on(stages, tmp_path, capsys):
    out, began = tmp_path / "runs" / "gpu", time.monotonic()
    assert main(["--device", "cpu", "--seconds", "8", "--out", str(out)]) == 1
    assert time.monotonic() - began < 20
    page = (tmp_path / "runs" / "gpu.md").read_text()
    for line in (
        "| doctor | 0 | ended: all is well |",
        "ended with status 1: 3 failed, 9 passed",
        "did not end within 3 s: KeyboardInterrupt",
        "| layers | 0 | 1 tables |",
        "## layers\n\n```\na table\n1 2 3 4\nx\ny\n```",
    ):
        assert line in page
    ended = json.loads((tmp_path / "runs" / "gpu.json").read_text())
    assert [each["name"] for each in ended] == ["doctor", "hangs", "tests", "layers"]
    assert ended[3]["found"] == RESULT
    assert "did not end" in capsys.readouterr().out


def test_tests_that_take_too_long_name_those_that_have_failed(monkeypatch, tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import time\ndef test_fails():\n    assert False\ndef test_hangs():\n    time.sleep(60)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # else it may take seconds to start
    monkeypatch.setattr(card, "STAGES", (Stage("tests", 1),))
    monkeypatch.setattr(card, "_command", lambda *_: words)
    assert main(["--device", "cpu", "--seconds", "6", "--out", str(tmp_path / "gpu")]) == 1
    (ended,) = json.loads((tmp_path / "gpu.json").read_text())
    assert ended["problem"] == "did not end within 6 s"
    assert ended["lines"][-1].startswith("1 failed")
    assert "test_two.py::test_fails" in (tmp_path / "gpu" / "tests.txt").read_text()


@pytest.mark.slow
def test_a_benchmark_that_takes_too_long_keeps_its_rows(monkeypatch, tmp_path):
    words = "embedding --rows 60 --width 16 --indices 8 --rank 4 --repeats 20 --curve indices"
    words += f" --points {','.join(map(str, range(8, 2000)))}"
    monkeypatch.setattr(card, "STAGES", (Stage("tables", 1, words),))
    assert main(["--device", "cpu", "--seconds", "20", "--out", str(tmp_path / "gpu")]) == 1
    (ended,) = json.loads((tmp_path / "gpu.json").read_text())
    assert ended["problem"] == "did not end within 20 s"
    assert ended["found"]["results"][0]["rows"][0]["indices"] == 8
    assert "interrupted" in ended["lines"]


def test_ctrl_c_keeps_what_was_found(stages, tmp_path, monkeypatch):
    first = card._run

    def run(stage, *rest):
        if stage.name == "hangs":
            raise KeyboardInterrupt
        return first(stage, *rest)

    monkeypatch.setattr(card, "_run", run)
    assert main(["--device", "cpu", "--out", str(tmp_path / "gpu")]) == 130
    assert "| doctor | 0 | ended: all is well |" in (tmp_path / "gpu.md").read_text()


def test_shares_of_the_time_come_to_all_of_it_and_groups_fit_five_minutes():
    shares = {stage.name: stage.share for stage in STAGES}
    assert sum(shares.values()) == card.SECONDS == 600
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(shares)
    assert max(sum(shares[name] for name in group) for group in GROUPS.values()) <= 300


def test_the_page_names_what_got_worse_and_stages_get_the_time_they_took(
    stages, tmp_path, monkeypatch, capsys
):
    rows = [{"width": 768, "mode": "eager", "dense ms": 1.0, "comera ms": 1.0, "dense / comera": 1}]
    tables = [
        {"title": "A step", "summary": {"dense": {"median_ms": 2.0}, "comera": {"median_ms": 3.0}}},
        {"title": "A layer", "rows": rows},
    ]
    then = {"name": "layers", "seconds": 28.0, "problem": None, "found": {"results": tables}}
    (tmp_path / "gpu-2026-01-01.json").write_text(json.dumps([then]))
    now = json.loads(json.dumps(tables))
    now[0]["summary"]["comera"]["median_ms"], now[1]["rows"][0]["comera ms"] = 3.5, 1.09
    monkeypatch.setitem(RESULT, "results", now)
    ended = card.Ended("layers", 1.0, None, RESULT, [])
    monkeypatch.setattr(card, "_run", lambda *_: ended)
    monkeypatch.setitem(GROUPS, "more", ("layers",))
    out = tmp_path / "gpu-2026-02-01"
    assert main(["--device", "cpu", "--only", "more", "--out", str(out)]) == 0
    assert "layers: at most 40 s" in capsys.readouterr().out
    page = out.with_suffix(".md").read_text()
    assert page.endswith(
        "## 1 of 4 rows are worse than last time\n\n* A step: comera: 3, now 3.5\n"
    )


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.words], ids=lambda s: s.name)
def test_the_options_of_every_benchmark_exist(stage):
    parser = __main__.make_parser()
    for words in (stage.words, f"{stage.words} {stage.tiny}"):
        assert parser.parse_args([*words.split(), "--device=cuda"]).benchmark == words.split()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--only", "stpes"], "only='stpes' must be some of calibrate, checks"),
        (["--device", "cuda"], "device='cuda' needs a GPU"),
    ],
)
def test_bad_options_are_named(words, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_no_stage_needs_the_packages_of_the_command_line():
    missing = ("docstring_parser", "pandas", "yaml")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from benchmarks.__main__ import make_parser
import benchmarks.card, comera.calibrate.machine, comera.recipes.doctor
make_parser()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_stages_run_on_a_cpu_one_after_the_other(tmp_path):
    quick = ["doctor", "layers", "tables", "sanitize"]
    words = ["--device", "cpu", "--tiny", "--seconds", "900", "--out", str(tmp_path / "gpu")]
    assert main([*words, "--only", *quick]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["name"] for each in found] == quick
    assert [len(each["found"]["results"]) for each in found if each["found"]] == [1, 1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.words], ids=lambda s: s.name)
def test_every_benchmark_fills_its_table_on_a_card(stage, capsys):
    words = [*stage.words.split(), *stage.tiny.split(), "--device=cuda"]
    assert __main__.main(words) == 0
