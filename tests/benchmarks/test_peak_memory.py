import json
import subprocess
import sys

import pytest

from benchmarks import memory, peak
from tests.benchmarks.calling import MODEL, bench, results


def in_this_process(words, **_):
    """Instead of a fresh one, which takes seconds to import everything."""
    if peak.Job.from_json(words[-1]).batch == 3:
        return subprocess.CompletedProcess(words, -9, "", "Killed")
    text = json.dumps(peak.peak(peak.Job.from_json(words[-1])))
    return subprocess.CompletedProcess(words, 0, text, "")


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="memory is read from /proc, as Linux has it"
)


@linux
def test_memory_weighs_models_layers_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory.subprocess, "run", in_this_process)
    out = tmp_path / "out.json"
    assert bench("memory", *MODEL, "--batch", "1", "2", f"--json={out}") == 0
    assert [row["at"] for row in results(out)[0]["rows"]] == ["batch 1", "batch 2"]
    layer = ["--layer", "--shape", "48", "32", "--rank", "4", "--tokens", "20"]
    assert bench("memory", *layer, f"--json={out}") == 0
    assert results(out)[0]["rows"][0]["at"] == "20 tokens"
    table = ["--table", "--shape", "60", "16", "--rank", "4", "--tokens", "24"]
    assert bench("memory", *table, f"--json={out}") == 0
    assert set(results(out)[0]["rows"][0]) == {"at", "plain", "comera"}
    capsys.readouterr()
    assert bench("memory", *MODEL, "--batch", "3", "1", f"--json={out}") == 1
    assert results(out)[0]["rows"][0]["dense"] is None
    assert "status -9, most likely for lack of memory: Killed" in capsys.readouterr().out


@pytest.mark.slow
@linux
def test_memory_is_measured_in_a_process_of_its_own():
    job = peak.Job("dense", "cpu", 1, True, layer=peak.LayerShape((256, 512), 4, 2048))
    words = [sys.executable, "-m", "benchmarks.peak", job.to_json()]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    activations = 4 * 2048 * (256 + 512 + 256)
    assert found["parameters"] == 256 * 512 + 512
    assert activations < found["peak"] < 10 * activations


def test_memory_says_where_it_cannot_be_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peak, "_STATUS", tmp_path / "status")
    assert bench("memory", *MODEL) == 1
    assert "device='cpu' needs Linux" in capsys.readouterr().err
