import time

import pytest

from comera.planning.machine import default_machine
from comera.planning.planner import plan_layer
from comera.planning.printing import show_bytes, show_count, show_seconds
from comera.planning.ways import Layer, Lookup
from comera.shapes import TTMShape, TTShape

CPU, GPU = default_machine("cpu"), default_machine("cuda")
ATTENTION = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))
FEED_FORWARD = TTShape((12, 8, 8), (12, 16, 16), (12, 30, 30, 30, 16))
TABLE = TTMShape((16, 20, 10, 10), (4, 4, 8, 6), (32, 32, 32))


@pytest.mark.parametrize("shape", [ATTENTION, FEED_FORWARD], ids=["attention", "feed-forward"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_the_papers_layers_run_thin_and_win(shape, tokens):
    plan = plan_layer(Layer(shape, tokens), machine=CPU)
    assert plan.chosen.name == "factorized"
    assert plan.time_ratio < 0.3
    assert plan.memory_ratio < 1
    seconds = [one.seconds for one in plan.candidates]
    assert seconds == sorted(seconds)
    assert {one.name for one in plan.candidates} == {"factorized", "reconstructed"}


def test_a_wide_bond_at_a_large_batch_is_cheaper_dense():
    plan = plan_layer(Layer(ATTENTION.with_rank(1000), 1 << 17), machine=CPU)
    assert plan.chosen.name == "reconstructed"
    assert plan.time_ratio > 1


def test_the_same_call_returns_the_same_plan_at_once():
    first = plan_layer(Layer(ATTENTION, 4096), machine=CPU)
    assert plan_layer(Layer(ATTENTION, 4096), machine=CPU) is first
    assert plan_layer(Layer(ATTENTION, 4096, in_features=768), machine=CPU) is first
    assert plan_layer(Layer(ATTENTION, 4095), machine=CPU) is not first
    assert plan_layer(Layer(ATTENTION, 4096), machine=GPU) is not first
    began = time.perf_counter()
    for _ in range(200):
        plan_layer(Layer(ATTENTION, 4096), machine=CPU)
    assert time.perf_counter() - began < 200 * 1e-3  # about 20 us; a busy machine takes longer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
def test_every_dtype_can_be_planned(dtype, machine):
    plan = plan_layer(Layer(FEED_FORWARD, 4096), dtype=dtype, machine=machine)
    assert plan.chosen.seconds > 0
    size = {"float64": 8, "float32": 4}.get(dtype, 2)
    assert plan.dense.saved_bytes == size * 4096 * 768


def test_a_plan_prints_what_it_will_do():
    plan = plan_layer(Layer(ATTENTION, 4096), machine=CPU)
    text = str(plan)
    assert max(len(line) for line in text.splitlines() if "│" in line) <= 80
    for part in [
        "768 -> 768, modes 12x8x8 | 8x8x12, ranks 12 30 30 30 12",
        "4096 tokens, float32, default profile (cpu)",
        "core0·core1", "aA,AcB->acB", "bi,ir->br", "forward", "backward",
        "factorized", "(chosen)", "reconstructed", "nn.Linear",
        f"against nn.Linear: {plan.time_ratio:.2f}x the time",
        "0.92x the memory (37.2 MiB for 40.5 MiB)",
    ]:  # fmt: skip
        assert part in text, text
    assert repr(plan) == text


def test_a_plan_shows_in_a_notebook():
    text = plan_layer(Layer(ATTENTION, 4096), machine=CPU)._repr_html_()
    assert text.count("<table>") == 2
    assert "12x8x8 | 8x8x12" in text
    assert "-&gt;" in text
    assert "->" not in text


def test_shares_add_up():
    plan = plan_layer(Layer(ATTENTION, 4096), machine=CPU)
    steps = [*plan.chosen.forward, *plan.chosen.backward]
    assert sum(step.seconds(CPU, "float32") for step in steps) == pytest.approx(plan.chosen.seconds)


def test_a_vanished_layer_plans_to_its_bias():
    shape = TTShape((8, 2), (4,), (0, 0))
    for bias in (True, False):
        plan = plan_layer(Layer(shape, 100, bias=bias), machine=CPU)
        assert [one.name for one in plan.candidates] == ["only the bias"]
        assert plan.chosen.operations == 0
        assert "only the bias" in str(plan)
    table = plan_layer(Lookup(TTMShape((4, 3), (2, 3), (0,)), 10), machine=CPU)
    assert table.chosen.name == "zeros"


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_padded_widths_and_all_orders(machine, order):
    shape = TTShape.fit(770, 3001, order=order, rank=24)
    plan = plan_layer(Layer(shape, 300, in_features=770, out_features=3001), machine=machine)
    assert "770 -> 3001" in str(plan)
    assert plan.chosen.seconds > 0
    assert {one.name for one in plan.candidates} == {"factorized", "reconstructed"}


def test_a_table():
    plan = plan_layer(Lookup(TABLE, 4096, 1500, num_embeddings=30522), machine=CPU)
    assert plan.chosen.name == "unique"
    assert plan.dense.name == "nn.Embedding"
    assert plan.memory_ratio < 0.5
    text = str(plan)
    assert max(len(line) for line in text.splitlines() if "│" in line) <= 80
    assert "30522 x 768, modes 16x4  20x4  10x8  10x6, ranks 32 32 32, 1500 distinct rows" in text
    assert plan is plan_layer(Lookup(TABLE, 4096, 1500, num_embeddings=30522), machine=CPU)


def test_as_many_rows_as_can_differ():
    for tokens, rows in ((40, 12), (7, 7)):
        asked = Lookup(TTMShape((4, 3), (2, 3), (5,)), tokens)
        assert f"{rows} distinct rows" in str(plan_layer(asked, machine=CPU))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"together": 0}, "together=0 must be at least 1"),
    ],
)
def test_what_cannot_be_planned_is_named(settings, problem):
    with pytest.raises(ValueError, match=problem):
        Layer(ATTENTION, **{"tokens": 10, **settings})


def test_a_dtype_without_a_rate_is_named():
    with pytest.raises(ValueError, match="dtype='float31' must be one of 'float64', 'float32'"):
        plan_layer(Layer(ATTENTION, 10), machine=CPU, dtype="float31")


def test_what_cannot_be_planned_of_a_table_is_named():
    with pytest.raises(ValueError, match="dtype='int8' must be one of"):
        plan_layer(Lookup(TABLE, 10), machine=CPU, dtype="int8")


def test_numbers_are_shown_with_three_digits_and_a_unit():
    assert [show_count(n) for n in (0, 999, 999.6, 94_371_840, 7.25e9, 3e15)] == [
        "0", "999", "1k", "94.4M", "7.25G", "3e+03T"
    ]  # fmt: skip
    assert [show_bytes(n) for n in (3, 2048, 13e6)] == ["3 B", "2 KiB", "12.4 MiB"]
    assert [show_seconds(n) for n in (2.5, 1.3e-3, 0.99999e-3, 4e-6)] == [
        "2.5 s", "1.3 ms", "1 ms", "4 us"
    ]  # fmt: skip
