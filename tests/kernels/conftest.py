import pytest

from comera.ops.kernels import choose, emulate

ORDERS = (emulate.ASCENDING, emulate.DESCENDING, 7)
"""Of the threads of a block; the last is drawn at random."""


@pytest.fixture
def emulated(monkeypatch):
    """Kernels run on the CPU."""
    if emulate.compiler() is None:
        pytest.skip("no g++, which the emulation of CUDA needs")
    monkeypatch.setattr(choose, "mode", lambda: "emulate")


@pytest.fixture(params=ORDERS, ids=["ascending", "descending", "shuffled"])
def thread_order(request, emulated, monkeypatch):
    monkeypatch.setattr(emulate, "order", request.param)
