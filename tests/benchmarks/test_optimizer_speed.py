import pytest

from tests.benchmarks.calling import bench, results
from tests.peers import peer


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
