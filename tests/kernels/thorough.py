"""Choose how much tests of kernels look at: a part, or with COMERA_ALL_KERNELS=1 everything.

Kernels seldom change, and to compile each with each bug and for each architecture takes minutes:
``make kernels`` does that.
"""

import os
from collections.abc import Iterable

ALL = bool(os.environ.get("COMERA_ALL_KERNELS"))


def some(cases: Iterable) -> list:
    """Return every fourth of cases that differ little."""
    return list(cases)[:: 1 if ALL else 4]
