"""Read and write budgets: shares of the parameters, or their bytes with a unit."""

import math
import re

_UNITS = {
    "k": 1000, "K": 1000, "M": 1000**2, "G": 1000**3,
    "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3,
}  # fmt: skip


def parse_budget(budget: float | str) -> float | int:
    """Return a budget as a share (float), or as bytes (int) where it is text with a unit.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMG]|[KMG]i)B", budget)
        if found and float(found[1]) > 0:
            return int(float(found[1]) * _UNITS[found[2]])
    elif isinstance(budget, float) and 0 < budget < 1:
        return budget
    raise ValueError(
        f"budget={budget!r} must be between 0 and 1, the share of parameters kept, or the bytes of "
        f'all parameters with a unit, as "60MB" or "60MiB"{percent_meant(budget)}'
    )


def percent_meant(budget: object) -> str:
    """Return words to add to an error where a number or text looks like so many percent."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", str(budget))
    if isinstance(budget, bool) or not found or not 2 <= float(found[1]) < 100:
        return ""
    return f"; {found[1]} % is budget={float(found[1]) / 100:.6g}"


def smallest_budget(least: int, total: int, in_bytes: bool) -> str:
    """Write the smallest budget that leaves ``least`` of ``total`` parameters, or bytes of them."""
    if in_bytes:
        return f'budget="{math.ceil(least / 100) / 10:.1f}kB"'
    return f"budget={math.ceil(1e4 * least / total) / 1e4}"
