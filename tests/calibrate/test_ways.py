"""What ``comera calibrate`` measures of the ways of operators, and that they are then taken."""

import time

import pytest
import torch

from comera.calibrate import machine as profile
from comera.calibrate import ways as way_speed
from comera.calibrate.ways import TRIALS, Trial, measure_ways, tf32_products
from comera.ops import dispatch
from comera.ops.context import static_shapes
from comera.ops.dispatch import TABLE, Sample, Way, Ways, way_times_of
from comera.ops.kernels import choose
from comera.planning import machine
from comera.planning.way_times import load_way_times
from comera.recipes.cli import main

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Few and short measurements, saved elsewhere."""
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    monkeypatch.setattr(choose, "mode", lambda: "auto")
    monkeypatch.setattr(way_speed, "_ROUNDS", 2)
    monkeypatch.setattr(way_speed, "_SECONDS", 0.001)
    load_way_times.cache_clear()
    dispatch.forget_times()
    yield
    machine.load_machine.cache_clear()
    load_way_times.cache_clear()
    dispatch.forget_times()


@pytest.fixture
def sleeping(monkeypatch):
    """An operator whose torch takes ten times as long as a kernel; another kernel refuses."""
    monkeypatch.setattr(dispatch, "TABLE", {})
    monkeypatch.setattr(dispatch, "ORDERED", ("cpu",))  # no card is needed
    case = lambda x: (x, x.dtype, (x.shape[0],))  # noqa: E731
    ways = Ways(
        "sleeping", "sleeping", case, lambda new: (new(4),),
        Way("short", lambda x: time.sleep(0.001), kernel="sleeping"),
        Way("never", lambda x: pytest.fail("ran"), lambda x: choose.ON_CPU, "sleeping"),
        Way("long", lambda x: time.sleep(0.01)),
    )  # fmt: skip

    def make(device, dtype):
        return [lambda: ways(torch.ones(4, dtype=dtype))] * 2

    monkeypatch.setattr(way_speed, "TRIALS", (Trial("sleeping", make),))
    return ways


def test_what_is_fastest_is_found_saved_and_taken_from_then_on(sleeping):
    x, said = torch.ones(5), []
    assert [way.name for way in sleeping.order(x)] == ["long", "short", "never"]
    measure_ways(CPU, said.append)
    (timing,) = way_times_of(CPU).timings
    assert (timing.group, timing.dtype, timing.sizes) == ("sleeping", "float32", (4,))
    assert set(timing.seconds) == {"kernel", "torch"}
    assert 0.009 < timing.seconds["torch"] < 0.1
    assert timing.seconds["kernel"] < timing.seconds["torch"]
    assert [way.name for way in sleeping.order(x)] == ["short", "never", "long"]
    assert said[0].startswith("sleeping 4, float32: kernel ")
    assert said[1].startswith("saved as ")


def test_ctrl_c_keeps_what_was_measured_before(sleeping, monkeypatch):
    def interrupted(device, dtype):
        raise KeyboardInterrupt

    trials = (*way_speed.TRIALS, Trial("sleeping", interrupted))
    monkeypatch.setattr(way_speed, "TRIALS", trials)
    with pytest.raises(KeyboardInterrupt):
        measure_ways(CPU, print)
    assert [timing.group for timing in way_times_of(CPU).timings] == ["sleeping"]
    assert sleeping.order(torch.ones(5))[0].name == "short"


def test_a_way_that_fails_is_named_and_left_out(sleeping):
    broken = Way("broken", lambda x: torch.ones(2) @ torch.ones(3), kernel="sleeping")
    sleeping.ways[0] = broken
    said = []
    measure_ways(CPU, said.append)
    assert said[0].startswith("sleeping: kernel cannot be measured: ")
    assert said[1] == "no operator has two ways here"
    assert way_times_of(CPU).timings == ()


def test_measuring_ends_in_time_and_says_what_it_left_out(sleeping, monkeypatch):
    monkeypatch.setattr(way_speed, "TRIALS", 3 * way_speed.TRIALS)
    monkeypatch.setattr(way_speed, "_ALL_SECONDS", 0.05)
    monkeypatch.setattr(way_speed, "_ROUNDS", 1000)
    monkeypatch.setattr(way_speed, "_ENOUGH", 60.0)
    said, began = [], time.perf_counter()
    measure_ways(CPU, said.append)
    assert time.perf_counter() - began < 2
    assert [timing.group for timing in way_times_of(CPU).timings] == ["sleeping"]
    assert said[-2] == "sleeping, float32: sizes not measured: 2, 0 s are over"


def test_trials_come_in_turn_from_each_operator_and_float16_last():
    jobs = way_speed._jobs(torch.device("cuda"))
    assert {trial.group for trial, *_ in jobs[:14]} == {group for group, _ in way_speed._SIZES}
    wide = [dtype != torch.float16 for _, dtype, _ in jobs]
    assert wide == sorted(wide, reverse=True)
    assert len(jobs) == len({(id(trial), *kind) for trial, *kind in jobs}) > 3 * len(TRIALS)


@pytest.mark.gpu
def test_a_way_that_cannot_be_captured_is_named_and_the_others_go_on(sleeping, monkeypatch):
    """The next group's captures, too."""
    monkeypatch.setattr(dispatch, "ORDERED", ("cuda",))
    reads = Way("reads", lambda x: x * float(x.sum()), kernel="sleeping")
    sleeping.ways[:] = [reads, Way("draws", torch.nn.functional.dropout)]
    card = torch.device("cuda", 0)
    x = torch.ones(4, device=card)
    runs = [lambda: sleeping(x)] * 2
    monkeypatch.setattr(way_speed, "TRIALS", 2 * (Trial("sleeping", lambda *_: runs),))
    monkeypatch.setattr(way_speed, "_DTYPES", {"cuda": (torch.float32,)})
    said = []
    measure_ways(card, said.append)
    assert sum(line.startswith("sleeping: kernel cannot be measured: ") for line in said) == 2
    found = {timing.captured: set(timing.seconds) for timing in way_times_of(card).timings}
    assert found == {False: {"kernel", "torch"}}
    assert torch.rand(3, device=card).isfinite().all()


