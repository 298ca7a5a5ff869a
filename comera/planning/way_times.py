"""Save and load measured times of the ways (implementations) of operators on a GPU.

``comera calibrate`` saves the times in a JSON file for each device and version of torch. Without it
a GPU uses the times of one H100 below (``docs/benchmarks/h100-operators.md``). On a CPU operators
try their ways in the order in which they list them.
"""

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comera.files import replacing
from comera.planning.machine import profile_path

log = logging.getLogger("comera")

_FORMAT = 1
_EVEN = 1.05
"""Times whose ratio is below this are even: the way that is listed first is taken."""

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

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError(f"{self.group} {self.sizes} has no times")
        for name, value in self.seconds.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of {self.group} takes {value!r} s, which is no time")

    @property
    def case(self) -> tuple[object, ...]:
        """Key of the measurement; a later measurement with the same key replaces it."""
        return self.group, self.dtype, self.captured, self.sizes

    def order(self, names: Sequence[str]) -> list[str]:
        """Return the names that have times, fastest first; near ties stay in the given order."""
        left, found = [name for name in names if name in self.seconds], list[str]()
        while left:
            enough = _EVEN * min(self.seconds[name] for name in left)
            found.append(next(name for name in left if self.seconds[name] <= enough))
            left.remove(found[-1])
        return found


@dataclass(frozen=True)
class WayTimes:
    """All known ``timings`` of a device, one for each case; ``origin`` says where they come from.

    ``measured`` is whether they were measured on this device. ``least`` has, by group, the sizes
    below which no timing applies.
    """

    origin: str
    timings: tuple[Timing, ...] = ()
    measured: bool = False
    least: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def nearest(
        self, group: str, dtype: str, captured: bool, sizes: Sequence[Size]
    ) -> Timing | None:
        """Return the timing of nearest sizes, at need with the other ``captured``; or None."""
        least = self.least.get(group, ())
        if any(isinstance(n, int) and n < low for n, low in zip(sizes, least, strict=False)):
            return None
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


_MICROSECONDS: tuple[tuple[str, str, tuple[Size, ...], dict[str, float]], ...] = (
    # layers, rank; dtype of the factors that are made, of float32 cores
    ("contract_cores", "float32", (36, 30), {"kernel": 162, "torch": 584}),
    ("contract_cores", "bfloat16", (36, 30), {"kernel": 151, "torch": 614}),
    ("contract_cores", "bfloat16", (36, 31), {"kernel": 154, "torch": 673}),
    # rows, widths in and hidden, rank
    ("feed_forward", "bfloat16", (1024, 768, 3072, 32), {"kernel": 77, "torch": 95}),
    ("feed_forward", "bfloat16", (4096, 768, 3072, 32), {"kernel": 118, "torch": 196}),
    ("feed_forward", "bfloat16", (16384, 768, 3072, 32), {"kernel": 318, "torch": 659}),
    ("feed_forward", "bfloat16", (4096, 4096, 11008, 32), {"kernel": 387, "torch": 647}),
    ("feed_forward", "bfloat16", (4096, 768, 3072, 64), {"kernel": 189, "torch": 198}),
    ("feed_forward", "bfloat16", (4096, 4096, 11008, 64), {"kernel": 627, "torch": 625}),
    # positions, rank, width of a head; "heads" with a mask, "ranks" with expanded keys and a mask
    ("attention_space", "bfloat16", (128, 32, 64), {"heads": 134, "ranks": 90}),
    ("attention_space", "bfloat16", (512, 32, 64), {"heads": 189, "ranks": 144}),
    ("attention_space", "float32", (128, 32, 64), {"heads": 436, "ranks": 282}),
    ("attention_space", "float32", (512, 32, 64), {"heads": 938, "ranks": 727}),
)

BUILT_IN = WayTimes(
    "built-in, of an H100 80GB HBM3, torch 2.11, 2026-11-22: never measured here",
    tuple(
        Timing(group, dtype, True, sizes, {way: 1e-6 * us for way, us in times.items()})
        for group, dtype, sizes, times in _MICROSECONDS
    ),
    least={"feed_forward": (1024, 0, 0, 0)},  # fewer rows were not measured
)
NONE = WayTimes("built-in order: never measured here")


@dataclass(frozen=True)
class Setting:
    """Device and versions for which times are valid; ``kind`` is ``"cpu"`` or ``"cuda"``.

    ``threads`` is the number of threads in use on a CPU, None on a card; ``kernels`` is the digest
    of the sources of the kernels, empty on a CPU.
    """

    kind: str
    name: str
    threads: int | None
    torch: str
    kernels: str

    @property
    def path(self) -> Path:
        return profile_path(self.kind, self.name, self.threads, f"ways torch {self.torch}")


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
    with replacing(setting.path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    load_way_times.cache_clear()
    return setting.path


@functools.cache  # read once; a file that cannot be used is logged once
def load_way_times(setting: Setting) -> WayTimes:
    """Load the saved times of a device, or built-in times; log a file that cannot be used."""
    default = BUILT_IN if setting.kind == "cuda" else NONE
    try:
        content = json.loads(setting.path.read_text())
        _check(content, setting)
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


def _check(content: Any, setting: Setting) -> None:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it is not of format {_FORMAT}")
    for name, value in asdict(setting).items():
        if content.get(name) != value:
            if name == "kernels":
                raise ValueError("the kernels have changed since")
            raise ValueError(f"it is of {name} {content.get(name)!r}, this is {value!r}")
