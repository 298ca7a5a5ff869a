import pytest
import torch


@pytest.fixture(autouse=True)
def _settings_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