def test_no_way_is_timed_where_the_environment_leaves_no_choice(monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    with pytest.raises(ValueError, match=r"COMERA_KERNELS=ref leaves no choice .* unset it"):
        measure_ways(CPU, print)


def test_every_group_has_a_trial():
    groups = {ways.group for ways in TABLE.values()}
    assert {trial.group for trial in TRIALS} == groups


@pytest.mark.parametrize(
    "trial", [pytest.param(t, id=f"{t.group}-{k}") for k, t in enumerate(TRIALS)]
)
def test_every_trial_meets_cases_of_its_group(trial, monkeypatch):
    """Cut to a few rows: what is made is what is measured, case by case."""
    monkeypatch.setattr(dispatch, "ORDERED", ("cpu",))
    monkeypatch.setattr(way_speed, "copies_of", lambda device, nbytes: 1)
    _, *rest = trial.make.args
    first = 2 if trial.group == "contract_cores" else 64
    run = trial.make.func(first, *rest, CPU, torch.float32)[0]
    with static_shapes():  # as in a graph: else autograd's own operations contract cores on a CPU
        met = way_speed.cases_of(trial.group, "torch", run)
    assert "torch" in dict(met)
    assert met
    assert all(dtype == torch.float32 for _, (_, dtype, _) in met)


@pytest.mark.slow
def test_the_command_measures_the_machine_and_doctor_tells_of_it(sleeping, monkeypatch, capsys):
    monkeypatch.setattr(profile, "_ROUNDS", 1)
    monkeypatch.setattr(profile, "_LARGE", {"cpu": 1 << 20})
    assert main(["doctor"]) == 0
    assert "never measured here" in capsys.readouterr().out
    assert main(["calibrate"]) == 0
    assert "sleeping 4, float32: " in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "measured here on 20" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", sorted({trial.group for trial in TRIALS}))
def test_ways_are_timed_on_a_card_eagerly_and_captured(group, dtype):
    device = torch.device("cuda", 0)
    trial = next(trial for trial in TRIALS if trial.group == group)
    timings = way_speed._measure(trial, device, dtype, pytest.fail)
    assert all(len(timing.seconds) > 1 for timing in timings)


@pytest.mark.gpu
def test_a_card_is_measured_in_two_minutes(capsys):
    began = time.perf_counter()
    measure_ways(torch.device("cuda", 0), print)
    assert time.perf_counter() - began < 120
    assert {t.captured for t in way_times_of(torch.device("cuda", 0)).timings} == {True, False}


def test_samples_stand_for_the_cases_that_are_timed():
    new = lambda *shape: Sample(shape, torch.float32, CPU)  # noqa: E731
    for ways in TABLE.values():
        if not ways.name.endswith("_backward"):
            case = ways.case(*ways.sample(new))
            assert case is None or case[0].device == CPU


def test_what_has_a_way_in_tf32_alone_is_measured_with_it_too():
    trials = {trial.group: trial for trial in TRIALS}
    found = {
        group: list(way_speed._roundings(trials[group], torch.device("cuda")))
        for group in ("feed_forward", "gated_feed_forward")
    }
    exact = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False)]
    both = [exact[0], (torch.float32, True), *exact[1:]]
    assert found == {"feed_forward": both, "gated_feed_forward": both}
    assert list(way_speed._roundings(trials["feed_forward"], CPU)) == exact[:1]


@pytest.mark.parametrize("name", ["factorized_feed_forward", "gated_hidden"])
def test_times_of_tf32_are_kept_apart(name):
    given = TABLE[name].sample(lambda *shape: Sample(shape, torch.float32, CPU))
    with tf32_products(False):
        _, _, exact = TABLE[name].case(*given)
    with tf32_products(True):
        _, dtype, rounded = TABLE[name].case(*given)
    assert (dtype, rounded) == (torch.float32, (*exact, "tf32"))
