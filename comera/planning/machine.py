"""Describe the speeds of a machine by the few numbers that predict the time of a layer.

``comera calibrate`` measures them and saves one JSON file for each machine in the cache folder.
Without such a file rough defaults are used.
"""

import functools
import json
import logging
import platform
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from comera.files import cache_folder, write_text

log = logging.getLogger("comera.machine")

ONEDNN_FROM = 1 << 23
"""Multiply-adds from which oneDNN's 30 us a call, and 1 ms and 0.6 MiB a shape, are won back."""

PACKED_FROM = 32
"""Rank times the numbers in a block of the input from which products of block tensor trains gain
more by oneDNN than the copies of their matrices that it needs take."""

_ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def item_size(dtype: str) -> int:
    """Return the bytes of one number of a dtype; raise ValueError if it is unknown."""
    size = _ITEM_SIZES.get(dtype)
    if size is None:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(repr, _ITEM_SIZES))}")
    return size


@dataclass(frozen=True)
class Machine:
    """The speeds of a device, in case of a CPU at one number of threads.

    Args:
        name: Name of the device, e.g. ``"NVIDIA H200"``.
        kind: ``"cpu"`` or ``"cuda"``.
        flops: Pairs of a dtype and the floating-point operations a second of a large square
            matrix product; a multiply-add is two.
        bandwidth: Bytes a second, read and written together, of a pass over a large tensor.
        strided_bandwidth: Bytes a second of permuted copies and gathers.
        cache_bandwidth: Bytes a second of a pass over a tensor that stays in the last cache.
        cache_bytes: Size of that cache.
        call_overhead: Seconds to start one kernel; on a GPU as a node of a CUDA graph.
        operator_overhead: Seconds to enter one Python operator, on top; zero on a GPU (in a graph).
        tile: Columns that the kernels of matrix products work on at once.
        whole_tiles: Whether a remainder costs one tile more, as on a GPU, or as many as it has
            powers of two (14 = 8 + 4 + 2: three), as in the kernels of CPU libraries.
        half_width: Narrower side of a product, in whole tiles, at which it has half the peak rate.
        half_depth: Length of the summed side at which a product has half the peak rate.
        onednn: Speed of oneDNN at float32 products, in units of torch's default (``flops``).
        threads: Number of threads that was measured with; None on a GPU.
        measured: Whether these speeds were measured; False for the rough defaults.
        eager_call: On a GPU, seconds of the host to start one kernel in eager mode.
        eager_operator: On a GPU, seconds of the host to enter one Python operator, on top.
        eager_module: On a GPU, seconds of the host for a module of torch beyond its kernels' start.
        module_overhead: ``eager_module`` in a machine that :attr:`eager` made.
        runs_ahead: Whether host and device overlap: the longer of both counts, not the sum.
    """

    name: str
    kind: str
    flops: tuple[tuple[str, float], ...]
    bandwidth: float
    strided_bandwidth: float
    cache_bandwidth: float
    cache_bytes: float
    call_overhead: float
    operator_overhead: float
    tile: int
    whole_tiles: bool
    half_width: float
    half_depth: float
    onednn: float = 1.0
    threads: int | None = None
    measured: bool = True
    eager_call: float = 0.0
    eager_operator: float = 0.0
    eager_module: float = 0.0
    module_overhead: float = 0.0
    runs_ahead: bool = False

    def rate(self, dtype: str) -> float:
        """Return the peak operations a second in a dtype; raise ValueError if it is not known."""
        for name, rate in self.flops:
            if name == dtype:
                return rate
        known = ", ".join(repr(name) for name, _ in self.flops)
        raise ValueError(f"dtype={dtype!r} must be one of {known} on {self.title}")

    @property
    def prefers_onednn(self) -> bool:
        """Whether oneDNN is so much faster that its slower start of each product pays off."""
        return self.onednn > 1.1

    def product_rate(self, dtype: str, multiply_adds: int) -> float:
        """Return the peak operations a second of one product of a layer, by the library it uses."""
        by_onednn = dtype == "float32" and self.prefers_onednn and multiply_adds >= ONEDNN_FROM
        return self.rate(dtype) * (self.onednn if by_onednn else 1.0)

    @property
    def without_onednn(self) -> "Machine":
        """This machine, if torch's default library computes every product."""
        return replace(self, onednn=1.0)

    @property
    def eager(self) -> "Machine | None":
        """This GPU in eager mode, in which the host starts every kernel; None for a CPU."""
        if self.kind != "cuda" or self.runs_ahead:
            return None
        return replace(
            self,
            call_overhead=self.eager_call,
            operator_overhead=self.eager_operator,
            module_overhead=self.eager_module,
            runs_ahead=True,
        )

    def in_all(self, working: float, starting: float) -> float:
        """Combine the seconds of work and of starting kernels to the seconds of both together."""
        return max(working, starting) if self.runs_ahead else working + starting

    def share(self, narrow: int, depth: int) -> float:
        """Predict the share of the peak rate from a product's narrower side and depth."""
        whole, rest = divmod(narrow, self.tile)
        tiles = whole + (rest > 0 if self.whole_tiles else rest.bit_count())
        width = narrow / (tiles * self.tile + self.half_width)
        return width * (depth / (depth + self.half_depth))

    def moving(self, nbytes: float) -> float:
        """Predict the seconds to read and write ``nbytes`` in all."""
        if nbytes <= self.cache_bytes:
            return nbytes / self.cache_bandwidth
        beyond = nbytes - self.cache_bytes
        return self.cache_bytes / self.cache_bandwidth + beyond / self.bandwidth

    @property
    def title(self) -> str:
        """The device's name and threads, as shown to people."""
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.name}{threads}" if self.measured else f"default profile ({self.kind})"


