"""The text of the kernels."""

import functools
import re
from pathlib import Path

COMMON = "common.cuh"
EMULATION = "emulation.h"

_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


def folder() -> Path:
    """Where the sources are: beside the package when installed, above it in a checkout.

    Raises:
        FileNotFoundError: If they are at neither place.
    """
    package = Path(__file__).parents[2]
    places = [package / "_kernels", package.parent / "kernels"]
    for place in places:
        if (place / COMMON).is_file():
            return place
    shown = " nor in ".join(map(str, places))
    raise FileNotFoundError(f"the sources of comera's kernels are neither in {shown}: reinstall it")


def files() -> list[str]:
    """Names of the sources, without their suffix."""
    return sorted(path.stem for path in folder().glob("*.cu"))


@functools.cache
def text(file: str) -> str:
    """One source with what it includes pasted in, so that no compiler needs a folder to look in."""
    common = (folder() / COMMON).read_text().replace("#pragma once\n", "")
    return (folder() / f"{file}.cu").read_text().replace(f'#include "{COMMON}"\n', common)


def entries(file: str) -> list[str]:
    """The functions of a source that can be launched."""
    return _ENTRY.findall(text(file))
