"""Write a trained model in a form that runs where comera is not."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comera.extras import needed_by
from comera.files import replacing
from comera.nn.convert import densify_
from comera.recipes.tasks.task_kinds import kind_of
from comera.recipes.trained import TrainedRun
from comera.serving.to_plain import to_plain_

_FORMS = {
    ".pt2": "a program of torch.export",
    ".onnx": "a graph of ONNX",
    ".safetensors": "the weights of the dense model",
}


def export(run: TrainedRun, path: Path) -> str:
    """Write the model of a run to a file; its suffix says in which form.

    ``.pt2`` and ``.onnx`` hold the compressed model, its cores contracted, and take any number of
    rows; ``.safetensors`` holds weights of the dense model, with the names that it has.

    Returns:
        What was written, in words.

    Raises:
        ValueError: If the suffix is another one.
        MissingPackageError: If ONNX is asked for and not installed.
    """
    if path.suffix not in _FORMS:
        known = ", ".join(f"{suffix} ({what})" for suffix, what in _FORMS.items())
        raise ValueError(f"{path} must end in one of {known}")
    if path.suffix == ".safetensors":
        dense = densify_(run.model).state_dict()
        with replacing(path) as temporary:
            save_file({name: value.contiguous() for name, value in dense.items()}, temporary)
    else:
        model = _Positional(to_plain_(run.model)).eval()
        inputs = kind_of(run.config).example_inputs(run.config, run.result["sizes"])
        shapes = (tuple(map(_open_sizes, inputs)),)
        if path.suffix == ".pt2":
            program = torch.export.export(model, inputs, dynamic_shapes=shapes)
            written = io.BytesIO()  # a path would have to end in .pt2, and the temporary's does not
            torch.export.save(program, written)
            with replacing(path) as temporary:
                temporary.write_bytes(written.getbuffer())
        else:
            _to_onnx(model, inputs, shapes, path)
    size = path.stat().st_size
    return f"wrote {_FORMS[path.suffix]} to {path}, {size:,} bytes"


def _open_sizes(example: Tensor) -> dict[int, Any]:
    """Return which sizes of an input may be others; one alone, as of columns, is always that."""
    auto = torch.export.Dim.AUTO
    return {k: auto for k, size in enumerate(example.shape) if size > 1}


class _Positional(nn.Module):
    """Takes tensors alone; text may have padding in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)


def _to_onnx(model: nn.Module, inputs: tuple[Tensor, ...], shapes: Any, path: Path) -> None:
    with needed_by("a file of ONNX"):
        import onnxscript  # noqa: F401  torch's own message does not say how to install it
    with _without_progress():
        program = torch.onnx.export(
            model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        assert program is not None, "of the exporter by dynamo"
        with replacing(path) as temporary:
            program.save(temporary)


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    """Run what is inside without what torch's exporter to ONNX tells of each of its passes.

    Of warnings only two are left out, which are about torch itself and not about the model.
    """
    chatty = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [log.level for log in chatty]
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")
    for log in chatty:
        log.setLevel(logging.WARNING)
    registry.addFilter(_is_of_use)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            yield
    finally:
        registry.removeFilter(_is_of_use)
        for log, level in zip(chatty, levels, strict=True):
            log.setLevel(level)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Tell whether it says more than that torchvision, which no model here needs, is not there."""
    return not record.getMessage().startswith("torchvision is not installed")
