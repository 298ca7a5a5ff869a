"""What the command did when it was started in a way nobody had tried."""

import pytest

from comera.recipes.cli import main
from tests.recipes.test_start import started


def test_ctrl_c_while_torch_is_imported_prints_no_traceback(tmp_path):
    done = started(tmp_path, ["-m", "comera.recipes.cli", "plan"], interrupt="torch")
    assert (done.returncode, done.stdout + done.stderr) == (130, "interrupted\n")


@pytest.mark.slow
def test_python_m_comera_is_the_command(tmp_path):
    done = started(tmp_path, ["-m", "comera", "--help"])
    assert done.stdout.startswith("usage: comera")


def test_processes_of_torchrun_do_not_start_the_same_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["sweep", "sweep.yaml"]) == 1
    assert "started as 2 processes" in capsys.readouterr().err
