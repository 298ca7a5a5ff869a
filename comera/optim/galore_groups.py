"""Parameter groups as GaLore and the optimizer inside of it have them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from comera.optim.galore_checks import DEFAULTS


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """As torch has them: parameters without a group are one together."""
    given = list(params)
    if not any(isinstance(one, dict) for one in given):
        return [{"params": given}]
    groups = [one if isinstance(one, dict) else {"params": [one]} for one in given]
    return [{**group, "params": as_list(group["params"])} for group in groups]


def as_list(params: Any) -> list[Tensor]:
    """The parameters of one group."""
    return [params] if isinstance(params, Tensor) else list(params)


def replaced(params: Iterable[Any], by: Callable[[Tensor], Tensor]) -> list[Any]:
    """The parameters of one group, each replaced; of ``(name, parameter)`` the name stays."""
    return [(one[0], by(one[1])) if isinstance(one, tuple) else by(one) for one in params]


def merged(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A group with all settings: the inner optimizer's, ours, and what the user said."""
    return {**theirs, **(DEFAULTS if "rank" in mine else {}), **mine}
