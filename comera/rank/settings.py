"""What every method of rank learning is given: checks, and the size that a target allows."""

import math
from collections.abc import Collection
from numbers import Integral
from typing import Any

from comera.nn.module import TensorTrainModule
from comera.shapes import is_number


def check_target(target: Any) -> None:
    """Raise ``ValueError`` for what is no share of a size to end at."""
    if not is_number(target) or not 0 < target <= 1:
        raise ValueError(
            f"target={target!r} must be in (0, 1]: the share of the present size to end at"
        )


def check_steps(name: str, steps: Any, least: int, why: str = "") -> None:
    """Raise ``ValueError`` for what is no number of steps.

    Args:
        name: Name of the setting.
        steps: The value that the user gave.
        least: The fewest there may be.
        why: What the error says besides.
    """
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < least:
        raise ValueError(f"{name}={steps!r} must be a whole number of steps, from {least}{why}")


def target_entries(
    layers: Collection[TensorTrainModule], target: float, start_size: int, min_rank: int
) -> int:
    """Return how many entries a target leaves the cores of some layers.

    Args:
        layers: Whose ranks are learned.
        target: The share of ``start_size`` to end at.
        start_size: Entries of their cores at the start.
        min_rank: Ranks that every bond keeps.

    Raises:
        ValueError: If the layers need more at ``min_rank``.
    """
    allowed = math.floor(target * start_size)
    smallest = sum(
        layer.shape.size_at((min_rank,) * len(layer.ranks))
        for layer in layers
        if 0 not in layer.ranks  # else it has vanished
    )
    if allowed < smallest:
        raise ValueError(
            f"target={target} leaves {allowed} of {start_size} entries, but at "
            f"min_rank={min_rank} the cores need {smallest}: the smallest target is "
            f"{math.ceil(1e4 * smallest / start_size) / 1e4:g}"
        )
    return allowed
