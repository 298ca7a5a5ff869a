from dataclasses import replace

import pytest

from comera.planning.machine import default_machine
from comera.planning.planner import plan_layer, suggest
from comera.planning.ways import Layer
from comera.shapes import TTShape

CPU, GPU = default_machine("cpu"), default_machine("cuda")
SHAPE = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))


def test_a_tensor_train_that_wins_says_so():
    said = plan_layer(Layer(SHAPE, 4096), machine=CPU)
    assert said.time_ratio < 1
    assert said.suggestion is None
    assert said.sentence() == "0.1x the time of nn.Linear and 0.92x its memory"


def test_one_that_loses_names_the_rank_that_would_win():
    shape = SHAPE.with_rank(500)
    said = plan_layer(Layer(shape, 512), machine=CPU)
    assert said.time_ratio > 1
    rank = max(said.suggestion.shape.ranks)
    assert said.suggestion.change == f"rank={rank}"
    assert f" (rank={rank}: " in said.sentence()

    def ratio(rank):
        plan = plan_layer(Layer(shape.with_rank(rank), 512), machine=CPU)
        ways = (one.seconds for one in plan.candidates)
        return min(ways) / plan.dense.seconds

    assert ratio(rank) < 1 <= ratio(rank + 1)
    assert said.suggestion.time_ratio == pytest.approx(ratio(rank))
    assert suggest(Layer(shape, 512), machine=CPU) == said.suggestion


def test_another_order_where_no_rank_is_enough():
    """Many tiny cores: the calls alone take longer than a dense layer."""
    shape = TTShape((2,) * 8, (2,) * 8, (1,) * 15).with_rank(4)
    busy = replace(CPU, call_overhead=6e-6, operator_overhead=0)
    said = plan_layer(Layer(shape, 128), machine=busy)
    assert said.time_ratio > 1
    assert said.suggestion.change.startswith("order=1, rank=")
    assert said.suggestion.shape.in_modes == (256,)
    assert said.suggestion.time_ratio < 1


def test_none_where_the_dense_layer_is_out_of_reach():
    said = plan_layer(Layer(SHAPE, 64), machine=GPU, dtype="bfloat16")
    assert said.suggestion is None
    assert said.time_ratio > 1
    assert said.sentence().endswith("(no rank or order is faster)")
    assert suggest(Layer(SHAPE, 64), machine=GPU, dtype="bfloat16") is None


def test_a_vanished_layer_wins():
    assert plan_layer(Layer(TTShape((8, 96), (768,), (0, 0)), 4096), machine=CPU).time_ratio < 1


def test_what_is_wrong_is_named():
    for call in (plan_layer, suggest):
        with pytest.raises(ValueError, match="dtype='half' must be one of"):
            call(Layer(SHAPE, 5), machine=CPU, dtype="half")
