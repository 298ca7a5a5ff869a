"""What all benchmarks share: options, peers, refusals, Ctrl-C, the JSON file."""

import json
import sys

import pytest
import torch

from benchmarks.__main__ import NAMES
from comera.nn.linear import TTLinear
from tests.benchmarks.calling import LAYER, MODEL, TABLE, bench, measured, results
from tests.peers import peer


def test_results_are_written_with_settings_and_machine(tmp_path, capsys):
    (result,) = measured(tmp_path, "linear", *LAYER, "--tokens", "20", "--threads", "1")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["machine"]["threads"] == 1
    assert written["machine"]["freed_memory"] == "kept"
    assert written["settings"]["tokens"] == [20]
    assert {"dense", "comera", "comera blocks, rank 1"} <= set(result["summary"])
    assert result["parameters"]["dense"] == 48 * 32 + 32
    assert all(len(values) == 2 for values in result["seconds"].values())
    shown = capsys.readouterr().out
    assert "TTLinear 48 -> 32 agrees with dense in float64" in shown
    assert "threads 1, torch" in shown


def test_a_missing_peer_is_one_line(monkeypatch, tmp_path, capsys):
    for module in ("tltorch", "galore_torch"):
        monkeypatch.setitem(sys.modules, module, None)
    (result,) = measured(tmp_path, "linear", *LAYER, "--tokens", "20")
    assert set(result["summary"]) == {"dense", "comera", "comera blocks, rank 1"}
    (result,) = measured(tmp_path, "step", *MODEL, "--batch", "2", "--repeats", "1")
    assert len(result["summary"]) == 2
    shown = capsys.readouterr().out
    assert shown.count("without tensorly-torch") == 1
    assert shown.count("without galore-torch") == 1
    assert "pip install 'comera[bench]'" in shown


def test_a_peer_that_fails_is_one_line(monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("not today\nnor tomorrow")

    monkeypatch.setattr("benchmarks.peers.tensorly_linear", fails)
    assert bench("linear", *LAYER, "--tokens", "20") == 0
    assert "left out: RuntimeError: not today\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["linear", *LAYER, "--tokens", "20"], "tensorly-torch factorized, rank 4"),
        (["embedding", *TABLE], "tensorly-torch, rank 4, fused AdamW"),
    ],
)
def test_tensorly_stands_beside_and_its_backend_is_restored(words, name, tmp_path):
    peer("tltorch")
    import tensorly

    before = tensorly.get_backend()
    (result,) = measured(tmp_path, *words)
    assert name in result["summary"]
    assert tensorly.get_backend() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linear", "--points", "8"], "needs --curve, one of tokens, rank, width"),
        (["memory", "--table"], "--table needs --shape"),
        (["linear", "--curve", "rank", "--tokens", "1,2"], "must be one number beside"),
        (["embedding", "--points", "8"], "needs --curve, one of indices, rows"),
        (["step", "--vocab", "5"], "vocab=5 must be above 5, the first word's number"),
        (["rank_learning", *MODEL, "--keep", "2"], "keep=2.0 must be in (0, 1]"),
        (["serve", "--width=64", "--heads=5"], "width=64 must be a multiple of 2 * heads=10"),
        (["serve", "--tokens=1"], "tokens=1 must be at least 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, message, capsys):
    assert bench(*words) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linaer"], "invalid choice: 'linaer'"),
        (["linear", "--tokens", "1,x"], "argument --tokens: 'x' must be a whole number"),
        (["linear", "--tokens", "0"], "argument --tokens: 0 must be at least 1"),
        (["linear", "--repeats", "0"], "argument --repeats: 0 must be at least 1"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench(*words)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert bench("linear", "--device", "cuda") == 1
    assert "device='cuda' needs a GPU" in capsys.readouterr().err


def test_every_benchmark_has_help(capsys):
    for words in ([], *([name] for name in NAMES)):
        with pytest.raises(SystemExit) as stopped:
            bench(*words, "--help")
        assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_wrong_layer_is_not_timed(monkeypatch, tmp_path, capsys):
    right = TTLinear.forward
    monkeypatch.setattr(TTLinear, "forward", lambda self, x: right(self, x) + 0.01)
    assert bench("linear", *LAYER, "--tokens", "20", f"--json={tmp_path / 'out.json'}") == 1
    shown = capsys.readouterr().out
    assert "refused: TTLinear 48 -> 32 is not timed" in shown
    assert "Off are the output by" in shown
    assert "median" not in shown
    assert results(tmp_path) == []
    assert bench("linear", *LAYER, "--curve", "tokens", "--points", "4") == 1


def test_a_wrong_model_is_not_timed(monkeypatch, capsys):
    right = TTLinear.factors

    def wrong(self):
        found = right(self)
        return found._replace(left=found.left * 1.1)

    monkeypatch.setattr(TTLinear, "factors", wrong)
    for name in ("step", "rank_learning"):
        assert bench(name, *MODEL, "--batch", "2", "--repeats", "1") == 1
        shown = capsys.readouterr().out
        assert "Off are the output by" in shown
        assert "median" not in shown


def test_ctrl_c_shows_the_rows_that_are_there(monkeypatch, tmp_path, capsys):
    from benchmarks import linear

    right = linear.make_layers

    def stops(session, shape, rank, dtype):
        if shape == (48, 48):
            raise KeyboardInterrupt
        return right(session, shape, rank, dtype)

    monkeypatch.setattr(linear, "make_layers", stops)
    words = ["--curve", "width", "--points", "16", "32", "48", "--tokens", "4"]
    assert bench("linear", *LAYER, *words, f"--json={tmp_path / 'out.json'}") == 130
    assert [row["width"] for row in results(tmp_path)[0]["rows"]] == [16, 32]
    assert "interrupted" in capsys.readouterr().out
