import pytest
import torch

from comera.calibrate import machine as module
from comera.calibrate import ways as way_speed
from comera.calibrate.machine import calibrate
from comera.calibrate.ways import Trial
from comera.ops import dispatch
from comera.ops.kernels import choose
from comera.planning import machine
from comera.planning.machine import default_machine, load_machine
from comera.recipes.cli import main


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Few and small measurements, saved elsewhere."""
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_ROUNDS", 1)
    monkeypatch.setattr(module, "_DTYPES", ("float32",))
    monkeypatch.setattr(module, "_LARGE", {"cpu": 1 << 20})
    monkeypatch.setattr(way_speed, "TRIALS", ())
    monkeypatch.setattr(dispatch, "ORDERED", ("cpu",))  # no card is needed
    yield tmp_path
    machine.load_machine.cache_clear()


def test_a_profile_is_measured_saved_and_used(quick):
    said = []
    profile = calibrate("cpu", said.append)
    assert profile.measured
    assert profile.threads is not None
    assert all(rate > 0 for _, rate in profile.flops)
    assert load_machine("cpu", profile.name, profile.threads) == profile
    assert said[-2].startswith(f"saved as {quick}")


def test_ctrl_c_while_ways_are_timed_keeps_the_profile(quick, monkeypatch):
    def interrupted(device, dtype):
        raise KeyboardInterrupt

    monkeypatch.setattr(way_speed, "TRIALS", (Trial("lookup", interrupted),))
    said = []
    with pytest.raises(KeyboardInterrupt):
        calibrate("cpu", said.append)
    assert said[-1] == "the profile is saved, and so are the ways that were timed so far"
    assert load_machine(threads=torch.get_num_threads()).measured


def test_it_says_at_once_that_the_environment_leaves_no_choice(quick, monkeypatch, capsys):
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    assert main(["calibrate"]) == 1
    assert "COMERA_KERNELS=ref leaves no choice" in capsys.readouterr().err


def test_the_command_prints_what_was_measured(quick, capsys):
    assert main(["calibrate"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out


def test_what_is_no_device_is_named(quick):
    with pytest.raises(ValueError, match="kind='tpu' must be 'cpu' or 'cuda'"):
        calibrate("tpu")


def test_threads_below_one_are_named(quick, capsys):
    for threads in (0, -1):
        assert main(["calibrate", f"--threads={threads}"]) == 1
        assert f"threads={threads} must be at least 1" in capsys.readouterr().err


def test_every_dtype_the_defaults_know_is_measured():
    for device in ("cpu", "cuda"):
        known = {dtype for dtype, _ in default_machine(device).flops}
        assert set(module._DTYPES) == known
