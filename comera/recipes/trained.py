"""A finished run as Python objects: its model, settings, vocabulary and figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comera.data.click_rows import CATEGORIES, ClickRows
from comera.extras import needed_by
from comera.nn.model_size import model_size
from comera.saved.model_folder import load_model
from comera.train.log import read_metrics

with needed_by("load_run()"):
    from comera.recipes.parse import parse_settings, read_yaml
    from comera.recipes.result_file import read_result
    from comera.recipes.run_config import RunConfig
    from comera.recipes.tasks.task_kinds import kind_of

if TYPE_CHECKING:
    import pandas as pd
    from tokenizers import Tokenizer


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """What :func:`load_run` returns; prints itself in a few lines.

    Attributes:
        folder: Folder of the run.
        config: Its settings.
        model: The trained model, in evaluation mode.
        tokenizer: Makes tokens of text and text of tokens, a ``tokenizers.Tokenizer``; None of a
            click predictor.
        categories: Makes inputs of the model of raw rows, by ``encode``; of a click predictor.
        result: What came of it: ``metrics`` of the last evaluation, ``test`` where there is such
            data, ``params``, ``steps``, ``seconds`` and more.
    """

    folder: Path
    config: "RunConfig"
    model: nn.Module
    tokenizer: "Tokenizer | None"
    result: Mapping[str, Any]
    categories: "ClickRows | None" = None

    @property
    def metrics(self) -> "pd.DataFrame":
        """What was logged, a row a step: ``loss``, ``eval/...``, ``lr``, ``size``, ...

        NaN where nothing was; ranks and other values that are no numbers are left out. Of what was
        logged twice at one step the later counts. Needs pandas.
        """
        with needed_by("metrics"):
            import pandas as pd
        rows: dict[int, dict[str, Any]] = {}
        for line in read_metrics(self.folder):
            shown = {
                key: value for key, value in line.items() if isinstance(value, int | float | str)
            }
            rows.setdefault(line["step"], {}).update(shown)
        return pd.DataFrame(list(rows.values())).set_index("step").sort_index()

    def __repr__(self) -> str:
        lines = [
            f"run in {self.folder}",
            f"model: {type(self.model).__name__}, {model_size(self.model).params:,} parameters",
            f"trained: {self.result['steps']:,} steps in {self.result['seconds']:.0f} s",
        ]
        for name, part in (("evaluation", "metrics"), ("test", "test")):
            if found := self.result.get(part):
                figures = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
                lines.append(f"{name}: {figures}")
        return "\n".join(lines)


def load_run(
    folder: str | Path, *, twin: bool = False, device: torch.device | str = "cpu"
) -> TrainedRun:
    """Load what ``comera train`` has left in a folder; the data need not be there any more.

    Args:
        folder: Folder of a finished run, such as ``runs/quickstart``.
        twin: Load the dense twin instead, if one was trained.
        device: Where the model is to be.

    Raises:
        FileNotFoundError: If the folder holds no run, or no twin.
        ValueError: If the run is not finished, or a file is damaged or of a later version.
        MissingPackageError: Without the packages of ``comera[cli]``; an ImportError.

    Example::

        run = comera.load_run("runs/quickstart")
        run.metrics["eval/loss"].dropna().plot()
        tokens = torch.tensor([run.tokenizer.encode("def main():").ids])
    """
    folder = Path(folder).expanduser()
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder} holds no run of comera train: it has no config.yaml")
    config = parse_settings(RunConfig, {**read_yaml(folder / "config.yaml"), "out": str(folder)})
    place = folder / "dense" if twin else folder
    if twin and not place.is_dir():
        raise FileNotFoundError(f"{folder} holds no dense twin: it was trained without twin: true")
    if not (place / "result.json").is_file():
        raise ValueError(
            f"the run in {place} is not finished: comera train {folder} goes on with it"
        )
    result = _result(place)
    with torch.device("meta"):
        dense = kind_of(config).dense_model(config, result["sizes"])
    model = load_model(place, dense, device=device).eval()
    known = place / CATEGORIES
    categories = ClickRows.load(known) if known.is_file() else None
    return TrainedRun(place, config, model, _tokenizer(place), result, categories)


def _result(folder: Path) -> dict[str, Any]:
    found = read_result(folder)
    if "sizes" not in found:
        raise ValueError(
            f"{folder / 'result.json'} does not say how large the model is: it was written by an "
            "earlier version, or by another program"
        )
    return found


def _tokenizer(folder: Path) -> "Tokenizer | None":
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    with needed_by("the vocabulary of a run"):
        from tokenizers import Tokenizer
    try:
        return Tokenizer.from_file(str(path))
    except Exception as problem:  # tokenizers raises no other
        raise ValueError(f"{path} is damaged: {problem}") from None
