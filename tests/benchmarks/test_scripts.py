"""Every benchmark on tiny sizes: its tables hold what they say."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import checkpoints, memory, serve, session, traffic
from benchmarks.linear import Point, hits
from benchmarks.timing import Timings
from tests.benchmarks.calling import LAYER, MODEL, TABLE, bench, measured, results
from tests.peers import peer

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="memory is read from /proc, as Linux has it"
)

# ── linear ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "axis", "at"),
    [
        (["--tokens", "1,8", "32"], "tokens", [1, 8, 32]),
        pytest.param(
            ["--curve", "rank", "--points", "2", "4", "--tokens", "8"], "rank", [2, 4],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--curve", "width", "--points", "16,32", "--tokens", "8"], "width", [16, 32],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_curves_of_layers_are_written(options, axis, at, tmp_path, capsys):
    (result,) = measured(tmp_path, "linear", *LAYER, *options)
    assert [row[axis] for row in result["rows"]] == at
    assert all(row["predicted"] > 0 for row in result["rows"])
    assert "the planner named the winner at" in capsys.readouterr().out


def test_the_hit_rate_leaves_even_points_out():
    def point(ratios, predicted):
        return Point(1, Timings({"dense": ratios, "comera": [1.0] * 3}, "dense"), predicted)

    won, lost, even = point([2, 2, 3], 1.5), point([0.5, 0.5, 0.4], 1.1), point([0.9, 1, 1.1], 2)
    assert [p.winner for p in (won, lost, even)] == ["comera", "dense", "even"]
    assert hits([won, lost, even]) == (
        "the planner named the winner at 1 of 2 points (1 even left out)"
    )


# ── embedding ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("more", [[], ["--zipf", "0"], ["--dtype", "bfloat16"]])
def test_embedding_times_every_way_to_train_a_table(more, tmp_path):
    (result,) = measured(tmp_path, "embedding", *TABLE, *more, "--peers=none")
    assert list(result["summary"]) == [
        "dense, fused AdamW",
        "dense, AdamW",
        "sparse, SparseAdam",
        "comera, fused AdamW",
        "the same cores row by row, fused AdamW",
    ]


@pytest.mark.parametrize(("axis", "points"), [("rows", [40, 90]), ("indices", [8, 32])])
def test_embedding_times_a_curve_at_its_points(axis, points, tmp_path):
    words = ["--curve", axis, "--points", *map(str, points)]
    (result,) = measured(tmp_path, "embedding", *TABLE, *words)
    assert [row[axis] for row in result["rows"]] == points
    for row in result["rows"]:
        indices = row["indices"] if axis == "indices" else 24
        assert row["µs an index"] == pytest.approx(1e3 * row["ms"] / indices)


def test_a_dense_table_that_is_too_large_is_left_out(tmp_path, capsys):
    size = 60 * 16 * 4 / 2**30
    words = ["embedding", *TABLE, "--peers=none"]
    (result,) = measured(tmp_path, *words, f"--dense_limit={3.5 * size}")
    assert result["baseline"] == "sparse, SparseAdam"
    assert len(result["summary"]) == 3
    (result,) = measured(tmp_path, *words, f"--dense_limit={2 * size}")
    assert result["baseline"] == "comera, fused AdamW"
    assert "sparse, SparseAdam is left out: 3 copies" in capsys.readouterr().out


# ── step, rank learning ──────────────────────────────────────────────────────────────────────────


def test_steps_are_timed_at_every_batch_in_every_precision(tmp_path):
    words = ["--batch", "1,2", "--precision", "fp32", "bf16", "--repeats", "1", "--peers=none"]
    found = measured(tmp_path, "step", *MODEL, *words)
    ends = ["", "", ", bf16", ", bf16"]
    for result, size, end in zip(found, (1, 2, 1, 2), ends, strict=True):
        assert result["title"].endswith(f"{size} sequences of 6 tokens, training step{end}")
        assert list(result["summary"]) == ["dense, AdamW", "comera, AdamW, rank objective"]


@pytest.mark.gpu
def test_compiled_steps_are_replayed_beside_the_others_on_a_gpu(tmp_path):
    options = [*MODEL, "--batch", "2", "--repeats", "1", "--device", "cuda"]
    (result,) = measured(tmp_path, "step", *options, "--compile")
    for kind in ("dense, AdamW", "comera, AdamW, rank objective"):
        assert {kind, f"{kind}, CUDA graph", f"{kind}, compiled, CUDA graph"} <= set(
            result["summary"]
        )


@pytest.mark.slow
def test_step_is_timed_beside_galore(tmp_path, capsys):
    peer("galore_torch")
    one, two = measured(tmp_path, "step", *MODEL, "--batch", "1,2", "--repeats", "1")
    assert "1 sequences of 6 tokens" in one["title"]
    assert list(two["summary"]) == [
        "dense, AdamW",
        "comera, AdamW, rank objective",
        "dense, GaLoreAdamW, rank 128",
    ]
    assert capsys.readouterr().out.count("every 200th does") == 2


def test_the_objective_and_truncation_are_timed(tmp_path, capsys):
    found = measured(tmp_path, "rank_learning", *MODEL, "--batch", "2", "--repeats", "1")
    assert [result["baseline"] for result in found] == ["step", "step", "masked"]
    assert found[2]["parameters"]["truncated"] < found[2]["parameters"]["masked"]
    shown = capsys.readouterr().out
    assert "late stage: the objective adds" in shown
    assert "truncated agrees with the masked model" in shown


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def in_this_process(words, **_):
    """Instead of a fresh one, which takes seconds to import everything."""
    job = json.loads(words[-1])
    if job.get("batch") == 3:
        return subprocess.CompletedProcess(words, -9, "", "Killed")
    assert words[:3] == [sys.executable, "-m", "benchmarks.memory"]
    return subprocess.CompletedProcess(words, 0, json.dumps(memory.peak(job)), "")


@linux
def test_memory_weighs_models_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(session.subprocess, "run", in_this_process)
    (result,) = measured(tmp_path, "memory", *MODEL, "--batch", "1", "2")
    rows = [(row[""], row["of"]) for row in result["rows"]]
    assert rows == [(f"batch {size}", way) for size in (1, 2) for way in ("tensors", "resident")]
    table = ["--table", "--shape", "60", "16", "--rank", "4", "--tokens", "24"]
    (result,) = measured(tmp_path, "memory", *table)
    assert set(result["rows"][0]) == {"", "of", "plain", "comera", "plain / comera"}
    assert result["rows"][0]["plain"] > result["rows"][0]["comera"] > 0
    capsys.readouterr()
    words = [*MODEL, "--batch", "3", "1", f"--json={tmp_path / 'out.json'}"]
    assert bench("memory", *words) == 1
    assert results(tmp_path)[0]["rows"][0]["dense"] is None
    assert "status -9, most likely for lack of memory: Killed" in capsys.readouterr().out


@pytest.mark.slow
@linux
def test_memory_is_measured_in_a_process_of_its_own():
    job = {"kind": "plain", "device": "cpu", "threads": 1, "keep": True, "tokens": 4096}
    table = {"rows": 4000, "width": 256, "rank": 4}
    found = session.in_new_process("benchmarks.memory", {**job, "table": table, "zipf": 0})
    rows_and_gradient = 4 * 2 * 4096 * 256
    assert found["parameters"] < 4000
    assert rows_and_gradient < found["peak"] < 40 * rows_and_gradient


def test_memory_says_where_it_cannot_be_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("comera.train.log._PROCESS", tmp_path)
    assert bench("memory", *MODEL) == 1
    assert "device='cpu' needs Linux" in capsys.readouterr().err


# ── traffic ──────────────────────────────────────────────────────────────────────────────────────


def test_what_processes_exchange_is_the_gradients_and_the_loss(tmp_path):
    (result,) = measured(tmp_path, "traffic", *MODEL)
    rows = result["rows"]
    for row in rows:
        assert row["MiB averaged"] * 2**20 == 4 * (row["parameters"] + 1)
        assert row["MiB sent by each of 2"] == row["MiB averaged"]
    assert rows[0]["dense / this"] == 1
    assert rows[2]["dense / this"] > rows[1]["dense / this"]


@pytest.mark.slow
def test_steps_of_several_processes_are_timed(tmp_path):
    words = ["--processes", "1,2", "--repeats=2"]
    counted, timed = (each["rows"] for each in measured(tmp_path, "traffic", *MODEL, *words))
    assert [(row["processes"], row["rows"]) for row in timed] == [(1, 2)] * 3 + [(2, 4)] * 3
    for one, two, alone in zip(timed[:3], timed[3:], counted, strict=True):
        assert one["MiB sent"] == 0
        assert two["MiB sent"] == alone["MiB averaged"]
        assert min(one["processor s"], two["processor s"]) > 0
        assert 0 < two["exchanging"] < 1


def test_processes_are_timed_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "machine_line", lambda *given: "")
    monkeypatch.setattr(session, "machine_facts", lambda *given: {})
    monkeypatch.setattr(traffic, "_counted", lambda *given: [])
    assert bench("traffic", *MODEL, "--processes", "2", "--device=cuda") == 1
    assert "are timed over gloo on a CPU, and device=cuda" in capsys.readouterr().err


# ── checkpoints, optimizers ──────────────────────────────────────────────────────────────────────


def test_checkpoints_are_copied_compressed_and_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints, "_LARGEST", 500)
    words = ["--parameters=2048", "--width=32", "--repeats=1"]
    whole, few, many = measured(tmp_path, "checkpoints", *words)
    kinds = ("change", "key frame", "lossless")
    names = [f"{verb}, {kind}" for verb in ("compressed", "read") for kind in kinds]
    assert list(whole["summary"]) == ["copied", *names]
    assert [few["title"], many["title"]] == [
        f"k-means of {count} values, 15 clusters" for count in ("1,024", "500")
    ]
    shown = capsys.readouterr().out
    assert "read, lossless: " in shown
    assert "x smaller" in shown
    assert "comera: mean square error" in shown


OPTIMIZERS = "layers=1 width=16 ffn=24 heads=2 vocab=40 length=6 batch=2 rank=4 gap=3 repeats=2"
OPTIMIZERS = ["optimizers", *(f"--{size}" for size in OPTIMIZERS.split()), "--threads", "1"]


@pytest.mark.slow
def test_optimizers_are_timed_and_their_state_is_weighed(tmp_path, capsys):
    (result,) = measured(tmp_path, *OPTIMIZERS)
    rows = {row["optimizer"]: row for row in result["rows"]}
    adamw, came = rows["AdamW, fused"], rows["CAME"]
    weights = 2 * 40 * 16 + 4 * 16 * 16 + 3 * 16 * 24 + 3 * 16
    assert 8 * weights <= adamw["state MiB"] * 2**20 < 8.2 * weights  # and the numbers of steps
    assert came["state ratio"] < 0.75
    assert adamw["step ratio"] == 1
    assert came["step ms"] > came["update ms"] > 0
    assert {"GaLore, AdamW", "GaLore, CAME", "Muon, AdamW"} <= set(rows)
    assert all(row["longest / median step"] >= 1 for row in result["rows"])
    (result,) = measured(tmp_path, *OPTIMIZERS, "--only", "GaLore, C")
    assert [row["optimizer"] for row in result["rows"]] == ["AdamW, fused", "GaLore, CAME"]
    assert bench(*OPTIMIZERS, "--only", "Lion") == 1
    assert "only='Lion' is part of none of AdamW, fused, Adafactor" in capsys.readouterr().err


@pytest.mark.slow
def test_galore_torch_keeps_as_much_as_ours(tmp_path):
    peer("galore_torch")
    (result,) = measured(tmp_path, *OPTIMIZERS, "--only", "GaLore", "galore-torch")
    rows = {row["optimizer"]: row for row in result["rows"]}
    theirs, ours = rows["galore-torch, AdamW"], rows["GaLore, AdamW"]
    assert theirs["state MiB"] == pytest.approx(ours["state MiB"], rel=0.1)


# ── serve ────────────────────────────────────────────────────────────────────────────────────────

SERVE = "layers=1 width=64 ffn=96 heads=2 vocab=200 rank=4 prompt=6 tokens=3 repeats=1 threads=1"
SERVE = ["serve", *(f"--{size}" for size in SERVE.split())]


@pytest.fixture
def served(monkeypatch):
    """Processes that load and generate, played by this one."""

    def run(words, **_):
        assert words[:3] == [sys.executable, "-m", "benchmarks.serve"]
        return subprocess.CompletedProcess(words, 0, json.dumps(serve.serve(json.loads(words[3]))))

    for name in ("transformers", "torchao.quantization"):
        peer(name)
    monkeypatch.setattr(session.subprocess, "run", run)


@linux
def test_files_loading_tokens_and_memory_stand_beside_dense(served, tmp_path, capsys):
    (result,) = measured(tmp_path, *SERVE)
    dense, compressed, frozen, int8 = result["rows"]
    assert [row[""] for row in result["rows"]] == ["dense", "compressed", "frozen", "frozen, int8"]
    assert dense["parameters"] == 2 * 200 * 64 + 4 * 64**2 + 3 * 64 * 96 + 3 * 64
    assert 4 * dense["parameters"] < 1e6 * dense["file MB"] < 4.3 * dense["parameters"]
    assert compressed["file MB"] < frozen["file MB"] == int8["file MB"]
    for row in result["rows"]:
        assert min(row["load ms"], row["first token ms"], row["token ms"]) > 0
        assert row["peak MiB"] >= 0
    shown = capsys.readouterr().out
    assert "frozen agrees with compressed to" in shown
    assert "median of 1 processes" in shown


@linux
def test_a_frozen_model_that_computes_something_else_is_refused(served, monkeypatch, capsys):
    right = serve.serve

    def wrong(job):
        found = right(job)
        scale = 2 if "frozen" in job["folder"] else 1
        return {**found, "logits": [scale * value for value in found["logits"]]}

    monkeypatch.setattr(serve, "serve", wrong)
    assert bench(*SERVE) == 1
    shown = capsys.readouterr().out
    assert "refused: the frozen model's logits are" in shown
    assert "token ms" not in shown


@linux
def test_a_process_that_fails_says_why(served, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "first\nKilled for this test\n")
    monkeypatch.setattr(session.subprocess, "run", lambda words, **_: failed)
    assert bench(*SERVE) == 1
    assert "dense: the measuring process ended with status 1: Killed for this test" in (
        " ".join(capsys.readouterr().err.split())
    )