def _check_kind(kind: str) -> None:
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"kind={kind!r} must be 'cpu' or 'cuda'")


_DEFAULTS = {
    # A desktop-like CPU with two cores.
    "cpu": Machine(
        name="two cores", kind="cpu", threads=2, measured=False,
        flops=(("float64", 65e9), ("float32", 130e9), ("bfloat16", 65e9), ("float16", 30e9)),
        bandwidth=12e9, strided_bandwidth=6e9, cache_bandwidth=40e9, cache_bytes=8e6,
        call_overhead=6e-6, operator_overhead=60e-6,
        tile=16, whole_tiles=False, half_width=4, half_depth=6,
    ),
    # Like an H200, with a host like that of an H100 with a slow Xeon.
    "cuda": Machine(
        name="H200", kind="cuda", measured=False,
        flops=(("float64", 60e12), ("float32", 60e12), ("bfloat16", 790e12), ("float16", 790e12)),
        bandwidth=4.3e12, strided_bandwidth=2e12, cache_bandwidth=8e12, cache_bytes=40e6,
        call_overhead=2e-6, operator_overhead=0.0,
        tile=64, whole_tiles=True, half_width=32, half_depth=64,
        eager_call=7.7e-6, eager_operator=250e-6, eager_module=220e-6,
    ),
}  # fmt: skip


def default_machine(kind: str = "cpu") -> Machine:
    """Return the rough speeds of a two-core CPU, or of an H200-like GPU (``"cuda"``)."""
    _check_kind(kind)
    return _DEFAULTS[kind]


@functools.cache  # a missing profile is logged once
def load_machine(kind: str = "cpu", name: str | None = None, threads: int | None = None) -> Machine:
    """Load the saved profile of a machine; if there is none, log that once and return defaults.

    By default the name is that of this computer's processor. For a GPU the name is needed.
    """
    _check_kind(kind)
    name = processor_name() if name is None and kind == "cpu" else name
    path = profile_path(kind, name or "", threads)
    if name is None or not path.exists():
        problem = f"no profile of this machine ({name or kind})"
    else:
        try:
            content = json.loads(path.read_text())
            return Machine(**{**content, "flops": tuple(content["flops"].items())})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"the profile {path} cannot be used ({error})"
    log.info("%s: times come from defaults; run `comera calibrate --device %s`", problem, kind)
    return default_machine(kind)


def save_machine(machine: Machine) -> Path:
    """Write the profile where :func:`load_machine` finds it, and return the path."""
    path = profile_path(machine.kind, machine.name, machine.threads)
    content = {**asdict(machine), "flops": dict(machine.flops)}
    write_text(path, json.dumps(content, indent=2) + "\n")
    load_machine.cache_clear()
    return path


@functools.cache
def processor_name() -> str:
    """Return the processor's model, as the system names it."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(entry: str) -> str | None:
    """Read an entry of ``/proc/cpuinfo`` for the first processor; None if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    found = re.search(rf"^{entry}\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else None


def profile_path(kind: str, name: str, threads: int | None, what: str = "") -> Path:
    """Return the file of a device's measurements ``what``, or its profile if ``what`` is empty."""
    words = re.findall(r"[a-z0-9]+", f"{kind} {name}".lower())
    threaded = [f"{threads}threads"] if threads else []
    more = re.findall(r"[a-z0-9]+", what.lower())
    return cache_folder() / "machines" / f"{'-'.join([*words, *threaded, *more])}.json"
