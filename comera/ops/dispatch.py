"""One table of the operators with more than one implementation ("way"), and the choice among them.

An operator lists its ways in its own file, each beside the function that runs it; the last one
takes everything. A call takes the first way that does not refuse. On a card, where kernels are, the
ways of operators that name what their time depends on (:class:`Times`) are ordered fastest first,
as ``comera calibrate`` has measured them on this device. So each way must be right wherever it does
not refuse, in any order. ``comera doctor`` prints the table with reasons and times.

Below the table are the conditions that operators ask before they look at sizes or values.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from comera.ops.context import shapes_are_static
from comera.ops.kernels.choose import ON_CPU, warn_of
from comera.ops.operator import is_concrete
from comera.planning.machine import processor_name
from comera.planning.way_times import BUILT_IN, Setting, Size, WayTimes, load_way_times

COMPILING = "a graph is compiled"
EXPORTING = "a graph is exported"
NO_VALUES = "the tensors have no values"
OFF_CPU = "the tensors are not on a CPU"
STATIC = "shapes are static"

ORDERED = ("cuda",)
"""Kinds of devices on which ways are ordered by times; on others they are tried as listed."""

Refusal = Callable[..., str | None]
_Run = TypeVar("_Run", bound=Callable[..., Any])


class Way(NamedTuple):
    """A way an operator can run.

    Attributes:
        name: What the way does, in a few words.
        run: Computes the operator in this way.
        refuses: Returns why the way does not take the operator's arguments, or None where it does.
            None in its place takes everything.
        kernel: What kernels compute here, for the warning where a card has to do without; None of
            ways that launch none.
        timed_as: The name of its times, where that is neither ``"kernel"`` nor ``"torch"``.
    """

    name: str
    run: Callable[..., Any]
    refuses: Refusal | None
    kernel: str | None
    timed_as: str | None = None


Case = tuple[Tensor, torch.dtype, tuple[int | str, ...]]
"""A tensor of the device, the dtype of the arithmetic, and sizes: what a time depends on."""


class Times(NamedTuple):
    """The sizes on which the times of an operator's ways depend.

    Attributes:
        group: Operators of one group are timed, and their ways ordered, together.
        case: Returns the case of an operator's arguments; None for arguments whose ways are tried
            in the order of the list. It is called at every call on a machine with cards.
    """

    group: str
    case: Callable[..., Case | None]


class Ways:
    """The ways of an operator; a call takes the first that does not refuse.

    Args:
        name: The operator's, as the table lists it.
        sample: Makes arguments of ordinary sizes from a function of shapes, for the table.
        times: What the time of its ways depends on; None where the order of the list is right.
    """

    def __init__(
        self,
        name: str,
        sample: Callable[[Callable[..., Any]], tuple[Any, ...]],
        times: Times | None = None,
    ) -> None:
        assert name not in TABLE, f"{name} is in the table already"
        self.name, self.sample, self.times = name, sample, times
        self.ways: list[Way] = []
        TABLE[name] = self

    def way(
        self,
        name: str,
        refuses: Refusal | None = None,
        *,
        kernel: str | None = None,
        timed_as: str | None = None,
    ) -> Callable[[_Run], _Run]:
        """Add a way after those that are there; a decorator of the function that goes it."""

        def add(run: _Run) -> _Run:
            self.ways.append(Way(name, run, refuses, kernel, timed_as))
            return run

        return add

    def __call__(self, *args: Any) -> Any:
        return self.choose(*args)(*args)

    def choose(self, *args: Any) -> Any:
        """Return the function of the first way that takes these arguments."""
        for _, run, refuses, kernel, _ in self.ways if self.times is None else self.order(*args):
            reason = None if refuses is None else refuses(*args)
            if reason is None:
                return run
            if kernel is not None:
                warn_of(kernel, reason)
        raise AssertionError(f"the last way of {self.name} refuses: {reason}")

    def order(self, *args: Any) -> Sequence[Way]:
        """List the ways as they are tried for these arguments.

        In a graph that is compiled, or without values, it is the list's: one order for all sizes.
        """
        if self.times is None or torch.compiler.is_compiling() or not _times_matter():
            return self.ways
        found = self.times.case(*args)
        if found is None or not is_concrete(found[0]):
            return self.ways
        if found[0].device.type not in ORDERED and self.times.group not in _preferred:
            return self.ways
        like, dtype, sizes = found
        listed = tuple(dict.fromkeys(map(known_as, self.ways)))
        case = like.device, dtype, shapes_are_static(like), sizes
        fastest = _fastest(self.times.group, listed, *case)
        return [way for name in fastest for way in self.ways if known_as(way) == name]

    def refusal(self, *args: Any) -> str | None:
        """Return why the first way is not taken, for a way of another operator that leads there."""
        refuses = self.ways[0].refuses
        return None if refuses is None else refuses(*args)

    def refusal_of_graph(self, like: Tensor, *args: Any) -> str | None:
        """Return :meth:`refusal`, but in a graph None on a card, which decides at run time."""
        if torch.compiler.is_compiling():
            return None if like.is_cuda else ON_CPU
        return self.refusal(*args)

    def reasons(self, *args: Any) -> dict[str, str | None]:
        """List what each way says to these arguments, None where it takes them; warn of nothing.

        In the order in which they are tried.
        """
        return {way.name: way.refuses and way.refuses(*args) for way in self.order(*args)}

    def chosen(self, *args: Any) -> str:
        """Name the first way that takes these arguments; warn of nothing."""
        return next(name for name, reason in self.reasons(*args).items() if reason is None)


TABLE: dict[str, Ways] = {}
"""All operators with more than one way, by name."""

_preferred: dict[str, str] = {}
"""Ways that are tried first whatever the times, by group; see :func:`preferring`."""


def known_as(way: Way) -> str:
    """Return the name of a way's times: ``timed_as``, else ``"kernel"`` or ``"torch"``."""
    return way.timed_as or ("torch" if way.kernel is None else "kernel")


