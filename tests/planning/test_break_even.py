import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.planning.linear_ways import Layer, dense_from
from comera.planning.machine import default_machine
from comera.planning.planner import plan_layer, suggest
from comera.shapes import TTShape

CPU, GPU = default_machine("cpu"), default_machine("cuda")
SHAPE = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))
IDEAL = replace(
    CPU,
    bandwidth=1e18,
    strided_bandwidth=1e18,
    cache_bandwidth=1e18,
    call_overhead=0,
    operator_overhead=0,
    tile=1,
    half_width=0,
    half_depth=0,
)
"""Nothing but operations takes time."""


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [200, 390, 410, 600])
def test_the_threshold_is_where_the_candidates_cross(rank, bias, train, machine):
    shape = SHAPE.with_rank(rank)

    def seconds(one):
        forward = sum(step.seconds(machine, "float32") for step in one.forward)
        return one.seconds if train else forward

    def dense_wins(tokens):
        plan = plan_layer(Layer(shape, tokens, bias=bias), machine=machine)
        return seconds(plan.candidate("reconstructed")) < seconds(plan.candidate("factorized"))

    threshold = dense_from(Layer(shape, 1, bias=bias), machine=machine, train=train)
    if threshold is None:
        assert not any(dense_wins(tokens) for tokens in (1, 64, 4096, 1 << 20))
        return
    assert dense_wins(threshold)
    assert dense_wins(4 * threshold)
    if threshold > 1:
        assert not dense_wins(threshold - 1)
        assert not dense_wins(max(1, threshold // 4))


@given(st.integers(1, 96), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=50)
def test_by_operations_alone_there_is_one_exactly_where_the_thin_halves_cost_more(rank, train):
    """A token costs r (in + out) thin and in * out dense; W costs r in out, three times in
    training, in which each token is paid for three times."""
    wide, high = 128, 192
    shape = TTShape((wide,), (high,), (rank,))
    bond = Layer(shape, 1, bias=False).bond
    threshold = dense_from(Layer(shape, 1, bias=False), machine=IDEAL, train=train)
    if bond * (wide + high) <= wide * high:
        assert threshold is None
    else:
        exact = bond * wide * high / (bond * (wide + high) - wide * high)
        assert exact * (1 - 1e-9) <= threshold <= exact + 1


def test_a_thin_layer_is_never_dense_and_a_vanished_one_neither():
    assert dense_from(Layer(SHAPE, 1), machine=CPU) is None
    assert dense_from(Layer(TTShape((8, 2), (4,), (0, 0)), 1), machine=CPU) is None
    assert dense_from(Layer(TTShape((1,), (1,), (1,)), 1), machine=CPU) is not None


def test_it_is_fast():
    best = min(
        _timed(lambda r=r: dense_from(Layer(SHAPE.with_rank(r), 1), machine=CPU))
        for r in range(380, 420)
    )
    assert best < 2e-3  # about 0.5 ms; a busy machine takes longer
    again = _timed(lambda: dense_from(Layer(SHAPE.with_rank(400), 1), machine=CPU))
    assert again < 1e-3


def _timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


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
        ways = (plan.candidate(name).seconds for name in ("factorized", "reconstructed"))
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
    for call in (plan_layer, suggest, dense_from):
        with pytest.raises(ValueError, match="dtype='half' must be one of"):
            call(Layer(SHAPE, 5), machine=CPU, dtype="half")
