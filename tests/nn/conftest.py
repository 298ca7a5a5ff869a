import pytest

from comera.nn import forward_sharing


@pytest.fixture
def two_are_enough(monkeypatch):
    """Have the few layers of a model be contracted together on a CPU, as many are."""
    monkeypatch.setattr(forward_sharing, "_FEWEST_ON_CPU", 2)
