"""Packages that ``pip install comera`` does not bring, and what to install where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

_EXTRAS = {
    "accelerate": "hf",
    "huggingface_hub": "hf",
    "jinja2": "cli",
    "jsonargparse": "cli",
    "lightning": "lightning",
    "matplotlib": "cli",
    "onnxscript": "onnx",
    "optuna": "search",
    "pandas": "cli",
    "plotly": "notebooks",
    "pytorch_lightning": "lightning",
    "ray": "ray",
    "submitit": "submitit",
    "tensorboard": "cli",
    "tokenizers": "cli",
    "torchao": "quantize",
    "transformers": "hf",
    "yaml": "cli",
}
"""What is imported, and the extra that brings it."""


class MissingPackageError(ModuleNotFoundError):
    """A package that only some parts need is not installed; says how to install it."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Import optional packages inside; one that is missing is named together with its extra.

    Args:
        what: What cannot be had without them, as a sentence would begin: ``to_pandas()``.

    Raises:
        MissingPackageError: If one is not installed. Anything else that an import raises passes.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        name = (missing.name or "").split(".")[0]
        if name not in _EXTRAS:
            raise
        raise MissingPackageError(
            f"{what} needs {name}: pip install 'comera[{_EXTRAS[name]}]'", name=missing.name
        ) from None
