import contextlib

import pytest
import torch

from comera.ops.dispatch import TABLE, preferring
from comera.ops.kernels import launch
from tests.kernels import emulation

ORDERS = (emulation.ASCENDING, emulation.DESCENDING, 7)
"""Of the threads of a block; the last is drawn at random."""


@contextlib.contextmanager
def kernels_first():
    """Kernels are tried before torch, however fast they are known to be, or not known."""
    groups = {ways.group for ways in TABLE.values()}
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(preferring(group, "kernel"))
        yield


@pytest.fixture(autouse=True)
def _kernels_first_on_a_card(request):
    """Else tests there would be of torch's ways, which come first until kernels are timed."""
    on_card = request.node.get_closest_marker("gpu") is not None
    with kernels_first() if on_card else contextlib.nullcontext():
        yield


@pytest.fixture
def emulated(monkeypatch):
    """Kernels run on the CPU."""
    if emulation.find_gxx() is None:
        pytest.skip("no g++, which the emulation of CUDA needs")
    emulation.emulate_kernels(monkeypatch)


@pytest.fixture
def tf32():
    """Products of float32 may be of tf32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def unwritten(monkeypatch):
    """Memory to which nobody has written is NaN, not what was there before."""
    for of, name in ((torch.Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
        monkeypatch.setattr(of, name, _filled(getattr(of, name)))


def _filled(make):
    def made(*args, **settings):
        tensor = make(*args, **settings)
        real = tensor.is_floating_point() and not tensor.requires_grad
        return tensor.fill_(torch.nan) if real else tensor

    return made


@pytest.fixture(params=ORDERS, ids=["ascending", "descending", "shuffled"])
def thread_order(request, emulated, unwritten, monkeypatch):
    monkeypatch.setattr(emulation, "thread_order", request.param)


@pytest.fixture
def plant(emulated, unwritten, monkeypatch, tmp_path):
    """Runs another source instead, of which only what is for one dtype is compiled, and quickly."""
    everything = launch.entries

    def planted(text, only="_f32"):
        monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
        monkeypatch.setattr(launch, "text", lambda file: text)
        monkeypatch.setattr(emulation, "_FLAGS", (*emulation._FLAGS, "-O0"))
        monkeypatch.setattr(
            launch, "entries", lambda file: [n for n in everything(file) if n.endswith(only)]
        )

    return planted
