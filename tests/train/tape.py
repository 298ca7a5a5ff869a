"""A stand-in for CUDA graphs on a CPU: it records the operations of a function and replays them.

A replay runs every operation once more, on the tensors of the recording, with new random numbers.
Recording changes no tensor and no random state, and refuses what a capture refuses: values read
back to the host, shapes that depend on values, tensors made of Python values. Collective operations
are only noted.
"""

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library import custom_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comera.train.graphs import Contents

NOT_CAPTURABLE = {
    "_local_scalar_dense": "reads a value back to the host",
    "is_nonzero": "reads a value back to the host",
    "equal": "reads a value back to the host",
    "bincount": "reads its largest value back to the host",
    "nonzero": "its shape depends on values",
    "masked_select": "its shape depends on values",
    "_unique2": "its shape depends on values",
    "unique_dim": "its shape depends on values",
    "unique_consecutive": "its shape depends on values",
    "repeat_interleave": "its shape depends on values",
    "lift_fresh": "copies a Python value to the device",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class NotCapturableError(RuntimeError):
    pass


def check_capturable(func, args, kwargs) -> None:
    """Raise for an operation that no CUDA graph can hold."""
    name = func._overloadpacket.__name__
    why = NOT_CAPTURABLE.get(name)
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        why = None
    if name in INDEXING:
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            why = "a boolean index: the shape depends on values"
    if why:
        raise NotCapturableError(f"aten.{name}: {why}")


def python_of(func) -> Callable | None:
    """Return the function behind an operator of this package; None of another's."""
    known = custom_ops.OPDEFS.get(func._schema.name)
    return known._init_fn if known is not None and known._namespace == "comera" else None


class Capturable(TorchDispatchMode):
    """Raises for what no graph can hold, and looks inside this package's own operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inside = python_of(func)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        check_capturable(func, args, kwargs)
        return self.run(func, args, kwargs)

    def run(self, func, args, kwargs):
        return func(*args, **kwargs)


def is_collective(func) -> bool:
    return func._schema.name.startswith("c10d::")


def mutates(func) -> bool:
    """Collective operations do, and their schemas do not say so."""
    return func._schema.is_mutable or is_collective(func)


@functools.cache
def own_group() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def alone(func, args):
    """The arguments of a collective operation, for a process that has no others to talk to."""
    names = [argument.name for argument in func._schema.arguments]
    args = list(args)
    args[names.index("process_group")] = own_group().boxed()
    return args


class Recorder(Capturable):
    """Runs operations and keeps what a replay does; :meth:`undo` takes back what they changed."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self._before = {}

    def run(self, func, args, kwargs):
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if mutates(func):
            for tensor in inputs:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._before:
                    self._before[storage.data_ptr()] = storage, storage.clone()
        output = func(*(alone(func, args) if is_collective(func) else args), **kwargs)
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        owned = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        view = any(tensor.untyped_storage().data_ptr() in owned for tensor in outputs)
        nothing = func._overloadpacket.__name__.startswith(("empty", "new_empty"))
        if mutates(func) or not (view or nothing or not outputs):
            self.calls.append((func, args, kwargs, outputs))
        return output

    def undo(self):
        for storage, before in self._before.values():
            storage.copy_(before)


def replay_call(func, args, kwargs, outputs) -> None:
    """Do an operation once more, with its results in the tensors that hold the recorded ones."""
    new = func(*args, **kwargs)
    if is_collective(func):
        dist.Work.unbox(new[-1]).wait()
    elif not mutates(func):
        made = [x for x in tree_leaves(new) if isinstance(x, Tensor)]
        for mine, value in zip(outputs, made, strict=True):
            mine.copy_(value)


class Tape:
    """A recording: see the top of this file."""

    freed = False

    def __init__(self, run: Callable[[], Tensor]) -> None:
        recorder = Recorder()
        random = torch.get_rng_state()
        try:
            with recorder:
                self.output = run()
        finally:
            torch.set_rng_state(random)
            recorder.undo()
        self.calls = recorder.calls

    @torch.no_grad()
    def replay(self) -> None:
        assert not self.freed, "a freed recording was replayed"
        for call in self.calls:
            replay_call(*call)

    def free(self) -> None:
        self.freed, self.calls = True, []

    def contents(self) -> Contents:
        kernels = {}
        for func, *_ in self.calls:
            kernels[str(func)] = kernels.get(str(func), 0) + 1
        return Contents({"kernel": len(self.calls)}, kernels, 0, 0)


class Tapes:
    """Recorder; ``tapes`` are all that were made."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.eager = 0

    @contextlib.contextmanager
    def stream(self):
        self.eager += 1
        yield

    def record(self, run: Callable[[], Tensor], beside: Tape | None = None) -> Tape:
        held = [tape for tape in self.tapes if not tape.freed]
        assert held == [] if beside is None else beside in held, "memory of two steps at a time"
        self.tapes.append(Tape(run))
        return self.tapes[-1]
