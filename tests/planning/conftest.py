import logging

import pytest

from comera.planning import machine
from comera.planning.way_times import load_way_times


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder without profiles, of which nothing is loaded before or after."""
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    for load in (machine.load_machine, load_way_times):
        load.cache_clear()
    yield tmp_path
    for load in (machine.load_machine, load_way_times):
        load.cache_clear()


@pytest.fixture
def said(caplog):
    """The messages that were logged."""
    caplog.set_level(logging.INFO, logger="comera")
    return lambda: [record.getMessage() for record in caplog.records]
