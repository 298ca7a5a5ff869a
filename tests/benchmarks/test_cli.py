import sys

import pytest
import torch

from tests.benchmarks.calling import LAYER, MODEL, bench, results


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

    monkeypatch.setattr("benchmarks.peers.tensorly_linear", fails)
    assert bench("linear", *LAYER, "--tokens", "20") == 0
    shown = capsys.readouterr().out
    assert "left out: RuntimeError: not today\n" in shown


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
