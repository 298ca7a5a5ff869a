import warnings
from types import SimpleNamespace

import pytest
import torch

from comera.ops.kernels import choose
from comera.ops.kernels.build import KernelError
from comera.ops.kernels.choose import KernelWarning, runs_kernel


@pytest.fixture(autouse=True)
def _anew():
    for remembered in (choose._warn_once, choose._why_not_on):
        remembered.cache_clear()
    yield
    for remembered in (choose._warn_once, choose._why_not_on):
        remembered.cache_clear()


def on_a_card(dtype=torch.float32):
    """What is asked of a tensor."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype)


@pytest.fixture
def card(monkeypatch):
    """A card that takes everything; the dictionary's entries can be changed."""
    has = {"capability": (9, 0), "nvrtc": lambda: (13, 0), "function": lambda *args: None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: has["capability"])
    monkeypatch.setattr(choose, "nvrtc_version", lambda: has["nvrtc"]())
    monkeypatch.setattr(choose.driver, "function", lambda *args: has["function"](*args))
    monkeypatch.setattr(choose, "mode", lambda: "auto")
    return has


def fails(message):
    def fail(*args):
        raise KernelError(message)

    return fail


def test_a_card_that_takes_it_runs_the_kernel(card):
    assert runs_kernel("joining", "merge", on_a_card())
    assert runs_kernel("joining", "merge", on_a_card(torch.bfloat16), lambda: None)


@pytest.mark.parametrize(
    ("change", "dtype", "refusal", "reason"),
    [
        ({"capability": (7, 5)}, torch.float32, None, "compute capability 7.5 is below 8.0"),
        ({"nvrtc": fails("no NVRTC")}, torch.float32, None, "no NVRTC"),
        ({"function": fails("see the log")}, torch.float32, None, "see the log"),
        ({}, torch.float64, None, "kernels take float32 and bfloat16, not float64"),
        ({}, torch.float32, lambda: "too wide", "too wide"),
    ],
)
def test_a_fallback_says_its_reason_once(card, change, dtype, refusal, reason):
    card.update(change)
    with pytest.warns(KernelWarning, match=f"joining through torch operations.*: {reason}"):
        assert not runs_kernel("joining", "merge", on_a_card(dtype), refusal)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_kernel("joining", "merge", on_a_card(dtype), refusal)
    with pytest.warns(KernelWarning, match="looking up"):
        assert not runs_kernel("looking up", "merge", on_a_card(dtype), refusal)


def test_ref_and_tensors_on_a_cpu_say_nothing(card, monkeypatch):
    assert not runs_kernel("joining", "merge", torch.zeros(1))
    assert choose.why_not("merge", torch.device("cpu"), torch.float32) == "the tensors are on a CPU"
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    assert not runs_kernel("joining", "merge", on_a_card())
    assert not runs_kernel("joining", "merge", torch.zeros(1))


def test_emulate_takes_tensors_on_a_cpu_and_no_others(card, monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "emulate")
    assert runs_kernel("joining", "merge", torch.zeros(1))
    assert not runs_kernel("joining", "merge", torch.zeros(1, dtype=torch.float64))
    assert not runs_kernel("joining", "merge", torch.zeros(1), lambda: "too wide")
    assert not runs_kernel("joining", "merge", torch.zeros(1, device="meta"))


def test_the_mode_is_one_of_three(monkeypatch):
    read = choose.mode.__wrapped__
    monkeypatch.delenv("COMERA_KERNELS", raising=False)
    assert read() == "auto"
    for chosen in choose.MODES:
        monkeypatch.setenv("COMERA_KERNELS", chosen)
        assert read() == chosen
    monkeypatch.setenv("COMERA_KERNELS", "fast")
    with pytest.raises(ValueError, match="COMERA_KERNELS='fast' must be one of auto, ref, emulate"):
        read()
