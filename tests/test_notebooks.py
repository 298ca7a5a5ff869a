"""Every notebook runs from top to bottom in a fresh folder, and is stored without output."""

import os
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMIT_SECONDS = 60
"""Of one processor: a minute of a reader's time on a machine with nothing else to do, of which a
busy one that runs the tests may need several."""
SPENT = "import time; print(time.process_time())"


def test_notebooks_are_found():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert not cell.metadata, f"cell {cell.id} carries metadata"
        if cell.cell_type == "code":
            assert not cell.outputs, f"cell {cell.id} is stored with outputs"
            assert cell.execution_count is None, f"cell {cell.id} is stored with a count"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_within_a_minute_without_warnings(path, tmp_path, monkeypatch):
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    # The kernel inherits the environment; it must find this package from its temporary folder.
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several wait for each other in processor time
    here = str(path.parents[1])
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{inherited}" if inherited else here)
    folder = tmp_path / "work"
    folder.mkdir()

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    notebook.cells.append(nbformat.v4.new_code_cell(SPENT))
    client.execute()
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
    assert seconds < LIMIT_SECONDS, f"{path.name} took {seconds:.0f} s of a processor"


def test_this_file_is_collected_without_what_runs_notebooks(monkeypatch):
    for name in ("nbformat", "nbclient"):
        monkeypatch.setitem(sys.modules, name, None)
    exec(compile(Path(__file__).read_text(), __file__, "exec"), {"__file__": __file__})
