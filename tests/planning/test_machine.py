import json
from dataclasses import replace

import pytest

from comera.planning import machine
from comera.planning.candidate import Step, product, product_seconds
from comera.planning.machine import Machine, default_machine, load_machine, save_machine

pytestmark = pytest.mark.usefixtures("own_cache")

MINE = Machine(
    name="Some CPU @ 2 GHz",
    kind="cpu",
    flops=(("float32", 1e11), ("float64", 5e10)),
    bandwidth=1e10,
    strided_bandwidth=5e9,
    cache_bandwidth=4e10,
    cache_bytes=0,
    call_overhead=1e-6,
    operator_overhead=1e-4,
    tile=1,
    whole_tiles=False,
    half_width=0,
    half_depth=0,
    threads=3,
)


def test_what_was_saved_is_loaded(own_cache, said):
    path = save_machine(MINE)
    assert path == own_cache / "machines" / "cpu-some-cpu-2-ghz-3threads.json"
    assert load_machine("cpu", MINE.name, 3) == MINE
    assert said() == []


def test_saving_replaces_what_was_loaded_before():
    assert not load_machine("cpu", MINE.name, 3).measured
    save_machine(MINE)
    assert load_machine("cpu", MINE.name, 3) == MINE
    faster = replace(MINE, bandwidth=2e10)
    save_machine(faster)
    assert load_machine("cpu", MINE.name, 3) == faster


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_missing_profile_is_said_once(kind, said):
    for _ in range(3):
        assert load_machine(kind, "Nobody's", 1) == default_machine(kind)
    (line,) = said()
    assert line.startswith("no profile of this machine (Nobody's)")
    assert f"`comera calibrate --device {kind}`" in line


def test_this_computer_has_a_name(said):
    assert load_machine() == default_machine("cpu")
    assert machine.processor_name()
    assert len(said()) == 1
    assert load_machine("cuda") == default_machine("cuda")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"name": "x"}),
        *(
            lambda whole: [
                json.dumps({**whole, key: value})
                for key, value in [
                    ("flops", 3),
                    ("more", 1),
                ]
            ]
        )(json.loads(json.dumps({**vars(MINE), "flops": dict(MINE.flops)}))),
    ],
)
def test_a_damaged_profile_is_named_once(content, said):
    path = save_machine(MINE)
    path.write_text(content)
    for _ in range(2):
        assert load_machine("cpu", MINE.name, 3) == default_machine("cpu")
    (line,) = said()
    assert str(path) in line


def test_unknown_kinds_and_dtypes_are_named():
    for make in (default_machine, load_machine):
        with pytest.raises(ValueError, match="kind='tpu' must be 'cpu' or 'cuda'"):
            make("tpu")
    with pytest.raises(ValueError, match="dtype='bfloat16' must be one of 'float32', 'float64'"):
        MINE.rate("bfloat16")


def test_a_title_says_whose_profile_it_is():
    assert MINE.title == "Some CPU @ 2 GHz, 3 threads"
    assert default_machine().title == "default profile (cpu)"


def test_a_product_takes_the_larger_of_computing_and_moving():
    assert product_seconds(MINE, "float32", 1, 1000, 1000, 1000) == pytest.approx(2e9 / 1e11)
    assert product_seconds(MINE, "float32", 1, 1000, 1, 1000) == pytest.approx(4 * 1.002e6 / 1e10)
    slow = product_seconds(MINE, "float64", 5, 1000, 1000, 1000)
    assert slow == pytest.approx(5 * 2e9 / 5e10)


def test_thin_products_run_below_peak():
    thin = replace(MINE, half_width=30, half_depth=10)
    wide, narrow = (product_seconds(thin, "float32", 1, 3000, 3000, n) for n in (3000, 30))
    assert wide / 100 < narrow < wide
    assert narrow == pytest.approx(2 * 3000 * 3000 * 30 / 1e11 * 2 * 3010 / 3000)
    assert narrow == product_seconds(thin, "float32", 1, 30, 3000, 3000)


def test_a_width_between_tiles_costs_more_than_the_next_tile():
    tiled = replace(MINE, tile=16)
    assert [tiled.share(n, 100) for n in (16, 32, 24, 30)] == [1, 1, 24 / 32, 30 / 64]
    padded = replace(tiled, whole_tiles=True)
    assert [padded.share(n, 100) for n in (16, 32, 24, 30)] == [1, 1, 24 / 32, 30 / 32]
    thirty, thirty_two = (product_seconds(tiled, "float32", 1, 900, 900, n) for n in (30, 32))
    assert thirty == pytest.approx(2 * thirty_two)


def test_a_product_with_a_vector_is_nothing_but_moving():
    tiled = replace(MINE, tile=16, half_width=4)
    for rows, columns in ((1, 500), (500, 1)):
        seconds = product_seconds(tiled, "float32", 1, rows, 400, columns)
        assert seconds == tiled.moving(4 * (400 + 400 * 500 + 500))


def test_what_stays_in_the_cache_moves_faster():
    cached = replace(MINE, cache_bytes=4e6)
    assert cached.moving(4e6) == pytest.approx(1e-4)
    assert cached.moving(1.4e7) == pytest.approx(1e-4 + 1e-3)
    assert MINE.moving(1e7) == pytest.approx(1e-3)


def test_the_time_of_a_step():
    step = product("y", ("x", "w"), "bi,io->bo", (1, 10, 20, 30), copied=500)
    want = 1e-6 + 2 * 500 * 4 / 5e9 + product_seconds(MINE, "float32", 1, 10, 20, 30)
    assert step.seconds(MINE, "float32") == pytest.approx(want)
    assert step.bytes("float32") == 4 * (10 * 20 + 20 * 30 + 10 * 30 + 2 * 500)
    sweep = Step("s", ("gy",), "sum", 10, moved=2500, operators=1)
    assert sweep.seconds(MINE, "float32") == pytest.approx(1e-6 + 1e-6 + 1e-4)


def test_large_products_of_float32_run_at_the_rate_of_the_faster_library():
    both = replace(MINE, onednn=2.0)
    slow, fast = (product_seconds(m, "float32", 1, 300, 300, 300) for m in (MINE, both))
    assert slow == pytest.approx(2 * fast)
    for dtype, batch, size in (("float64", 1, 300), ("float32", 2, 300), ("float32", 1, 30)):
        arguments = (dtype, batch, size, size, size)
        assert product_seconds(MINE, *arguments) == product_seconds(both, *arguments)
    assert both.without_onednn == MINE
    assert not replace(MINE, onednn=1.05).prefers_onednn
