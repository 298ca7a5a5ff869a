"""The order in which ways are tried: the fastest first, by the times that are known of a device."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch

from comera.ops.dispatch import TABLE, Way, Ways, forget_times
from comera.planning.machine import processor_name
from comera.planning.way_times import BUILT_IN, Setting, Size, WayTimes, load_way_times

_preferred: dict[str, str] = {}
"""Ways that are tried first whatever the times, by group; see :func:`preferring`."""

_CPU = torch.device("cpu")


@contextlib.contextmanager
def preferring(group: str, way: str) -> Iterator[None]:
    """Try one way of a group of operators first, whatever the times; for measuring them.

    Args:
        group: As :class:`~comera.ops.dispatch.Times` names it.
        way: The name of a way; ``"kernel"`` for all that launch one, ``"torch"`` for the others.
    """
    before = dict(_preferred)
    _preferred[group] = way
    forget_times()
    try:
        yield
    finally:
        _preferred.clear()
        _preferred.update(before)
        forget_times()


def are_known() -> bool:
    """Say whether there is anything to order ways by: cards have built-in times, CPUs have none."""
    return bool(_preferred or torch.cuda.is_available() or way_times_of(_CPU).timings)


def ordered(
    ways: Sequence[Way],
    group: str,
    device: torch.device,
    dtype: torch.dtype,
    static: bool,
    sizes: tuple[Size, ...],
) -> list[Way]:
    """Sort the ways of an operator for one case.

    Args:
        ways: As the operator lists them.
        group: As :class:`~comera.ops.dispatch.Times` names it.
        device: Where the tensors are.
        dtype: Dtype of the arithmetic.
        static: Whether shapes are static, as in a captured step.
        sizes: What else times depend on.
    """
    if group in _preferred:
        return sorted(ways, key=lambda way: known_as(way) != _preferred[group])
    short = str(dtype).removeprefix("torch.")
    timing = way_times_of(device).nearest(group, short, static, sizes)
    listed = list(dict.fromkeys(map(known_as, ways)))
    return _by_times(ways, timing.order(listed) if timing else [], device)


def known_as(way: Way) -> str:
    """Name a way as its times do: whether a kernel goes it or torch, where it has no name there."""
    return way.timed_as or ("torch" if way.kernel is None else "kernel")


def ways_of(group: str) -> list[str]:
    """List the ways of a group of operators by the names of their times."""
    ways = [way for one in operators_of(group) for way in one.ways]
    return list(dict.fromkeys(map(known_as, ways)))


def operators_of(group: str) -> list[Ways]:
    """List the operators of a group."""
    return [ways for ways in TABLE.values() if ways.times is not None and ways.times.group == group]


def _by_times(ways: Sequence[Way], fastest: Sequence[str], device: torch.device) -> list[Way]:
    """Sort those ways of which there are times; the others keep their places in the list.

    But on a card a kernel without a time comes last: it is not taken on hope.
    """
    timed = [way for name in fastest for way in ways if known_as(way) == name]
    places = iter(timed)
    order = [next(places) if known_as(way) in fastest else way for way in ways]
    if device.type != "cuda":
        return order
    return sorted(order, key=lambda way: way.kernel is not None and known_as(way) not in fastest)


def way_times_of(device: torch.device) -> WayTimes:
    """Load how long the ways of operators take on a device, as measured, else as is known."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return BUILT_IN
    return load_way_times(way_setting(device))


def way_setting(device: torch.device) -> Setting:
    """Say what times of a device hold for: a CPU's unless it is a GPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Setting("cuda", name, None, torch.__version__, _kernels_digest())
    return Setting("cpu", processor_name(), torch.get_num_threads(), torch.__version__, "")


def _kernels_digest() -> str:
    from comera.ops.kernels import nvrtc  # on a card alone

    paths = sorted(path for path in nvrtc.folder().iterdir() if path.suffix in (".cu", ".cuh"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:20]
