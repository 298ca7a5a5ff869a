"""Save and load measured times of the ways (implementations) of operators on a GPU.

``comera calibrate`` saves the times in a JSON file for each device and version of torch. Without it
a GPU uses the times of one H100, in ``h100_times.txt``. On a CPU operators try their ways in the
order in which they list them.
"""

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from comera.files import write_text
from comera.planning.machine import profile_path

log = logging.getLogger("comera")

_FORMAT = 1
_EVEN = 1.05
"""Times whose ratio is below this are even."""

Size = int | str
"""A number, for which the nearest measured one counts, or a word, which must be equal."""


@dataclass(frozen=True)
class Timing:
    """Times of one group of operators at ``sizes``: each way's ``seconds`` for both passes.

    ``captured`` is whether they were measured in a CUDA graph rather than in eager mode.
    """

    group: str
    dtype: str
    captured: bool
    sizes: tuple[Size, ...]
    seconds: Mapping[str, float]

    @property
    def case(self) -> tuple[object, ...]:
        """Key of the measurement; a later measurement with the same key replaces it."""
        return self.group, self.dtype, self.captured, self.sizes

    @property
    def fastest(self) -> str:
        """The faster way, ``"kernel"`` or ``"torch"``; the kernel if both take about as long."""
        kernel, torch = (self.seconds.get(name, math.inf) for name in ("kernel", "torch"))
        return "kernel" if kernel <= _EVEN * torch else "torch"


@dataclass(frozen=True)
class WayTimes:
    """All known ``timings`` of a device, one for each case; ``origin`` says where they come from.

    ``measured`` is whether they were measured on this device.
    """

    origin: str
    timings: tuple[Timing, ...] = ()
    measured: bool = False

    def nearest(
        self, group: str, dtype: str, captured: bool, sizes: Sequence[Size]
    ) -> Timing | None:
        """Return the timing of nearest sizes, at need with the other ``captured``; or None."""
        alike = [
            (timing.captured != captured, distance, timing)
            for timing in self.timings
            if timing.group == group and timing.dtype == dtype
            if (distance := _distance(timing.sizes, sizes)) is not None
        ]
        return min(alike, key=lambda each: each[:2])[2] if alike else None


def _distance(measured: Sequence[Size], asked: Sequence[Size]) -> float | None:
    """Return the sum of the sizes' log-ratios; None if the words among the sizes differ."""
    if len(measured) != len(asked):
        return None
    total = 0.0
    for one, other in zip(measured, asked, strict=True):
        if isinstance(one, int) and isinstance(other, int):
            total += abs(math.log2(max(1, one) / max(1, other)))
        elif one != other:
            return None
    return total


_H100 = Path(__file__).with_name("h100_times.txt")
"""As ``comera calibrate`` describes them on an H100 80GB HBM3 with torch 2.11, on 2026-11-26."""


def _timing(line: str) -> Timing:
    """Parse a line that ``comera calibrate`` prints."""
    what, ways = line.split(": ")
    case, dtype, *captured = what.split(", ")
    group, _, sizes = case.partition(" ")
    times = (way.split() for way in ways.split(", "))
    return Timing(
        group, dtype, bool(captured),
        tuple(int(size) if size.isdigit() else size for size in sizes.split(" x ")),
        {name: 1e-6 * float(microseconds) for name, microseconds, _ in times},
    )  # fmt: skip


BUILT_IN = WayTimes(
    "built-in, of an H100 80GB HBM3, torch 2.11, 2026-11-26: never measured here",
    tuple(map(_timing, _H100.read_text(encoding="utf-8").splitlines())),
)
NONE = WayTimes("built-in order: never measured here")


@dataclass(frozen=True)
class Setting:
    """Device and versions for which times are valid; ``kind`` is ``"cpu"`` or ``"cuda"``.

    ``kernels`` is the digest of the sources of the kernels, empty on a CPU.
    """

    kind: str
    name: str
    torch: str
    kernels: str

    @property
    def path(self) -> Path:
        return profile_path(self.kind, self.name, None, f"ways torch {self.torch}")


def save_way_times(setting: Setting, timings: Sequence[Timing], date: str) -> Path:
    """Write times where :func:`load_way_times` finds them, and return the path.

    Saved times of the same setting stay, except for cases that are measured again.
    """
    known = load_way_times(setting)
    kept = {timing.case: timing for timing in (known.timings if known.measured else ())}
    kept |= {timing.case: timing for timing in timings}
    content = {
        "format": _FORMAT,
        **asdict(setting),
        "date": date,
        "timings": [asdict(timing) for timing in kept.values()],
    }
    write_text(setting.path, json.dumps(content, indent=1) + "\n")
    load_way_times.cache_clear()
    return setting.path


@functools.cache  # read once; a file that cannot be used is logged once
def load_way_times(setting: Setting) -> WayTimes:
    """Load the saved times of a device, or built-in times; log a file that cannot be used."""
    default = BUILT_IN if setting.kind == "cuda" else NONE
    try:
        content = json.loads(setting.path.read_text())
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        for name, value in asdict(setting).items():
            if content.get(name) != value:
                raise ValueError(f"it is of {name} {content.get(name)!r}, this is {value!r}")
        timings = tuple(
            Timing(**{**entry, "sizes": tuple(entry["sizes"])}) for entry in content["timings"]
        )
        return WayTimes(f"measured here on {content['date']}", timings, measured=True)
    except FileNotFoundError:
        return default
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        log.warning(
            "the times of operators in %s cannot be used (%s): %s; run `comera calibrate "
            "--device %s`",
            setting.path, problem, default.origin, setting.kind,
        )  # fmt: skip
        return default
