"""GaLore's state dict: the subspaces and the inner optimizer's state in one, and apart again."""

from typing import Any

from comera.optim.galore_checks import KEYS, OURS


def joined(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Our state dict with the inner optimizer's state beside the subspaces."""
    state = {number: dict(entries) for number, entries in theirs["state"].items()}
    for number, entries in mine["state"].items():
        state.setdefault(number, {}).update(entries)
    return {**mine, "state": state}


def parted(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The inner optimizer's state dict, and what is ours by number of the parameter."""
    theirs: dict[int, dict[str, Any]] = {}
    ours: dict[int, dict[str, Any]] = {}
    for number, entries in state_dict["state"].items():
        for key, value in entries.items():
            (ours if key.startswith(OURS) else theirs).setdefault(number, {})[key] = value
    groups = [
        {key: value for key, value in group.items() if key not in KEYS}
        for group in state_dict["param_groups"]
    ]
    return {"state": theirs, "param_groups": groups}, ours
