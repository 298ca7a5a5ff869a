import pytest

from comera.nn.linear import TTLinear
from tests.benchmarks.calling import MODEL, bench, results
from tests.peers import peer


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
