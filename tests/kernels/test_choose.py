import functools
import os
import warnings

import pytest
import torch

import comera
from comera.ops import dispatch
from comera.ops.context import static_shapes
from comera.ops.contract_cores import may_take_kernel
from comera.ops.cores import Chains
from comera.ops.dispatch import Sample, Way, Ways
from comera.ops.kernels import choose, launch
from comera.ops.kernels.choose import KernelWarning, kernel_refuses
from comera.ops.kernels.launch import KernelError
from comera.planning.way_times import NONE
from tests.kernels.conftest import kernels_first
from tests.kernels.numbers import taken_by


@pytest.fixture(autouse=True)
def _anew():
    _forget()
    yield
    _forget()


def _forget():
    choose._said.clear()
    choose._why_not_loaded.cache_clear()


def on_a_card(dtype=torch.float32):
    """What is asked of a tensor."""
    return Sample((2,), dtype, torch.device("cuda", 0))


@pytest.fixture
def card(monkeypatch):
    """A card that takes everything; the dictionary's entries can be changed."""
    has = {"capability": (9, 0), "nvrtc": lambda: (13, 0), "function": lambda *args: None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: has["capability"])
    monkeypatch.setattr(launch, "nvrtc_version", lambda: has["nvrtc"]())
    monkeypatch.setattr(launch, "function", lambda *args: has["function"](*args))
    monkeypatch.setattr(choose, "mode", lambda: "auto")
    return has


def fails(message):
    def fail(*args):
        raise KernelError(message)

    return fail


@pytest.fixture
def ways(monkeypatch):
    """Makes the ways of an operator that has a kernel, which may be refused for a reason."""
    monkeypatch.setattr(dispatch, "TABLE", {})

    def make(name="joining", more=None):
        refuses = lambda like: kernel_refuses("contract_f32", like) or more  # noqa: E731
        kernel = Way("kernel", lambda like: "kernel", refuses, name)
        torchs = Way("torch", lambda like: "torch")
        return Ways(name, name, lambda *_: None, lambda new: (new(2),), kernel, torchs)

    return make


def test_a_card_that_takes_it_runs_the_kernel(card, ways):
    joining = ways()
    assert joining(on_a_card()) == "kernel"
    assert joining(on_a_card(torch.bfloat16)) == "kernel"


@pytest.mark.parametrize(
    ("change", "dtype", "refusal", "reason"),
    [
        ({"capability": (7, 5)}, torch.float32, None, "compute capability 7.5 is below 8.0"),
        ({"nvrtc": fails("no NVRTC")}, torch.float32, None, "no NVRTC"),
        ({"function": fails("see the log")}, torch.float32, None, "see the log"),
        ({}, torch.float64, None, "kernels take float32, bfloat16 and float16, not float64"),
        ({}, torch.float32, "too wide", "too wide"),
    ],
)
def test_a_fallback_says_its_reason_once(card, ways, change, dtype, refusal, reason):
    card.update(change)
    joining, reading = ways("joining", refusal), ways("reading", refusal)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert joining.reasons(on_a_card(dtype)) == {"kernel": reason, "torch": None}
    with pytest.warns(KernelWarning, match=f"joining through torch operations.*: {reason}"):
        assert joining(on_a_card(dtype)) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert joining(on_a_card(dtype)) == "torch"
    with pytest.warns(KernelWarning, match="reading"):
        assert reading(on_a_card(dtype)) == "torch"


def test_ref_and_tensors_on_a_cpu_say_nothing(card, ways, monkeypatch):
    joining = ways()
    assert joining(torch.zeros(1)) == "torch"
    assert kernel_refuses("contract_f32", torch.zeros(1)) == "the tensors are on a CPU"
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    assert joining(on_a_card()) == joining(torch.zeros(1)) == "torch"
    for like in (on_a_card(), torch.zeros(1)):
        assert joining.reasons(like)["kernel"] == "COMERA_KERNELS=ref"


def test_emulate_takes_tensors_on_a_cpu_and_no_others(card, ways, monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "emulate")
    joining = ways()
    assert joining(torch.zeros(1)) == "kernel"
    assert joining(torch.zeros(1, dtype=torch.float64)) == "torch"
    assert ways("wide", "too wide")(torch.zeros(1)) == "torch"
    assert joining(torch.zeros(1, device="meta")) == "torch"


@pytest.mark.slow
def test_what_a_card_takes_of_a_compiled_graph_is_asked_when_it_runs(card, compiled):
    cores = [Sample(size, torch.float32, torch.device("cuda", 0)) for size in ((1, 500, 64),) * 2]
    too_wide = [Chains(cores, [], [], 1, 1, 0.0, dtype=torch.float64)]

    def choice(x):
        return x + (1 if may_take_kernel(too_wide) else 0)

    assert compiled(choice)(torch.zeros(1)) == 1
    assert not may_take_kernel(too_wide)


def test_the_mode_is_one_of_two(monkeypatch):
    assert os.environ.get("COMERA_KERNELS", "auto") == choose.SETTING
    for chosen in choose.MODES:
        monkeypatch.setattr(choose, "SETTING", chosen)
        assert choose.mode() == chosen
    monkeypatch.setattr(choose, "SETTING", "fast")
    with pytest.raises(ValueError, match=r"COMERA_KERNELS='fast' must be one of auto, ref$"):
        choose.mode()


@pytest.fixture
def compiled():
    """Compiles a function with what dynamo says once said anew; warnings are errors here."""
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    return functools.partial(torch.compile, backend="eager", fullgraph=True)


@pytest.mark.parametrize("kind", [comera.TTLinear, comera.TTEmbedding, comera.TTEmbeddingBag])
def test_a_compiled_layer_says_nothing(kind, compiled):
    """Of fixed sizes, as in a step that is captured: there the choice is made while tracing."""
    layer = kind(24, 36, rank=5)
    x = torch.randn(3, 24) if kind is comera.TTLinear else torch.tensor([[1, 2], [3, 23]])
    with static_shapes():
        compiled(layer)(x).sum().backward()


@pytest.mark.parametrize("reason", [None, "no NVRTC"])
def test_what_a_card_takes_is_asked_while_compiling_too(card, compiled, reason):
    asked = []
    card["nvrtc"] = lambda: asked.append(1) or ((13, 0) if reason is None else fails(reason)())
    like = on_a_card()

    def choice(x):
        return x + (1 if kernel_refuses("contract_f32", like) == reason else 0)

    assert compiled(choice)(torch.zeros(1)) == 1
    assert asked == [1]


def test_a_fallback_says_its_reason_while_compiling_too(card, compiled):
    def choice(x):
        choose.warn_of("joining", "no NVRTC")
        return x + 1

    with pytest.warns(KernelWarning, match="joining through torch operations.*: no NVRTC"):
        assert compiled(choice)(torch.zeros(1)) == 1
    assert choice(torch.zeros(1)) == 1  # said already


@pytest.mark.parametrize("name", ["contract_cores", "factorized_feed_forward", "ttm_lookup"])
def test_tests_on_a_card_take_kernels_of_which_no_time_is_known(name, card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "way_times_of", lambda device: NONE)
    dispatch.forget_times()
    ways, where = dispatch.TABLE[name], torch.device("cuda", 0)
    given = ways.sample(lambda *shape: Sample(shape, torch.bfloat16, where))
    try:
        assert not taken_by(ways, *given).startswith("kernel")
        with kernels_first():
            assert taken_by(ways, *given).startswith("kernel")
    finally:
        monkeypatch.undo()
        dispatch.forget_times()
