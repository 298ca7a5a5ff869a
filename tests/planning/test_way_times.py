"""Times of the ways of operators: kept, found again, and what cannot be used is said."""

import json

import pytest

from comera.planning import way_times
from comera.planning.way_times import (
    BUILT_IN,
    NONE,
    Setting,
    Timing,
    WayTimes,
    load_way_times,
    save_way_times,
)

pytestmark = pytest.mark.usefixtures("own_cache")

CARD = Setting("cuda", "NVIDIA H200", "2.11.0+cu130", "abc")
FEW = Timing("look up", "float32", True, (256,), {"kernel": 1e-6, "torch": 2e-6})
MANY = Timing("look up", "float32", True, (4096,), {"kernel": 3e-6, "torch": 2e-6})


def test_what_was_saved_is_loaded_and_kept_when_more_is_measured(own_cache, said):
    path = save_way_times(CARD, [FEW], "2026-11-22")
    assert path == own_cache / "machines" / "cuda-nvidia-h200-ways-torch-2-11-0-cu130.json"
    faster = Timing(*FEW.case, {"kernel": 5e-7, "torch": 2e-6})
    save_way_times(CARD, [faster, MANY], "2026-11-23")
    assert load_way_times(CARD) == WayTimes(
        "measured here on 2026-11-23", (faster, MANY), measured=True
    )
    assert said() == []


def test_another_device_or_torch_has_times_of_its_own(said):
    save_way_times(CARD, [FEW], "2026-11-22")
    for other in (
        Setting("cuda", "NVIDIA H100", CARD.torch, CARD.kernels),
        Setting("cuda", CARD.name, "2.12.0", CARD.kernels),
    ):
        assert load_way_times(other) is BUILT_IN
    assert load_way_times(Setting("cpu", "a CPU", CARD.torch, "")) is NONE
    assert said() == []


DAMAGED = {
    "no JSON": ("{", "Expecting"),
    "no object": ("[]", "it is not of format 1"),
    "another format": ({"format": 99}, "it is not of format 1"),
    "another torch": ({"torch": "2.10"}, "it is of torch '2.10', this is '2.11.0+cu130'"),
    "other kernels": ({"kernels": "b"}, "it is of kernels 'b', this is 'abc'"),
    "no timings": ({"timings": None}, "'NoneType' object is not iterable"),
    "half an entry": ({"timings": [{"group": "look up"}]}, "sizes"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_file_that_cannot_be_used_is_said_once_and_the_default_stands_in(damage, said):
    put, why = DAMAGED[damage]
    path = save_way_times(CARD, [FEW], "2026-11-22")
    path.write_text(
        put if isinstance(put, str) else json.dumps({**json.loads(path.read_text()), **put})
    )
    load_way_times.cache_clear()
    assert load_way_times(CARD) is load_way_times(CARD) is BUILT_IN
    (line,) = said()
    assert str(path) in line
    assert why in line
    assert "comera calibrate --device cuda" in line
    save_way_times(CARD, [FEW], "2026-11-23")  # measured anew, it can be used
    assert load_way_times(CARD).measured


def test_a_broken_save_leaves_what_was_there(monkeypatch):
    save_way_times(CARD, [FEW], "2026-11-22")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(way_times.json, "dumps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_way_times(CARD, [MANY], "2026-11-23")
    load_way_times.cache_clear()
    assert load_way_times(CARD).timings == (FEW,)


def test_the_nearest_size_counts_and_words_have_to_agree():
    words = Timing("look up", "float32", True, ("bags",), {"torch": 1.0})
    eager = Timing("look up", "float32", False, (300,), {"torch": 1.0})
    times = WayTimes("a test", (FEW, MANY, words, eager))

    def nearest(*sizes, captured=True, dtype="float32"):
        return times.nearest("look up", dtype, captured, sizes)

    assert nearest(1) is nearest(1000) is FEW
    assert nearest(1100) is nearest(10**9) is MANY
    assert nearest("bags") is nearest("bags", captured=False) is words
    assert nearest(4096, captured=False) is eager
    assert nearest("rows") is nearest(1, 2) is nearest(1, dtype="bfloat16") is None
    assert times.nearest("another", "float32", True, (1,)) is None


@pytest.mark.parametrize(
    ("kernel", "torch", "fastest"),
    [(1.04, 1.0, "kernel"), (1.06, 1.0, "torch"), (1.0, 9.0, "kernel"), (None, 9.0, "torch")],
)
def test_a_kernel_comes_first_where_it_takes_about_as_long(kernel, torch, fastest):
    seconds = {"torch": torch} if kernel is None else {"kernel": kernel, "torch": torch}
    assert Timing("look up", "float32", True, (), seconds).fastest == fastest
