"""Notebooks run from top to bottom in a fresh folder, and are stored with what they showed."""

import re
import sys
from pathlib import Path

import pytest

from notebooks.store import code_digest, executed

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
NEEDS = {"7-a-model-of-transformers": "transformers", "8-before-training": "transformers"}
LIMIT_SECONDS = 60
"""Of one processor: a minute of a reader's time on a machine with nothing else to do, of which a
busy one that runs the tests may need several."""
LIMIT_BYTES = 400_000
SPENT = "import time; print(time.process_time())"
SHOWN = {"image/png", "text/html", "text/plain"}
"""What viewers show that run no code, such as those of repositories."""
PLOTLY = "application/vnd.plotly.v1+json"
REPORT = """
import comera, torch
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
comera.tensorize_(model, comera.TTConfig(rank=8, init="orthogonal"))
report = comera.compression_report(model)
"""

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook in a folder of its own; the kernel inherits the environment."""
    pytest.importorskip("nbclient")
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several wait for each other in processor time
    folder = tmp_path / "work"
    folder.mkdir()
    return lambda path, *last: executed(path, folder, *last)


def text_of(output):
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def titles_of(output):
    """Titles of the tables of reports in an output, whether drawn as text or as HTML."""
    drawn = re.findall(r"^(.+)\n┏", text_of(output), re.M)
    drawn += re.findall(r"<caption>(.*?)</caption>", output.get("data", {}).get("text/html", ""))
    return {re.sub(r" \(… is .*\)$", "", title.strip()) for title in drawn}


def shown_twice(notebook):
    """Titles that more than one output of a cell has, by cell."""
    found = {}
    for cell in notebook.cells:
        titles = [title for output in cell.get("outputs", ()) for title in titles_of(output)]
        if len(set(titles)) < len(titles):
            found[cell.id] = titles
    return found


def test_notebooks_are_found():
    assert len(NOTEBOOKS) >= 7
    assert [path.name.split("-")[0] for path in NOTEBOOKS] == [
        str(number) for number in range(1, len(NOTEBOOKS) + 1)
    ]


@each
def test_a_notebook_is_stored_with_its_outputs(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == {
        "comera": {"code": code_digest(notebook)},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }, "its code has changed since it ran: `make notebooks` runs it again"
    assert path.stat().st_size < LIMIT_BYTES
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream", "display_data", "execute_result",
    }  # fmt: skip
    assert not [text_of(output) for output in outputs if output.get("name") == "stderr"]
    kinds = [{*output.data} for output in outputs if "data" in output]
    assert all(each <= {*SHOWN, PLOTLY} for each in kinds)
    assert any("image/png" in each for each in kinds)
    assert all("image/png" in each for each in kinds if PLOTLY in each), "else viewers show nothing"
    assert not shown_twice(notebook)


@pytest.mark.slow
@each
def test_a_notebook_runs_within_a_minute_without_warnings(path, run):
    pytest.importorskip(NEEDS.get(path.stem, "torch"))
    notebook = run(path, SPENT)
    seconds = float(notebook.cells.pop().outputs[0].text)

    outputs = [
        (cell.id, output)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert outputs
    errors = [(name, output.evalue) for name, output in outputs if output.output_type == "error"]
    assert not errors
    said = [output.text for _, output in outputs if output.get("name") == "stderr"]
    assert not said, f"{path.name} warns its reader"
    assert not shown_twice(notebook)
    assert seconds < LIMIT_SECONDS, f"{path.name} took {seconds:.0f} s of a processor"


@pytest.mark.slow
def test_a_report_shows_once_and_its_text_has_its_table(run, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    cells = ["text = str(report)", "report", "comera.plan(model, tokens=512)", "print(text)"]
    code = [nbformat.v4.new_code_cell(source) for source in (REPORT, *cells)]
    nbformat.write(nbformat.v4.new_notebook(cells=code), tmp_path / "report.ipynb")
    silent, shown, planned, printed = (
        cell.outputs for cell in run(tmp_path / "report.ipynb").cells[1:]
    )
    assert silent == []
    for outputs in (shown, planned):
        assert [output.output_type for output in outputs] == ["execute_result"]
        assert titles_of(outputs[0])
        assert "<table>" in outputs[0].data["text/html"]
    assert [output.output_type for output in printed] == ["stream"]
    assert printed[0].text.rstrip("\n") == shown[0].data["text/plain"]
    assert "┃" in printed[0].text


def test_this_file_is_collected_without_what_runs_notebooks(monkeypatch):
    for name in ("nbformat", "nbclient"):
        monkeypatch.setitem(sys.modules, name, None)
    exec(compile(Path(__file__).read_text(), __file__, "exec"), {"__file__": __file__})
