"""The states of all random generators that a training step may draw from."""

import random
from typing import Any

import numpy as np
import torch


def host_random_state() -> dict[str, Any]:
    """Those of torch on the CPU, Python and NumPy, as tensors and plain values."""
    state: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, position, has_gauss, gauss = state
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, gauss),
    }


def set_host_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`host_random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002


def random_state() -> dict[str, Any]:
    """Those of the host and of all GPUs."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**host_random_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` returned, there or on a machine without a GPU."""
    set_host_random_state(state)
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
