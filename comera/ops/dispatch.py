"""Choose between the implementations ("ways") of an operator, such as a kernel and plain torch.

An operator lists its ways at the end of its file; the last one takes any arguments. A call runs the
first way that does not refuse its arguments. On a GPU kernels are tried before or after torch, as
``comera calibrate`` has timed both on this device. ``comera doctor --all`` prints a table of them.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.ops.context import shapes_are_static
from comera.ops.kernels.choose import warn_of
from comera.ops.operator import is_concrete, is_traced
from comera.planning.machine import processor_name
from comera.planning.way_times import BUILT_IN, Setting, Size, WayTimes, load_way_times

ORDERED = ("cuda",)
"""Kinds of devices on which ways are ordered by times; on others they are tried as listed."""


class Way(NamedTuple):
    """One implementation of an operator, with a few words for the table of ``comera doctor --all``.

    ``refuses`` returns why the way cannot take these arguments, or None if it can; it is itself
    None if the way takes any. ``kernel`` is the kernel's name, for the warning that it did not run.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None] | None = None
    kernel: str | None = None

    @property
    def timed_as(self) -> str:
        """The name under which times of this way are saved."""
        return "torch" if self.kernel is None else "kernel"


Case = tuple[Tensor, torch.dtype, tuple[int | str, ...]]
"""A tensor of the device, the dtype of the arithmetic, and sizes: what a time depends on."""


class Ways:
    """An operator with several implementations; a call runs the first that takes its arguments.

    Operators of one ``group`` are timed, and their ways ordered, together. ``case`` returns the
    :data:`Case` of the operator's arguments, by which times are looked up, or None if none apply;
    every call on a machine with GPUs calls it. ``sample`` makes arguments of usual sizes, by a
    function of a tensor's shape. The ways are tried in this order if no times apply.
    """

    def __init__(
        self,
        name: str,
        group: str,
        case: Callable[..., Case | None],
        sample: Callable[[Callable[..., Any]], tuple[Any, ...]],
        *ways: Way,
    ) -> None:
        assert name not in TABLE, f"{name} is in the table already"
        self.name, self.group, self.case, self.sample = name, group, case, sample
        self.ways = list(ways)
        TABLE[name] = self

    def __call__(self, *args: Any) -> Any:
        for way in self.order(*args):
            reason = None if way.refuses is None else way.refuses(*args)
            if reason is None:
                if _seen is not None:
                    _seen.append((self.group, way.timed_as, self.case(*args)))
                return way.run(*args)
            if way.kernel is not None:
                warn_of(way.kernel, reason)
        raise AssertionError(f"the last way of {self.name} refuses: {reason}")

    def order(self, *args: Any) -> Sequence[Way]:
        """List the ways in the order they are tried for these arguments; fixed while compiling."""
        if torch.compiler.is_compiling():
            return self.ways
        first = _preferred.get(self.group)
        if first is None and not _times_matter():
            return self.ways
        found = self.case(*args)
        if found is None or not is_concrete(found[0]):
            return self.ways
        like, dtype, sizes = found
        if first is None:
            if like.device.type not in ORDERED:
                return self.ways
            first = _fastest(self.group, like.device, dtype, shapes_are_static(like), sizes)
        return sorted(self.ways, key=lambda way: way.timed_as != first)

    def reasons(self, *args: Any) -> dict[str, str | None]:
        """Return, for each way in the order tried, why it refuses these arguments; None if not."""
        return {way.name: way.refuses and way.refuses(*args) for way in self.order(*args)}


TABLE: dict[str, Ways] = {}  # all operators with more than one way, by name

_preferred: dict[str, str] = {}
"""Ways that are tried first whatever the times, by group; see :func:`preferring`."""

_seen: list[tuple[str, str, Case | None]] | None = None
"""The ways that have run, inside :func:`recorded`."""


@functools.cache
def _times_matter() -> bool:
    return "cpu" in ORDERED or torch.cuda.is_available()


@functools.lru_cache(maxsize=1024)
def _fastest(
    group: str, device: torch.device, dtype: torch.dtype, static: bool, sizes: tuple[Size, ...]
) -> str:
    """Return whether ``"kernel"`` or ``"torch"`` is faster; a kernel without a time is not."""
    short = str(dtype).removeprefix("torch.")
    timing = way_times_of(device).nearest(group, short, static, sizes)
    return "torch" if timing is None else timing.fastest


@contextlib.contextmanager
def preferring(group: str, way: str) -> Iterator[None]:
    """Try ``"kernel"`` or ``"torch"`` first inside the context: to measure that way of a group."""
    before = dict(_preferred)
    _preferred[group] = way
    try:
        yield
    finally:
        _preferred.clear()
        _preferred.update(before)


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str, Case | None]]]:
    """Yield a list to which every call inside the context adds its group, way and case."""
    global _seen
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def forget_times() -> None:
    """Drop the cached times, so that the next call of each operator reads them again."""
    _times_matter.cache_clear()
    _fastest.cache_clear()


def way_times_of(device: torch.device) -> WayTimes:
    """Load the measured times of all operators' ways on a device, or the built-in times."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return BUILT_IN
    return load_way_times(way_setting(device))


def way_setting(device: torch.device) -> Setting:
    """Return the device and versions for which times are saved: a GPU's, or else the CPU's."""
    if device.type != "cuda":
        return Setting("cpu", processor_name(), torch.__version__, "")
    from comera.ops.kernels import launch  # on a card alone

    paths = sorted(path for path in launch.folder().iterdir() if path.suffix in (".cu", ".cuh"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:20]
    return Setting("cuda", torch.cuda.get_device_name(device), torch.__version__, digest)


class Sample(NamedTuple):
    """A stand-in for a tensor on any device, with a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def is_on_cpu(like: Tensor) -> bool:
    """Return whether a tensor is on a CPU, outside of :func:`static_shapes`."""
    return like.is_cpu and not shapes_are_static(like)


def may_read_values(like: Tensor) -> bool:
    """Return whether code may read a tensor's values: on a CPU, eager, without static shapes."""
    return is_eager() and is_concrete(like) and is_on_cpu(like) and not is_traced()


def is_eager() -> bool:
    """Return whether code runs outside of torch's compiler."""
    return not torch.compiler.is_compiling()
