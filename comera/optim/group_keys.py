"""Keys of parameter groups that are no settings of an optimizer, and those of one optimizer."""

from collections.abc import Collection

COMMON_KEYS = frozenset({"params", "name", "param_names", "initial_lr", "rate_scale"})
"""Keys of torch, of its schedulers and of :func:`~comera.param_groups`, with any optimizer."""


def made_for(unknown: Collection[str]) -> str:
    """Say, to end an error about unknown keys, for which optimizer such groups are made."""
    return "; groups with 'muon' are made for comera.MuonAdamW" if "muon" in unknown else ""
