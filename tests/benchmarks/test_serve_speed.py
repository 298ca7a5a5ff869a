"""``python -m benchmarks serve`` with a small model, its processes played by this one."""

import json
import subprocess
import sys

import pytest

from benchmarks import serve, serve_job
from benchmarks.commands import main
from tests.peers import peer

SIZES = "layers=1 width=64 ffn=96 heads=2 vocab=200 rank=4 prompt=6 tokens=3 repeats=1 threads=1"
WORDS = ["serve", *(f"--{size}" for size in SIZES.split())]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _this_process(monkeypatch):
    def run(words, **_):
        assert words[:3] == [sys.executable, "-m", "benchmarks.serve_job"]
        serve_job.main(*words[3:])
        return subprocess.CompletedProcess(words, 0, "", "")

    for name in ("transformers", "torchao.quantization"):
        peer(name)
    monkeypatch.setattr(serve.subprocess, "run", run)


def test_files_loading_tokens_and_memory_stand_beside_dense(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([*WORDS, f"--json={out}"]) == 0
    (result,) = json.loads(out.read_text())["results"]
    dense, compressed, frozen, int8 = result["rows"]
    names = [row["name"] for row in result["rows"]]
    assert names == ["dense", "compressed", "frozen", "frozen, int8"]
    assert dense["parameters"] == 2 * 200 * 64 + 4 * 64**2 + 3 * 64 * 96 + 3 * 64
    assert 4 * dense["parameters"] < dense["bytes"] < 4.3 * dense["parameters"]
    assert compressed["bytes"] < frozen["bytes"] == int8["bytes"]
    for row in result["rows"]:
        assert len(row["rounds"][0]["each"]) == 2
        assert min(row["load"], row["first"], row["each"]) > 0
        assert row["peak"] >= 0
    shown = capsys.readouterr().out
    assert "frozen agrees with compressed to" in shown
    assert "median of 1 processes" in shown


def test_a_frozen_model_that_computes_something_else_is_refused(monkeypatch, capsys):
    right = serve_job.serve

    def wrong(job):
        found = right(job)
        return {**found, "logits": [2 * value for value in found["logits"]]}

    monkeypatch.setattr(
        serve_job, "serve", lambda job: (wrong if "frozen" in job.folder else right)(job)
    )
    assert main(WORDS) == 1
    shown = capsys.readouterr().out
    assert "refused: the frozen model's logits are" in shown
    assert "token ms" not in shown


def test_a_process_that_fails_says_why(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "first\nKilled for this test\n")
    monkeypatch.setattr(serve.subprocess, "run", lambda words, **_: failed)
    assert main(WORDS) == 1
    assert "dense: the measuring process ended with status 1: Killed for this test" in (
        " ".join(capsys.readouterr().err.split())
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--heads=5", "width=64 must be a multiple of 2 * heads=10"),
        ("--tokens=1", "tokens=1 must be at least 2"),
        ("--rank=0", "rank=0 must be at least 1"),
    ],
)
def test_shapes_that_are_none_are_refused(word, message, capsys):
    assert main([*WORDS, word]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
