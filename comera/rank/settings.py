"""Settings of rank learning: what they may be, and what does best with each way to choose ranks."""

import math
from collections.abc import Collection
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

from comera.nn.module import TensorTrainModule
from comera.rank.prune import check_spare
from comera.shapes import is_number
from comera.surgery.truncate import check_min_rank

Choice = Literal["objective", "sensitivity"]


class Settings(NamedTuple):
    """What does best with a way of choosing ranks; named as in :class:`~comera.TwoStage`."""

    gamma: float
    canonical: bool
    spare: float


DEFAULTS: dict[Choice, Settings] = {
    "objective": Settings(gamma=0.01, canonical=False, spare=0.0),
    "sensitivity": Settings(gamma=0.0, canonical=True, spare=0.5),
}


def settled_choice(choose: Choice | None, late: float | None, gamma: float | None) -> Choice:
    """The choice that is meant: by default the objective where it is asked to press on the gates.

    Args:
        choose: As given.
        late: Length of the late stage, in whatever unit.
        gamma: Weight of the size in the early stage, as given.

    Raises:
        ValueError: If there is no such choice.
    """
    if choose is None:
        return "objective" if late or gamma else "sensitivity"
    if choose not in get_args(Choice):
        raise ValueError(f"choose={choose!r} must be one of {get_args(Choice)}")
    return choose


def check_settings(
    *, target: Any, min_rank: Any, canonical: Any, spare: Any, **weights: Any
) -> None:
    """Of :class:`~comera.TwoStage`, with its defaults filled in; the rest are weights of terms."""
    if not is_number(target) or not 0 < target <= 1:
        raise ValueError(
            f"target={target!r} must be in (0, 1]: the share of the present size to end at"
        )
    check_min_rank(min_rank)
    check_spare(spare)
    if not isinstance(canonical, bool):
        raise ValueError(f"canonical={canonical!r} must be True, False or None for what does best")
    for name, weight in weights.items():
        if not is_number(weight) or not weight >= 0:
            raise ValueError(f"{name}={weight!r} must be a number of at least 0")


def check_steps(name: str, steps: Any) -> None:
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"{name}={steps!r} must be a whole number of steps, from 0")


def check_stages(choose: Choice, early: int, late: int, gamma: float, canonical: bool) -> None:
    """Of :class:`~comera.TwoStage`: what goes together, once each is known to be sound."""
    if choose == "sensitivity":
        if late or gamma:
            raise ValueError(
                f'late_steps={late} and gamma={gamma} must be 0 with choose="sensitivity": '
                "nothing presses on the gates, ranks are cut when the early stage ends"
            )
        if early < 1:
            raise ValueError(
                f'early_steps={early} must be at least 1 with choose="sensitivity": they '
                "tell what a rank is worth"
            )
    if canonical and not early:
        raise ValueError(
            "canonical=True needs early_steps, after which ranks are brought into canonical "
            "form; call comera.canonicalize_(model) to do so before training"
        )


def target_entries(
    layers: Collection[TensorTrainModule], target: float, start_size: int, min_rank: int
) -> int:
    """Entries that the target allows.

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
