"""One table of all operators: the ways each can run, in order, and what refuses a way.

An operator's file says its ways beside the functions that go them; the last one takes everything.
They are tried in that order, unless times are known: operators that say what their time depends on
(:class:`Times`) try the fastest way first, as ``comera calibrate`` has measured it on this device.
So each way must be right wherever it does not refuse, whatever stands before it. ``comera doctor``
prints the table with the reasons and the times of this machine.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from comera.ops.context import shapes_are_static
from comera.ops.kernels.choose import ON_CPU, warn_of
from comera.ops.operator import is_concrete

COMPILING = "a graph is compiled"
EXPORTING = "a graph is exported"
NO_VALUES = "the tensors have no values"
OFF_CPU = "the tensors are not on a CPU"
STATIC = "shapes are static"

Refusal = Callable[..., str | None]
_Run = TypeVar("_Run", bound=Callable[..., Any])


class Way(NamedTuple):
    """A way an operator can run.

    Attributes:
        name: What the way does, in a few words.
        run: Goes it; takes the operator's arguments.
        refuses: Says of these arguments why it does not take them, or None where it does. None in
            its place takes everything.
        kernel: What kernels compute here, for the warning where a card has to do without; None of
            ways that launch none.
        timed_as: The name under which its times are known, where that is neither ``"kernel"`` nor
            ``"torch"``.
    """

    name: str
    run: Callable[..., Any]
    refuses: Refusal | None
    kernel: str | None
    timed_as: str | None = None


Case = tuple[Tensor, torch.dtype, tuple[int | str, ...]]
"""A tensor of the device, the dtype of the arithmetic, and sizes: what a time depends on."""


class Times(NamedTuple):
    """What the times of an operator's ways depend on.

    Attributes:
        group: Operators of one group are timed, and their ways ordered, together.
        case: Reads the case off an operator's arguments; None for arguments whose ways are tried in
            the order of the list. It is called at every call, and has to be quick.
    """

    group: str
    case: Callable[..., Case | None]


class Ways:
    """The ways of an operator, of which a call takes the first that does not refuse.

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
        self._orders: dict[tuple[Any, ...], list[Way] | None] = {}
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

    def order(self, *args: Any) -> list[Way]:
        """List the ways as they are tried for these arguments.

        In a graph that is compiled, or without values, it is the list's: one order for all sizes.
        """
        if self.times is None or torch.compiler.is_compiling() or not _times_matter():
            return self.ways
        found = self.times.case(*args)
        if found is None or not is_concrete(found[0]):
            return self.ways
        like, dtype, sizes = found
        case = like.device, dtype, shapes_are_static(like), sizes
        try:
            ordered = self._orders[case]
        except KeyError:
            ordered = self._remember(case)
        return self.ways if ordered is None else ordered

    def _remember(self, case: tuple[Any, ...]) -> list[Way] | None:
        """Order the ways for a case by their times; None for the order of the list."""
        from comera.ops import way_order  # once a case

        if len(self._orders) >= _MOST_CASES:
            self._orders.clear()
        assert self.times is not None
        order = way_order.ordered(self.ways, self.times.group, *case)
        self._orders[case] = None if order == self.ways else order
        return self._orders[case]

    def forget(self) -> None:
        """Read the times anew at the next call of each case."""
        self._orders.clear()

    def refusal(self, *args: Any) -> str | None:
        """Say why the first way is not taken, for a way of another operator that leads there."""
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
"""All operators of which more than one way is known, by name."""

_MOST_CASES = 1024
"""Cases of an operator whose order is remembered: sizes of batches may be many."""

_matter: bool | None = None


def _times_matter() -> bool:
    """Say whether times are known that could change an order; found out once."""
    global _matter
    if _matter is None:
        from comera.ops import way_order  # once

        _matter = way_order.are_known()
    return _matter


def forget_times() -> None:
    """Read the times of all operators anew, after others have been measured."""
    global _matter
    _matter = None
    for ways in TABLE.values():
        ways.forget()


class Sample(NamedTuple):
    """What refusals ask of a tensor, without numbers: so that one of any device can be made up."""

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
    """Refuse all but a CPU whose shapes may depend on values: loops over pieces are good there."""
    if not like.is_cpu:
        return OFF_CPU
    return STATIC if shapes_are_static(like) else None


def with_values(like: Tensor) -> str | None:
    """Refuse as :func:`on_cpu_alone` does, and where no values can be read now."""
    if torch.compiler.is_compiling():
        return COMPILING
    return on_cpu_alone(like) if is_concrete(like) else NO_VALUES


def without_values(like: Tensor) -> str | None:
    """Refuse where sizes are known now: a choice made in a graph would tie it to them."""
    return "the sizes are known" if is_concrete(like) else None


def may_read_values(like: Tensor) -> bool:
    """Say whether a check may look at the values: in eager mode, on a CPU, where shapes vary."""
    return with_values(like) is None


def may_keep(like: Tensor) -> bool:
    """Say whether what is made now of a tensor may outlive this call: nothing of a graph may."""
    if torch.compiler.is_compiling() or not is_concrete(like):
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())


def is_eager() -> bool:
    """Say whether a check may look at objects: what is seen while a graph is compiled, it keeps."""
    return not torch.compiler.is_compiling()


def on_this_machine() -> str | None:
    """Refuse what is best here alone while a graph is exported or traced: it may run anywhere."""
    return EXPORTING if torch.compiler.is_exporting() or torch.jit.is_tracing() else None
