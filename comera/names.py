"""Names of modules in a sentence."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 6) -> str:
    """List the first ``most`` names in words, and say how many more there are."""
    shown = ", ".join(name or "the model itself" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
