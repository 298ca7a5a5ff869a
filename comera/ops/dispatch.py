"""One table of all operators: the ways each can run, in order, and what refuses a way.

An operator's file says its ways beside the functions that go them, the best first; the last one
takes everything. ``comera doctor`` prints the table with the reasons of this machine.
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
    """

    name: str
    run: Callable[..., Any]
    refuses: Refusal | None
    kernel: str | None


class Ways:
    """The ways of an operator, of which a call takes the first that does not refuse.

    Args:
        name: The operator's, as the table lists it.
        sample: Makes arguments of ordinary sizes from a function of shapes, for the table.
    """

    def __init__(self, name: str, sample: Callable[[Callable[..., Any]], tuple[Any, ...]]) -> None:
        assert name not in TABLE, f"{name} is in the table already"
        self.name, self.sample = name, sample
        self.ways: list[Way] = []
        TABLE[name] = self

    def way(
        self, name: str, refuses: Refusal | None = None, *, kernel: str | None = None
    ) -> Callable[[_Run], _Run]:
        """Add a way after those that are there; a decorator of the function that goes it."""

        def add(run: _Run) -> _Run:
            self.ways.append(Way(name, run, refuses, kernel))
            return run

        return add

    def __call__(self, *args: Any) -> Any:
        return self.choose(*args)(*args)

    def choose(self, *args: Any) -> Any:
        """Return the function of the first way that takes these arguments."""
        for _, run, refuses, kernel in self.ways:
            reason = None if refuses is None else refuses(*args)
            if reason is None:
                return run
            if kernel is not None:
                warn_of(kernel, reason)
        raise AssertionError(f"the last way of {self.name} refuses: {reason}")

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
        """List what each way says to these arguments, None where it takes them; warn of nothing."""
        return {way.name: way.refuses and way.refuses(*args) for way in self.ways}

    def chosen(self, *args: Any) -> str:
        """Name the first way that takes these arguments; warn of nothing."""
        return next(name for name, reason in self.reasons(*args).items() if reason is None)


TABLE: dict[str, Ways] = {}
"""All operators of which more than one way is known, by name."""


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
    """Refuse what is best here alone while a graph is exported, which may run anywhere."""
    return EXPORTING if torch.compiler.is_exporting() else None
