"""Load finished runs and sweeps as Python objects."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comera.data.click_files import ClickRows
from comera.extras import needed_by, without_remarks
from comera.files import replacing
from comera.nn.convert import densify_
from comera.params import model_size
from comera.planning.printing import data_frame
from comera.saved.model_folder import load_model
from comera.serving.freeze import to_plain_
from comera.train.log import from_json, read_metrics

if TYPE_CHECKING:
    import pandas as pd


with needed_by("load_run()"):
    from tokenizers import Tokenizer

    from comera.recipes.parse import parse_settings, read_yaml
    from comera.recipes.run_config import RunConfig
    from comera.recipes.run_folder import read_result
    from comera.recipes.tasks.task import task_of


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A finished run.

    Attributes:
        folder: Folder of the run.
        config: Settings of the run.
        model: The trained model, in evaluation mode.
        vocabulary: Its ``tokenizer`` or ``categories``.
        result: Its figures: ``metrics`` of the last evaluation, ``test`` where there is such data,
            ``params``, ``steps``, ``seconds`` and more.
    """

    folder: Path
    config: RunConfig
    model: nn.Module
    vocabulary: Tokenizer | ClickRows
    result: Mapping[str, Any]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The ``tokenizers.Tokenizer`` of text; None of a click predictor."""
        return self.vocabulary if isinstance(self.vocabulary, Tokenizer) else None

    @property
    def categories(self) -> ClickRows | None:
        """Encoder of raw rows as inputs of a click predictor; None of text."""
        return self.vocabulary if isinstance(self.vocabulary, ClickRows) else None

    @property
    def metrics(self) -> "pd.DataFrame":
        """The log of training, a row for each step: ``loss``, ``eval/...``, ``lr``, ``size``, ...

        NaN if nothing was logged. Ranks and other nested values are left out. Needs pandas.
        """
        lines = [
            {key: value for key, value in line.items() if isinstance(value, int | float | str)}
            for line in read_metrics(self.folder)
        ]
        return data_frame(lines, "metrics").groupby("step").last()

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
    """Load a run that ``comera train`` finished, without its data.

    Args:
        folder: Folder of a finished run, such as ``runs/quickstart``.
        twin: Load the dense twin instead, if one was trained.
        device: Device of the model.

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
    result = read_result(place)
    if "sizes" not in result:
        raise ValueError(f"{place / 'result.json'} does not say how large the model is")
    task = task_of(config)
    task.load_vocabulary(place)
    # Buffers that a state dict leaves out, as transformers', are drawn where the model is made.
    with torch.device("cpu" if config.model.make else "meta"):
        dense = task.dense_model(result["sizes"])
    model = load_model(place, dense, device=device).eval()
    return TrainedRun(place, config, model, task.vocabulary, result)


def predictions(run: TrainedRun, lines: Iterable[str], new_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each line, or an ``error`` if the form of a line is wrong.

    Lines are ``premise<TAB>hypothesis`` for sentence pairs, text with ``[MASK]`` in it for masked
    words, the beginning of a text for a causal model, which adds ``new_tokens``, or a row of a
    click log as a JSON object without its label.
    """
    task = task_of(run.config)
    task.vocabulary = run.vocabulary
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        try:
            line.encode()
            with torch.no_grad():
                yield task.predict(run.model, line, new_tokens)
        except UnicodeEncodeError:  # bytes that were no text, read as surrogates
            said = line.encode(errors="surrogateescape")
            yield {"error": f"line {number}: {said!r} is no text in UTF-8"}
        except ValueError as problem:
            yield {"error": f"line {number}: {problem}"}


_FORMS = {
    ".pt2": "a program of torch.export",
    ".onnx": "a graph of ONNX",
    ".safetensors": "the weights of the dense model",
}


def export(run: TrainedRun, path: Path) -> str:
    """Write the model of a run to a file, in the format of its suffix.

    ``.pt2`` and ``.onnx`` hold the compressed model with contracted cores, for any number of rows;
    ``.safetensors`` holds the weights of the dense model by name. Returns a sentence about the
    file. Raises ``ValueError`` for another suffix, and ``MissingPackageError`` if ONNX is needed
    and missing.
    """
    if path.suffix not in _FORMS:
        known = ", ".join(f"{suffix} ({form})" for suffix, form in _FORMS.items())
        raise ValueError(f"{path} must end in one of {known}")
    if path.suffix == ".safetensors":
        dense = densify_(run.model).state_dict()
        with replacing(path) as temporary:
            save_file({name: value.contiguous() for name, value in dense.items()}, temporary)
    else:
        model = _Positional(to_plain_(run.model)).eval()
        task = task_of(run.config)
        batch = task.drawn_batch(2, run.result["sizes"])
        inputs = tuple(each for name in task.inputs if isinstance(each := batch[name], Tensor))
        auto = torch.export.Dim.AUTO  # one alone, as of columns, is always that
        sizes = [{k: auto for k, n in enumerate(each.shape) if n > 1} for each in inputs]
        shapes = (tuple(sizes),)
        if path.suffix == ".pt2":
            program = torch.export.export(model, inputs, dynamic_shapes=shapes)
            # a path would have to end in .pt2, and the temporary's does not
            with replacing(path) as temporary, temporary.open("wb") as file:
                torch.export.save(program, file)
        else:
            _to_onnx(model, inputs, shapes, path)
    return f"wrote {_FORMS[path.suffix]} to {path}, {path.stat().st_size:,} bytes"


class _Positional(nn.Module):
    """A model that takes only its tensor inputs, by position; ``padded`` keeps its default."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)


_CHATTY = ("onnxscript", "onnx_ir", "torch.onnx._internal.exporter._registration")
"""Loggers of progress, and of packages that no model here needs, during an export to ONNX."""


def _to_onnx(model: nn.Module, inputs: tuple[Tensor, ...], shapes: Any, path: Path) -> None:
    with needed_by("a file of ONNX"):
        import onnxscript  # noqa: F401  torch's own message does not say how to install it
    with contextlib.ExitStack() as quiet:
        for name in _CHATTY:
            quiet.enter_context(without_remarks(name))
        quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        program = torch.onnx.export(
            model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        assert program is not None, "of the exporter by dynamo"
        with replacing(path) as temporary:
            program.save(temporary)


_ALWAYS = ("variant", "seed", "params", "steps", "seconds")


def load_sweep(folder: str | Path) -> "pd.DataFrame":
    """Load the figures of a sweep as a data frame, with a row for each finished run.

    Columns are ``variant``, ``seed``, ``params`` of the whole model after training, ``steps``,
    ``seconds`` in training steps, and the figures of the last evaluation, such as ``accuracy``, and
    on test data, such as ``test/accuracy``; NaN if a run has no such figure. ``attrs`` of the frame
    hold ``metric`` and ``reference`` of the sweep.

    Args:
        folder: Folder of the sweep; for a single run use :func:`~comera.load_run`.

    Raises:
        FileNotFoundError: If the folder holds no figures of a sweep.
        ValueError: If ``results.json`` is damaged, or from another program.
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
