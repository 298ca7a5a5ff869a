"""The runs of a sweep as a data frame."""

from pathlib import Path
from typing import TYPE_CHECKING

from comera.extras import needed_by
from comera.train.json_figures import from_json

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS = ("variant", "seed", "params", "steps", "seconds")


def load_sweep(folder: str | Path) -> "pd.DataFrame":
    """Load what ``comera sweep`` has left in a folder, one row a finished run.

    Columns are ``variant``, ``seed``, ``params`` of the whole model after training, ``steps``,
    ``seconds`` in training steps, a column for each figure of the last evaluation, such as
    ``accuracy``, and for each on test data, ``test/accuracy``. ``attrs`` of the frame hold
    ``metric`` and ``reference`` of the sweep. NaN stands where a run has no such figure; there are
    no rows where no run is finished.

    Args:
        folder: Folder of the sweep; that of a single run is read by :func:`~comera.load_run`.

    Raises:
        FileNotFoundError: If the folder holds no figures of a sweep.
        ValueError: If its ``results.json`` is damaged, or another program's.
        MissingPackageError: Without pandas, which ``comera[cli]`` brings; an ImportError.

    Example::

        runs = comera.load_sweep("runs/snli-sweep")
        runs.groupby("variant")["test/accuracy"].agg(["mean", "std"])
    """
    with needed_by("load_sweep()"):
        import pandas as pd
    path = Path(folder).expanduser() / "results.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} holds no figures of a sweep: comera sweep FILE writes {path.name} "
            "there when it ends"
        )
    try:
        facts = from_json(path.read_text(encoding="utf-8"))
        rows = [
            {name: run[name] for name in _ALWAYS}
            | run["metrics"]
            | {f"test/{name}": value for name, value in run.get("test", {}).items()}
            for run in facts["runs"]
        ]
        about = {name: facts[name] for name in ("metric", "reference")}
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} is damaged, or another program's: {problem!r}") from None
    frame = pd.DataFrame(rows, columns=None if rows else _ALWAYS)
    frame.attrs |= about
    return frame
