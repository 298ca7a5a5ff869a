"""On a card there are two predictions: of a captured step, and of eager mode."""

import time
from dataclasses import asdict, replace
from statistics import median

import pytest
import torch
from torch import nn

import comera
from comera.nn import module
from comera.planning.candidate import Step
from comera.planning.machine import default_machine, load_machine, save_machine
from comera.planning.planner import plan_layer
from comera.planning.ways import Layer, Lookup
from comera.shapes import TTMShape, TTShape

CPU, CARD = default_machine("cpu"), default_machine("cuda")
SLOW_HOST = replace(CARD, eager_call=1e-5, eager_operator=1e-3, eager_module=1e-4)
WIDE = Layer(TTShape((16, 16, 16), (16, 16, 16), (16, 32, 32, 32, 16)), 16384)


def test_a_cpu_has_one_mode():
    assert CPU.eager is None
    assert plan_layer(WIDE, machine=CPU).eager is None
    assert plan_layer(WIDE, machine=CPU).eager_ratio is None
    assert "captured" not in str(plan_layer(WIDE, machine=CPU))


def test_where_the_host_runs_ahead_the_longer_of_work_and_starts_counts():
    eager = SLOW_HOST.eager
    assert eager.eager is None
    assert eager.in_all(2.0, 3.0) == 3.0
    assert SLOW_HOST.in_all(2.0, 3.0) == CPU.in_all(2.0, 3.0) == 5.0
    step = Step("y", (), "any", 1, calls=3, operators=2, modules=0.5)
    assert step.starting(eager) == pytest.approx(3e-5 + 2e-3 + 5e-5)
    assert step.starting(SLOW_HOST) == pytest.approx(3 * SLOW_HOST.call_overhead)


def test_a_layer_whose_host_takes_longer_than_dense_loses_eagerly_and_wins_captured():
    plan = plan_layer(WIDE, dtype="bfloat16", machine=SLOW_HOST)
    assert plan is plan_layer(WIDE, dtype="bfloat16", machine=SLOW_HOST)
    assert (plan.winner, plan.eager.winner) == ("factorized", "nn.Linear")
    assert plan.eager.chosen.seconds >= 4e-3  # four operators
    text = str(plan)
    assert "against nn.Linear in a captured step: 0." in text
    assert "the fastest: captured factorized, eager nn.Linear" in text
    assert plan.eager_ratio == plan.eager.time_ratio > 1 > plan.time_ratio
    assert plan.worst_ratio == plan.eager_ratio
    assert "in a captured step" in plan.sentence()
    assert plan.sentence().endswith("(comera.TrainStep captures the step)")


def test_with_a_fast_host_it_wins_in_both():
    plan = plan_layer(WIDE, machine=replace(SLOW_HOST, eager_call=1e-6, eager_operator=1e-6))
    assert plan.winner == plan.eager.winner == "factorized"


def test_a_table_too():
    shape = TTMShape((20, 20, 10), (4, 8, 8), (8, 8))
    plan = plan_layer(Lookup(shape, 512), machine=SLOW_HOST)
    assert plan.eager.chosen.seconds > plan.chosen.seconds
    assert "in eager mode" in str(plan)


def test_both_are_kept_with_the_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    mine = replace(SLOW_HOST, name="a card", measured=True)
    save_machine(mine)
    assert load_machine("cuda", "a card") == mine
    assert asdict(mine)["eager_operator"] == 1e-3


@pytest.fixture
def on_a_card(monkeypatch):
    monkeypatch.setattr(module, "machine_of", lambda device: SLOW_HOST)


def test_a_model_is_told_who_wins_in_both_modes(on_a_card, caplog):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    comera.tensorize_(model, comera.TTConfig(rank=32, init="orthogonal"))
    (line,) = [r.getMessage() for r in caplog.records if "slower or larger" in r.getMessage()]
    assert "in a captured step" in line
    assert "in eager mode" in line
    assert "`comera calibrate --device cuda`" in line
    text = str(comera.plan(model, tokens=4096))
    assert any("eager" in line for line in text.splitlines()[1:6])
    assert text.splitlines()[-1] == "the fastest: captured tensor trains, eager dense"


CLEAR = [(64, 2, 4, "nn.Linear"), (1024, 8, 1024, "factorized")]
"""Width, rank, tokens and the winner by far, on any CPU."""


@pytest.mark.parametrize(("width", "rank", "tokens", "winner"), CLEAR)
def test_on_a_cpu_the_winner_that_is_named_is_the_one_that_wins(width, rank, tokens, winner):
    """Side by side in one process, the median of rounds: at a factor of two there is no doubt."""
    layer, dense = comera.TTLinear(width, width, rank=rank), nn.Linear(width, width)
    assert comera.plan(layer, tokens=tokens).winner == winner
    x = torch.randn(tokens, width, requires_grad=True)

    def seconds(model: nn.Module) -> float:
        began = time.perf_counter()
        model(x).sum().backward()
        return time.perf_counter() - began

    rounds = [(seconds(layer), seconds(dense)) for _ in range(9)]
    ratio = median(ours / theirs for ours, theirs in rounds[2:])
    assert (ratio < 1) == (winner == "factorized")


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_card_both_winners_are_those_that_win(capsys):
    from benchmarks.__main__ import main
    from comera.calibrate.machine import calibrate

    calibrate("cuda", lambda line: None)
    words = ["--device=cuda", "--curve=width", "--points", "512", "8192", "--dtype=bfloat16"]
    assert main(["linear", *words]) == 0
    shown = capsys.readouterr().out
    assert "captured: the planner named the winner at 2 of 2" in shown
    assert "eager: the planner named the winner at 2 of 2" in shown