@functools.cache
def _times_matter() -> bool:
    """Return whether any order may differ from the list's."""
    return bool(_preferred) or "cpu" in ORDERED or torch.cuda.is_available()


@functools.lru_cache(maxsize=1024)
def _fastest(
    group: str,
    listed: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    static: bool,
    sizes: tuple[Size, ...],
) -> tuple[str, ...]:
    """Return the names of an operator's ways in the order in which they are tried.

    Those without a time keep their places in the list, except a kernel, which comes last: it is not
    chosen without a measurement.
    """
    if group in _preferred:
        return tuple(sorted(listed, key=lambda name: name != _preferred[group]))
    short = str(dtype).removeprefix("torch.")
    timing = way_times_of(device).nearest(group, short, static, sizes)
    timed = timing.order(listed) if timing else []
    places = iter(timed)
    order = [next(places) if name in timed else name for name in listed]
    return tuple(sorted(order, key=lambda name: name == "kernel" and name not in timed))


@contextlib.contextmanager
def preferring(group: str, way: str) -> Iterator[None]:
    """Try one way of a group of operators first, whatever the times; for measuring them.

    Args:
        group: As :class:`Times` names it.
        way: The name of a way's times, see :func:`known_as`.
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


def forget_times() -> None:
    """Read the times of all operators again at their next calls."""
    _times_matter.cache_clear()
    _fastest.cache_clear()


def operators_of(group: str) -> list[Ways]:
    """List the operators of a group."""
    return [ways for ways in TABLE.values() if ways.times is not None and ways.times.group == group]


def ways_of(group: str) -> list[str]:
    """List the ways of a group of operators by the names of their times."""
    return list(dict.fromkeys(known_as(way) for one in operators_of(group) for way in one.ways))


def way_times_of(device: torch.device) -> WayTimes:
    """Load how long the ways of operators take on a device, as measured, else as is known."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return BUILT_IN
    return load_way_times(way_setting(device))


def way_setting(device: torch.device) -> Setting:
    """Return what times of a device hold for: a CPU's unless it is a GPU."""
    if device.type != "cuda":
        return Setting("cpu", processor_name(), torch.get_num_threads(), torch.__version__, "")
    from comera.ops.kernels import nvrtc  # on a card alone

    paths = sorted(path for path in nvrtc.folder().iterdir() if path.suffix in (".cu", ".cuh"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:20]
    return Setting("cuda", torch.cuda.get_device_name(device), None, torch.__version__, digest)


class Sample(NamedTuple):
    """A stand-in for a tensor of any device: shape and dtype, as refusals read them."""

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


def on_cpu_alone(like: Tensor) -> str | None:
    """Return why loops over pieces are not good: off the CPU, or shapes are static; or None."""
    if not like.is_cpu:
        return OFF_CPU
    return STATIC if shapes_are_static(like) else None


def with_values(like: Tensor) -> str | None:
    """Return why values cannot be read here, as :func:`on_cpu_alone` and in a graph; or None."""
    if torch.compiler.is_compiling():
        return COMPILING
    return on_cpu_alone(like) if is_concrete(like) else NO_VALUES


def may_read_values(like: Tensor) -> bool:
    """Return whether a check may look at the values: in eager mode, on a CPU, where shapes vary."""
    return with_values(like) is None


def may_keep(like: Tensor) -> bool:
    """Return whether what is made now of a tensor may outlive this call: nothing of a graph may."""
    if torch.compiler.is_compiling() or not is_concrete(like):
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())


def is_eager() -> bool:
    """Return whether a check may look at objects: nothing is compiled."""
    return not torch.compiler.is_compiling()


def on_this_machine() -> str | None:
    """Return why a choice for this machine is wrong: the graph is exported or traced; or None."""
    return EXPORTING if torch.compiler.is_exporting() or torch.jit.is_tracing() else None
