"""Packages that comera is compared with, or hands work to.

Where one is not installed, its tests are skipped.
"""

import importlib
import sys
import types
import warnings
from importlib.util import find_spec
from types import ModuleType

import pytest
from torch.optim import Optimizer

PACKAGES = {
    "accelerate": "accelerate",
    "came_pytorch": "came-pytorch",
    "galore_torch": "galore-torch",
    "onnxruntime": "onnxruntime",
    "onnxscript": "onnxscript",
    "opacus": "opacus",
    "optuna": "optuna",
    "peft": "peft",
    "pytorch_lightning": "pytorch-lightning",
    "sentence_transformers": "sentence-transformers",
    "stable_baselines3": "stable-baselines3",
    "submitit": "submitit",
    "tltorch": "tensorly-torch",
    "torchao": "torchao",
    "transformers": "transformers",
}
"""What is imported, and what is installed for it: the extra ``peers``."""


def peer(module: str) -> ModuleType:
    """Import a package, or part of one; skip the test if it is not installed.

    An installed package that cannot be imported is an error.
    """
    package = module.split(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{PACKAGES[package]} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _galore() if package == "galore_torch" else importlib.import_module(module)


def _galore() -> ModuleType:
    """Import galore-torch, with a stand-in for bitsandbytes if that is not installed."""
    if "galore_torch" in sys.modules or find_spec("bitsandbytes") is not None:
        return importlib.import_module("galore_torch")
    importlib.import_module("transformers.utils.versions")  # which looks for the real one
    stand_in = {
        name: types.ModuleType(name)
        for name in ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer")
    }
    stand_in["bitsandbytes.optim.optimizer"].Optimizer2State = Optimizer  # type: ignore[attr-defined]
    sys.modules.update(stand_in)
    try:
        return importlib.import_module("galore_torch")
    finally:
        for name in stand_in:
            del sys.modules[name]
