import json
import re
import subprocess
import sys

import pytest
import torch

from comera.bench import commands, kernel_speed, peak, peak_memory
from comera.bench.curve import Point, hits
from comera.bench.timing import Timings
from comera.nn.linear import TTLinear
from comera.ops.context import machine_of
from comera.recipes.cli import main
from tests.peers import peer

LAYER = ["--shape", "48", "32", "--rank", "4", "--repeats", "2"]
SIZES = "layers=1 width=16 ffn=32 heads=2 vocab=40 length=6 rank=4 embedding_rank=4"
MODEL = [f"--{size}" for size in SIZES.split()]
TABLE = ["--rows", "60", "--width", "16", "--indices", "24", "--rank", "4", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _threads(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(*words):
    return main(["bench", *words])


def results(path):
    return json.loads(path.read_text())["results"]


def test_linear_writes_its_times_and_settings(tmp_path, capsys):
    out = tmp_path / "out" / "linear.json"
    assert bench("linear", *LAYER, "--tokens", "20", "--threads", "1", f"--json={out}") == 0
    written = json.loads(out.read_text())
    assert written["machine"]["threads"] == 1
    assert written["machine"]["freed_memory"] == "kept"
    assert written["settings"]["tokens"] == ["20"]
    (result,) = written["results"]
    assert {"dense", "comera"} <= set(result["summary"])
    assert result["parameters"]["dense"] == 48 * 32 + 32
    assert all(len(values) == 2 for values in result["seconds"].values())
    shown = capsys.readouterr().out
    assert "TTLinear 48 -> 32 agrees with dense in float64" in shown
    assert "threads 1, torch" in shown


def test_tensorly_stands_beside_and_its_backend_is_restored(tmp_path):
    peer("tltorch")
    import tensorly

    before = tensorly.get_backend()
    out = tmp_path / "linear.json"
    assert bench("linear", *LAYER, "--tokens", "20", f"--json={out}") == 0
    (result,) = results(out)
    assert len([name for name in result["summary"] if name.startswith("tensorly-torch")]) == 2
    assert bench("embedding", *TABLE, f"--json={out}") == 0
    (result,) = results(out)
    assert "tensorly-torch, rank 4, fused AdamW" in result["summary"]
    assert tensorly.get_backend() == before


def test_a_missing_peer_is_one_line(monkeypatch, tmp_path, capsys):
    for module in ("tltorch", "galore_torch"):
        monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "out.json"
    assert bench("linear", *LAYER, "--tokens", "20", f"--json={out}") == 0
    names = {"dense", "comera", "comera blocks, rank 1"}
    assert set(results(out)[0]["summary"]) == names
    assert bench("step", *MODEL, "--batch", "2", "--repeats", "1", f"--json={out}") == 0
    assert len(results(out)[0]["summary"]) == 2
    shown = capsys.readouterr().out
    assert shown.count("without tensorly-torch") == 1
    assert shown.count("without galore-torch") == 1
    assert "pip install 'comera[bench]'" in shown


def test_a_peer_that_fails_is_one_line(monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("not today\nnor tomorrow")

    monkeypatch.setattr("comera.bench.peers.tensorly_linear", fails)
    assert bench("linear", *LAYER, "--tokens", "20") == 0
    shown = capsys.readouterr().out
    assert "left out: RuntimeError: not today\n" in shown


def test_a_wrong_layer_is_not_timed(monkeypatch, tmp_path, capsys):
    right = TTLinear.forward
    monkeypatch.setattr(TTLinear, "forward", lambda self, x: right(self, x) + 0.01)
    out = tmp_path / "out.json"
    assert bench("linear", *LAYER, "--tokens", "20", f"--json={out}") == 1
    shown = capsys.readouterr().out
    assert "refused: TTLinear 48 -> 32 is not timed" in shown
    assert "Off are the output by" in shown
    assert "median" not in shown
    assert results(out) == []
    assert bench("linear", *LAYER, "--curve", "tokens", "--points", "4") == 1


def test_a_wrong_model_is_not_timed(monkeypatch, capsys):
    right = TTLinear.factors

    def wrong(self):
        found = right(self)
        return found._replace(left=found.left * 1.1)

    monkeypatch.setattr(TTLinear, "factors", wrong)
    for command in ("step", "objective", "truncation"):
        assert bench(command, *MODEL, "--batch", "2", "--repeats", "1") == 1
        shown = capsys.readouterr().out
        assert "Off are the loss by" in shown
        assert "median" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "axis", "at"),
    [
        (["--tokens", "1,8", "32"], "tokens", [1, 8, 32]),
        (["--curve", "rank", "--points", "2", "4", "--tokens", "8"], "rank", [2, 4]),
        (["--curve", "width", "--points", "16,32", "--tokens", "8"], "width", [16, 32]),
    ],
)
def test_curves_are_written_and_drawn(options, axis, at, tmp_path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "pictures" / "curve.png"
    assert bench("linear", *LAYER, *options, f"--json={out}", f"--plot={plot}") == 0
    (result,) = results(out)
    assert result["axis"] == axis
    assert [point["at"] for point in result["points"]] == at
    assert all(point["predicted_ratio"] > 0 for point in result["points"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "the planner named the winner at" in capsys.readouterr().out


def test_a_curve_that_is_interrupted_shows_what_there_is(monkeypatch, tmp_path, capsys):
    from comera.bench import curve

    right = curve.make_layers
    widths = []

    def stops(session, shape, rank, dtype):
        widths.append(shape)
        if len(widths) == 3:
            raise KeyboardInterrupt
        return right(session, shape, rank, dtype)

    monkeypatch.setattr(curve, "make_layers", stops)
    out = tmp_path / "out.json"
    options = ["--curve", "width", "--points", "16", "32", "48", "--tokens", "4"]
    assert bench("linear", *LAYER, *options, f"--json={out}") == 130
    assert [point["at"] for point in results(out)[0]["points"]] == [16, 32]
    assert "interrupted" in capsys.readouterr().out


def test_the_hit_rate_leaves_even_points_out():
    def point(ratios, predicted):
        return Point(1, Timings({"dense": ratios, "comera": [1.0] * 3}, "dense"), predicted)

    won, lost, even = point([2, 2, 3], 1.5), point([0.5, 0.5, 0.4], 1.1), point([0.9, 1, 1.1], 2)
    assert [p.winner for p in (won, lost, even)] == ["comera", "dense", "even"]
    assert hits([won, lost, even]) == (
        "the planner named the winner at 1 of 2 points (1 even left out)"
    )


@pytest.mark.parametrize("more", [[], ["--zipf", "0"], ["--bag", "4"]])
def test_embedding_times_every_way_to_train_a_table(more, tmp_path):
    out = tmp_path / "out.json"
    assert bench("embedding", *TABLE, *more, "--peers=none", f"--json={out}") == 0
    (result,) = results(out)
    assert list(result["summary"]) == [
        "dense, fused AdamW",
        "dense, AdamW",
        "sparse, SparseAdam",
        "comera, fused AdamW",
        "the same cores row by row, fused AdamW",
    ]


@pytest.mark.parametrize(("axis", "points"), [("rows", [40, 90]), ("indices", [8, 32])])
def test_embedding_times_a_curve_at_its_points(axis, points, tmp_path):
    out = tmp_path / "out.json"
    words = ["--curve", axis, "--points", *map(str, points), f"--json={out}"]
    assert bench("embedding", *TABLE, *words) == 0
    (result,) = results(out)
    assert [point["at"] for point in result["points"]] == points


def test_points_of_a_table_need_a_curve(capsys):
    assert bench("embedding", *TABLE, "--points", "8") == 1
    assert "needs --curve, one of indices, rows" in capsys.readouterr().err


def test_a_dense_table_that_is_too_large_is_left_out(tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--peers=none", f"--json={out}"]
    size = 60 * 16 * 4 / 2**30
    assert bench("embedding", *TABLE, *options, f"--dense_limit={3.5 * size}") == 0
    (result,) = results(out)
    assert result["baseline"] == "sparse, SparseAdam"
    assert len(result["summary"]) == 3
    assert bench("embedding", *TABLE, *options, f"--dense_limit={2 * size}") == 0
    (result,) = results(out)
    assert result["baseline"] == "comera, fused AdamW"
    assert "sparse, SparseAdam is left out: 3 copies" in capsys.readouterr().out


@pytest.mark.gpu
def test_compiled_steps_are_replayed_beside_the_others_on_a_gpu(tmp_path):
    out = tmp_path / "out.json"
    options = [*MODEL, "--batch", "2", "--repeats", "1", "--device", "cuda", f"--json={out}"]
    assert bench("step", *options, "--compile") == 0
    (result,) = results(out)
    for kind in ("dense, AdamW", "comera, AdamW, rank objective"):
        assert {kind, f"{kind}, CUDA graph", f"{kind}, compiled, CUDA graph"} <= set(
            result["summary"]
        )


@pytest.mark.slow
def test_step_is_timed_beside_galore(tmp_path, capsys):
    peer("galore_torch")
    out = tmp_path / "out.json"
    assert bench("step", *MODEL, "--batch", "1,2", "--repeats", "1", f"--json={out}") == 0
    one, two = results(out)
    assert "1 sequences of 6 tokens" in one["title"]
    assert list(two["summary"]) == [
        "dense, AdamW",
        "comera, AdamW, rank objective",
        "dense, GaLoreAdamW, rank 128",
    ]
    assert capsys.readouterr().out.count("every 200th does") == 2


def test_objective_and_truncation_are_timed(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench("objective", *MODEL, "--batch", "2", "--repeats", "1", f"--json={out}") == 0
    assert [result["baseline"] for result in results(out)] == ["step", "step"]
    assert bench("truncation", *MODEL, "--batch", "2", "--repeats", "1", f"--json={out}") == 0
    (result,) = results(out)
    assert result["parameters"]["truncated"] < result["parameters"]["masked"]
    shown = capsys.readouterr().out
    assert "late stage: the objective adds" in shown
    assert "truncated agrees with the masked model" in shown


def test_what_processes_exchange_is_the_gradients_and_the_loss(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench("traffic", *MODEL, f"--json={out}") == 0
    found = results(out)
    assert [result["bytes"] for result in found] == [
        4 * (result["parameters"] + 1) for result in found
    ]
    assert found[0]["ratio"] == 1
    assert found[2]["ratio"] > found[1]["ratio"]
    assert "sent by" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_of_several_processes_are_timed(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench("traffic", *MODEL, "--processes", "1,2", "--repeats=2", f"--json={out}") == 0
    counted, timed = results(out)[:3], results(out)[3:]
    assert [(found["processes"], found["rows"]) for found in timed] == [(1, 2)] * 3 + [(2, 4)] * 3
    for one, two, alone in zip(timed[:3], timed[3:], counted, strict=True):
        assert one["bytes"] == 0
        assert two["bytes"] == alone["bytes"]
        assert min(one["processor"], two["processor"]) > 0
        assert 0 < two["exchanging"] < 1
    assert "exchanging" in capsys.readouterr().out


def test_processes_are_timed_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "traffic", lambda *given: None)
    monkeypatch.setattr(commands.Session, "introduce", lambda *given: None)
    assert bench("traffic", *MODEL, "--processes", "2", "--device=cuda") == 1
    assert "are timed over gloo on a CPU, and device=cuda" in capsys.readouterr().err


def in_this_process(words, **_):
    """Instead of a fresh one, which takes seconds to import everything."""
    if peak.Job.from_json(words[-1]).batch == 3:
        return subprocess.CompletedProcess(words, -9, "", "Killed")
    text = json.dumps(peak.peak(peak.Job.from_json(words[-1])))
    return subprocess.CompletedProcess(words, 0, text, "")


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_memory_weighs_models_layers_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peak_memory.subprocess, "run", in_this_process)
    out = tmp_path / "out.json"
    assert bench("memory", *MODEL, "--batch", "1", "2", f"--json={out}") == 0
    assert [row["at"] for row in results(out)[0]["rows"]] == ["batch 1", "batch 2"]
    layer = ["--layer", "--shape", "48", "32", "--rank", "4", "--tokens", "20"]
    assert bench("memory", *layer, f"--json={out}") == 0
    assert results(out)[0]["rows"][0]["at"] == "20 tokens"
    table = ["--table", "--shape", "60", "16", "--rank", "4", "--tokens", "24"]
    assert bench("memory", *table, f"--json={out}") == 0
    assert set(results(out)[0]["rows"][0]) == {"at", "plain", "comera"}
    capsys.readouterr()
    assert bench("memory", *MODEL, "--batch", "3", "1", f"--json={out}") == 1
    assert results(out)[0]["rows"][0]["dense"] is None
    assert "status -9, most likely for lack of memory: Killed" in capsys.readouterr().out


@pytest.mark.slow
@linux
def test_memory_is_measured_in_a_process_of_its_own():
    job = peak.Job("dense", "cpu", 1, True, layer=peak.LayerShape((256, 512), 4, 2048))
    words = [sys.executable, "-m", "comera.bench.peak", job.to_json()]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    activations = 4 * 2048 * (256 + 512 + 256)
    assert found["parameters"] == 256 * 512 + 512
    assert activations < found["peak"] < 10 * activations


def test_memory_says_where_it_cannot_be_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peak, "_STATUS", tmp_path / "status")
    assert bench("memory", *MODEL) == 1
    assert "device='cpu' needs Linux" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linear", "--shape", "8"], r"shape=[8] must be two numbers"),
        (["linear", "--tokens", "1,x"], "tokens='1,x' must be whole numbers"),
        (["linear", "--tokens", "0"], "tokens=0 must be at least 1"),
        (["linear", "--repeats", "0"], "repeats=0 must be at least 1"),
        (["linear", "--plot", "x.png"], "plot='x.png' needs --curve"),
        (["linear", "--curve", "rank", "--plot", "x.gif"], "plot='x.gif' must end in .png"),
        (["linear", "--curve", "rank", "--tokens", "1,2"], "must be one number beside"),
        (["embedding", "--indices", "10", "--bag", "4"], "indices=10 is not a multiple of bag=4"),
        (["truncation", *MODEL, "--keep", "2"], "keep=2.0 must be in (0, 1]"),
    ],
)
def test_bad_options_are_refused(words, message, capsys):
    assert bench(*words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert bench("linear", "--device", "cuda") == 1
    assert "device='cuda' needs a GPU" in capsys.readouterr().err


def test_help_reads_well(capsys):
    for words in ([], ["linear"], ["memory"]):
        with pytest.raises(SystemExit) as stopped:
            bench(*words, "--help")
        assert stopped.value.code == 0
    assert "--curve" in capsys.readouterr().out


@pytest.mark.slow
def test_optimizers_are_timed_and_their_state_is_weighed(tmp_path, capsys):
    out = tmp_path / "optimizers.json"
    sizes = "layers=1 width=16 ffn=24 heads=2 vocab=40 length=6 batch=2 rank=4 gap=3 repeats=2"
    words = [f"--{size}" for size in sizes.split()]
    assert bench("optimizers", *words, "--threads", "1", f"--json={out}") == 0
    rows = {row["optimizer"]: row for row in results(out)[0]["rows"]}
    adamw, came = rows["AdamW, fused"], rows["CAME"]
    weights = 2 * 40 * 16 + 4 * 16 * 16 + 3 * 16 * 24 + 3 * 16
    assert 8 * weights <= adamw["state_bytes"] < 8.2 * weights  # and the numbers of steps
    assert came["state_ratio"] < 0.75
    assert adamw["step_ratio"] == 1
    assert came["step_ms"] > came["update_ms"] > 0
    assert {"GaLore, AdamW", "GaLore, CAME", "Muon, AdamW"} <= set(rows)
    assert "longest / median step" in capsys.readouterr().out
    assert bench("optimizers", *words, "--only", "GaLore, C", f"--json={out}") == 0
    assert [row["optimizer"] for row in results(out)[0]["rows"]] == ["AdamW, fused", "GaLore, CAME"]
    assert bench("optimizers", *words, "--only", "Lion") == 1
    assert "only='Lion' is part of none of AdamW, fused, Adafactor" in capsys.readouterr().err
    assert bench("optimizers", "--rank=0") == 1
    assert "rank=0 must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_galore_torch_keeps_as_much_as_ours(tmp_path):
    peer("galore_torch")
    out = tmp_path / "optimizers.json"
    sizes = "layers=1 width=16 ffn=24 heads=2 vocab=40 length=6 batch=2 rank=4 gap=3 repeats=2"
    words = [*(f"--{size}" for size in sizes.split()), "--threads", "1", "--only", "GaLore"]
    assert bench("optimizers", *words, "galore-torch", f"--json={out}") == 0
    rows = {row["optimizer"]: row for row in results(out)[0]["rows"]}
    theirs, ours = rows["galore-torch, AdamW"], rows["GaLore, AdamW"]
    assert theirs["state_bytes"] == pytest.approx(ours["state_bytes"], rel=0.1)


KERNELS = ["--rank", "4", "--layers", "2", "--table", "60", "16", "--widths", "24:36", "40:20"]
KERNELS += ["--tokens", "9", "--indices", "20,50", "--repeats", "2", "--threads", "1"]


TITLES = [
    f"{title}, forward{also}"
    for title in (
        "contract the cores of 4 layers, rank 4",
        "look up 20 rows of 60 x 16, rank 4",
        "look up 50 rows of 60 x 16, rank 4",
        "linear 24 -> 36, rank 4, 9 tokens",
        "linear 40 -> 20, rank 4, 9 tokens",
        "feed-forward 24 -> 36 -> 24, rank 4, 9 tokens",
        "gated feed-forward 24 -> 36 -> 24, rank 4, 9 tokens",
        "attend with 12 heads on shared keys of 8, 1 x 9",
    )
    for also in ("", " + backward")
]


def titles_in(table):
    _, _, *rows = [line for line in table.read_text().splitlines() if line.startswith("|")]
    return [row.strip("| ").split(" | ")[0] for row in rows]


def test_kernels_stand_beside_plain_torch_and_their_floors(tmp_path, capsys):
    out, table = tmp_path / "out.json", tmp_path / "tables" / "kernels.md"
    assert bench("kernels", *KERNELS, f"--json={out}", f"--markdown={table}") == 0
    measured = results(out)
    assert [one["title"] for one in measured] == titles_in(table) == TITLES
    heading, _, machine, _, columns, rule, *rows = table.read_text().splitlines()
    assert re.fullmatch(r"# Operators beside plain torch, \d{4}-\d\d-\d\d", heading)
    assert "threads 1, torch" in machine
    assert columns.count("|") == rule.count("|") == 7
    for row, title, one in zip(rows, TITLES, measured, strict=True):
        name, ours, plain, ratio, floor, over = row.strip("| ").split(" | ")
        assert name == title
        times = {k: float(v.replace(",", "")) for k, v in (("comera", ours), ("plain", plain))}
        assert times["comera"] == pytest.approx(
            1e3 * one["summary"]["comera"]["median_ms"], rel=0.1, abs=0.1
        )
        assert float(ratio) == pytest.approx(times["plain"] / times["comera"], rel=0.1, abs=0.1)
        assert float(floor.replace(",", "")) == pytest.approx(1e6 * one["floor"], abs=0.06)
        assert float(over) > 1
    shown = capsys.readouterr().out
    assert shown.count("agrees with plain torch") == len(TITLES)
    assert "comera / floor" in shown


def test_the_floor_of_a_linear_layer_is_that_of_its_batch(tmp_path):
    """Each number read and written once: x and y, then dy, x and dx."""
    out = tmp_path / "out.json"
    options = ["--only", "linear", "--widths", "768:3072", "--tokens", "64", "--repeats", "1"]
    assert bench("kernels", *options, f"--json={out}") == 0
    forward, both = (one["floor"] for one in results(out))
    machine = machine_of(torch.device("cpu"))
    bytes_of = 64 * 4 * (768 + 3072), 64 * 4 * (2 * (768 + 3072) + 768)
    flops = 2 * 64 * 32 * (768 + 3072)
    for floor, nbytes, operations in (
        (forward, bytes_of[0], flops),
        (both, bytes_of[1], 3 * flops),
    ):
        expected = max(nbytes / machine.bandwidth, operations / machine.rate("float32"))
        assert floor == pytest.approx(expected)


def test_a_wrong_operator_is_not_timed(monkeypatch, capsys):
    right = kernel_speed.factorized_linears
    monkeypatch.setattr(
        kernel_speed, "factorized_linears", lambda *arguments: [1.01 * y for y in right(*arguments)]
    )
    assert bench("kernels", *KERNELS, "--only", "linear") == 1
    assert "is not timed: it disagrees with plain torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "contract", "look"], "only='look' must be some of contract, lookup, linear"),
        (["--widths", "768"], "must be pairs of widths, such as 768:3072"),
        (["--tokens", "many"], "tokens='many' must be whole numbers"),
        (["--rank", "0"], "rank=0 must be at least 1"),
        (["--table", "60", "0"], "table=0 must be at least 1"),
    ],
)
def test_bad_options_of_kernels_are_refused(options, message, capsys):
    assert bench("kernels", *KERNELS, *options) == 1
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_are_replayed_on_a_gpu(tmp_path, dtype):
    table = tmp_path / "kernels.md"
    options = ["--device", "cuda", "--dtype", dtype, f"--markdown={table}"]
    assert bench("kernels", *KERNELS, *options) == 0
    assert titles_in(table) == TITLES
