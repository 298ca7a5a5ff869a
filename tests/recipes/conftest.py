import pytest

from tests.processes import ForkedRuns


@pytest.fixture
def forked_runs(monkeypatch):
    """Processes of a sweep's runs are forked: for tests that are not about how these start."""
    monkeypatch.setattr("comera.recipes.launchers.multiprocessing", ForkedRuns())
