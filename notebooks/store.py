"""Run the notebooks and store them with what they show: ``python -m notebooks.store [FILE ...]``.

Stored pictures are what people see who have not installed anything, and what the site shows.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_WIDGET = "application/vnd.jupyter.widget-view+json"


def executed(path: Path, folder: Path, *last: str) -> Any:
    """Return a notebook after it ran in a folder, with cells of the given code at its end.

    The kernel inherits the environment, and finds the package beside the notebooks first.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(code) for code in last]
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    return notebook


def code_digest(notebook: Any) -> str:
    """Return a digest of the code of a notebook, by which stored outputs are known to be of it."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def store(path: Path) -> None:
    """Run a notebook and write it back with its outputs.

    Raises:
        RuntimeError: If it shows widgets, which nobody sees without a kernel.
    """
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(path, Path(folder))
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if _WIDGET in output.get("data", ()):
                raise RuntimeError(
                    f"{path.name}: cell {cell.id} shows a widget; "
                    "store it from an environment without ipywidgets"
                )
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}  # no version, which differs by machine
    notebook.metadata.comera = {"code": code_digest(notebook)}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        store(path)
