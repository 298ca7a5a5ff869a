"""Ways to choose which ranks go, and what does best with each."""

from typing import Literal, NamedTuple, get_args

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
