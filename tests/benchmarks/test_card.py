"""``make gpu``, which goes on whatever fails, run in miniature on a CPU."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import card, card_parts, kernels
from benchmarks.card import STAGES, Stage, main, measure
from benchmarks.card_parts import FULL, PARTS, TINY, Job, Part, Sizes
from comera.ops.context import static_shapes
from tests.train.tape import Capturable

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(card_parts, "_AT_LEAST", 0.001)
    monkeypatch.setattr(card_parts, "_ROUNDS", 1)


def later():
    return time.monotonic() + 600


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("operators", marks=pytest.mark.slow), "steps", "layers", "tables", "runs"]
)
def test_every_part_fills_its_table(name, tmp_path):
    path = tmp_path / "table.json"
    measure(PARTS[name], CPU, replace(TINY, steps=2), path, later())
    found = json.loads(path.read_text())
    assert (found["skipped"], found["failed"]) == ([], [])
    assert found["rows"]
    for row in found["rows"]:
        assert len(row) == len(found["columns"])
        assert all(cell is None or isinstance(cell, str) or cell > 0 for cell in row)


@pytest.mark.slow
def test_memory_is_weighed_beside_dense_at_both_batches(tmp_path):
    """At the second one here: each takes two new processes."""
    path = tmp_path / "table.json"
    one, other = PARTS["memory"].jobs(CPU, TINY)
    assert (one.what, other.what) == ("batch 1, eager", "batch 2, eager")
    measure(replace(PARTS["memory"], jobs=lambda *_: iter([other])), CPU, TINY, path, later())
    found = json.loads(path.read_text())
    assert [row[:2] for row in found["rows"]] == [[2, "eager"]]
    assert found["failed"] == []


def test_what_takes_place_on_a_card_is_planned_at_every_width_batch_and_precision():
    card_device = torch.device("cuda", 0)
    steps = [job.what for job in PARTS["steps"].jobs(card_device, FULL)]
    for width in (768, 2048, 4096):
        for batch in (8, 32, 128):
            for precision in ("bf16", "fp32", "tf32"):
                assert any(
                    f"of width {width}, batch {batch}, {precision}" in what for what in steps
                )
    assert steps.index("6 encoders of width 768, batch 8, bf16, compiled") < 10
    memory = [job.what for job in PARTS["memory"].jobs(card_device, FULL)]
    assert {"batch 1, captured", "batch 32, captured", "batch 1, eager"} <= set(memory)


@pytest.mark.parametrize("name", kernels.OPERATORS)
def test_operators_are_timed_in_ways_that_a_graph_can_hold(name):
    sizes = TINY.tokens, TINY.tokens, TINY.widths, TINY.rank, TINY.layers, TINY.table
    with static_shapes():
        for case in kernels.cases(CPU, [name], *sizes, torch.float32):
            with Capturable():
                case.ours(0), case.plain(0)


def rows_of(*values):
    return lambda: [(value,) for value in values]


def a_part(*jobs):
    return Part("a test", ("number",), lambda device, sizes: iter(jobs))


def test_a_job_that_fails_is_named_and_the_others_go_on(tmp_path):
    def fails():
        raise RuntimeError("out of memory\nand more")

    path = tmp_path / "table.json"
    jobs = Job("first", rows_of(1)), Job("second", fails), Job("third", rows_of(2, 3))
    measure(a_part(*jobs), CPU, TINY, path, later())
    found = json.loads(path.read_text())
    assert found["rows"] == [[1], [2], [3]]
    assert found["failed"] == ["second: RuntimeError: out of memory"]


def test_when_the_time_is_up_the_rest_is_named(tmp_path, monkeypatch):
    now = iter([0.0, 0.5, 1.0, 2.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    path = tmp_path / "table.json"
    jobs = [Job(str(k), rows_of(k)) for k in range(4)]
    measure(a_part(*jobs), CPU, TINY, path, deadline=1.0)
    found = json.loads(path.read_text())
    assert found["rows"] == [[0], [1]]
    assert found["skipped"] == ["2", "3"]


def test_a_job_during_which_the_process_is_ended_is_named(tmp_path):
    path, seen = tmp_path / "table.json", []
    jobs = Job("long", lambda: seen.append(json.loads(path.read_text())) or [(1,)])
    measure(a_part(jobs), CPU, TINY, path, later())
    assert seen[0]["skipped"] == ["long (begun)"]


@pytest.fixture
def stages(monkeypatch):
    """Stages that do what is told: one that is well, one that hangs, one that fails, a table."""
    table = {
        "title": "A table",
        "columns": ["a", "b"],
        "machine": card.machine_facts(CPU, False),
        "rows": [["x|y", 1234.5], [None, 0.1234]],
        "skipped": ["more"],
        "failed": ["b: why"],
    }
    codes = {
        "doctor": "print('all is well')",
        "steps": "import time; print('begun', flush=True); time.sleep(60)",
        "tests": "print('3 failed, 9 passed'); raise SystemExit(1)",
        "layers": f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({table!r}))",
    }
    monkeypatch.setattr(card, "STAGES", tuple(Stage(name, 1) for name in codes))
    monkeypatch.setattr(
        card,
        "_command",
        lambda name, allowed, table, options: [sys.executable, "-c", codes[name], str(table)],
    )


def test_whatever_happens_to_a_stage_the_others_go_on(stages, tmp_path, capsys):
    out, began = tmp_path / "runs" / "gpu", time.monotonic()
    assert main(["--device", "cpu", "--seconds", "8", "--out", str(out)]) == 1
    assert time.monotonic() - began < 20
    page = (tmp_path / "runs" / "gpu.md").read_text()
    for line in (
        "| doctor | 0 | ended: all is well |",
        "| A table",
        "| x\\|y | 1,234 |",
        "| – | 0.123 |",
        "No time was left for: more.",
        "Failed: b: why",
        "2 rows, 1 skipped, 1 failed",
        "ended with status 1: 3 failed, 9 passed",
        "did not end within 3 s: begun",
    ):
        assert line.removeprefix("| A table") in page
    assert "## A table" in page
    ended = json.loads((tmp_path / "runs" / "gpu.json").read_text())
    assert [each["name"] for each in ended] == ["doctor", "steps", "tests", "layers"]
    assert "did not end" in capsys.readouterr().out


def test_tests_that_take_too_long_name_those_that_have_failed(monkeypatch, tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import time\ndef test_fails():\n    assert False\ndef test_hangs():\n    time.sleep(60)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    monkeypatch.setattr(card, "STAGES", (Stage("tests", 1),))
    monkeypatch.setattr(card, "_command", lambda *_: words)
    assert main(["--device", "cpu", "--seconds", "6", "--out", str(tmp_path / "gpu")]) == 1
    (ended,) = json.loads((tmp_path / "gpu.json").read_text())
    assert ended["problem"] == "did not end within 6 s"
    assert ended["lines"][-1].startswith("1 failed")
    assert "test_two.py::test_fails" in (tmp_path / "gpu" / "tests.txt").read_text()


def test_ctrl_c_keeps_what_was_found(stages, tmp_path, monkeypatch):
    first = card._run

    def run(name, *rest):
        if name == "steps":
            raise KeyboardInterrupt
        return first(name, *rest)

    monkeypatch.setattr(card, "_run", run)
    assert main(["--device", "cpu", "--out", str(tmp_path / "gpu")]) == 130
    assert "| doctor | 0 | ended: all is well |" in (tmp_path / "gpu.md").read_text()


def test_shares_of_the_time_come_to_all_of_it():
    assert sum(stage.share for stage in STAGES) == card.SECONDS == 600
    assert set(PARTS) < {stage.name for stage in STAGES}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--only", "stpes"], "only='stpes' must be some of calibrate, doctor"),
        (["--device", "cuda"], "device='cuda' needs a GPU"),
    ],
)
def test_bad_options_are_named(words, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_no_stage_needs_the_packages_of_the_command_line():
    missing = ("jsonargparse", "docstring_parser", "typeshed_client", "zstandard", "pandas", "yaml")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
import comera, benchmarks.card, comera.calibrate.machine, benchmarks.peak, comera.recipes.doctor
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_stages_run_on_a_cpu_one_after_the_other(tmp_path):
    """Those that take seconds; what each part measures is tested above."""
    quick = ["doctor", "tables", "sanitize"]
    words = [sys.executable, "-m", "benchmarks.card", "--device", "cpu", "--tiny"]
    words += ["--seconds", "900", "--out", str(tmp_path / "gpu"), "--only", *quick]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["name"] for each in found] == quick
    tables = {each["name"]: each["table"] for each in found if each["table"]}
    assert set(tables) == {"tables"}
    assert all(table["rows"] and not table["failed"] for table in tables.values())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_every_part_fills_its_table_on_a_card(name, tmp_path):
    path = tmp_path / "table.json"
    sizes = Sizes(**{**vars(TINY), "compiled": ((16, 2),)})
    measure(PARTS[name], torch.device("cuda", 0), sizes, path, later())
    found = json.loads(path.read_text())
    assert found["failed"] == []
    assert found["rows"]
