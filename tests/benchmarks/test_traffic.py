import pytest
import torch

from benchmarks import commands
from tests.benchmarks.calling import MODEL, bench, results


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
