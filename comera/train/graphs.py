"""Record the work of a function on a GPU as a CUDA graph, and replay it with one call."""

import collections
import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from comera.ops.kernels.launch import checked


@dataclass(frozen=True)
class Contents:
    """Number of ``nodes`` by kind and ``kernels`` by name in a recording; None if not countable.

    ``pool_bytes`` is the memory of the recording and of those that share its pool, ``peak_bytes``
    that memory and all tensors outside of it.
    """

    nodes: dict[str, int] | None
    kernels: dict[str, int] | None
    pool_bytes: int
    peak_bytes: int


class CudaGraphs:
    """Records work on a GPU as CUDA graphs.

    All work runs on one stream, as autograd's accumulators stay on the stream they first ran on.
    Graphs of one step share a memory pool, which is freed with the last of them.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Enter the stream on which functions are recorded, and have to run before that."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def record(
        self, run: Callable[[], Tensor], beside: "CudaRecording | None" = None
    ) -> "CudaRecording":
        """Record the work of a function on the GPU, which runs only in replays.

        The new recording shares the memory pool of ``beside``: never replay both at once. Raises
        any error of the function, or the reason why it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        pool = torch.cuda.graph_pool_handle() if beside is None else beside._graph.pool()
        # A thread that pins memory for a DataLoader may go on while this one captures.
        capture = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        problem: Exception | None = None
        gc.collect()  # torch frees the allocator's cache first, but not the memory of dead cycles
        try:
            with torch.cuda.stream(self._stream), capture:  # torch's own does not always come back
                try:
                    output = run()
                except Exception as error:
                    problem = error
                    raise
            graph.instantiate()
        except Exception as error:
            # A capture that did not end leaves a random state and a pool behind in torch.
            index = self._device.index
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())  # the old one waits for the end
            # It raises where the pool was closed properly; the names are private to torch.
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
            graph.reset()
            raise (problem or error) from None  # the end of a broken capture only says it is broken
        finally:
            problem = None  # it holds this frame, and all that the function had made with it
        return CudaRecording(graph, output, self._device)


class CudaRecording:
    """A recorded function, which can be replayed until freed; each replay writes ``output``."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor, device: torch.device) -> None:
        self._graph, self.output, self._device = graph, output, device

    def replay(self) -> None:
        self._graph.replay()

    def free(self) -> None:
        torch.cuda.synchronize(self._device)  # a replay may still be under way
        self._graph.reset()
        del self.output

    def contents(self) -> Contents:
        pool = tuple(self._graph.pool())
        segments = torch.cuda.memory_snapshot()
        here = [segment for segment in segments if segment["device"] == self._device.index]
        outside = [s["allocated_size"] for s in here if tuple(s["segment_pool_id"]) != pool]
        held = sum(s["total_size"] for s in here if tuple(s["segment_pool_id"]) == pool)
        peak = held + sum(outside)
        try:
            nodes, kernels = _nodes(self._graph.raw_cuda_graph())
        except ImportError:
            return Contents(None, None, held, peak)
        return Contents(nodes, kernels, held, peak)


def _nodes(graph: int) -> tuple[dict[str, int], dict[str, int]]:
    """Count nodes by kind and kernels by name, with NVIDIA's cuda-bindings."""
    from cuda.bindings import driver, runtime

    value = functools.partial(checked, what="a CUDA graph cannot be read")
    _, count = value(runtime.cudaGraphGetNodes(graph, 0))
    nodes, _ = value(runtime.cudaGraphGetNodes(graph, count))
    kinds: collections.Counter[str] = collections.Counter()
    kernels: collections.Counter[str] = collections.Counter()
    for node in nodes[:count]:
        kind = value(runtime.cudaGraphNodeGetType(node))
        kinds[kind.name.removeprefix("cudaGraphNodeType").lower()] += 1
        if kind == runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel:
            params = value(driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(int(node))))
            if int(params.func):
                name = value(driver.cuFuncGetName(params.func))
            else:  # started from a library without a context
                name = value(driver.cuKernelGetName(params.kern))
            kernels[name.decode() if isinstance(name, bytes) else name] += 1
    return dict(kinds), dict(kernels)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
"""Types of constants that a graph can hold."""

Signature = tuple[Any, tuple[Any, ...]]


class StaticBatch:
    """A copy of a batch that a recorded function reads; ``fill_`` copies another one into it."""

    def __init__(self, batch: Any) -> None:
        leaves, spec = tree_flatten(batch)
        self._leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self.value = tree_unflatten(self._leaves, spec)
        self.signature = signature(batch)

    def fill_(self, batch: Any) -> None:
        """Copy the tensors of a batch with equal signature into this one, without waiting."""
        for mine, given in zip(self._leaves, tree_flatten(batch)[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)


def signature(batch: Any) -> Signature:
    """Return a batch's structure, its plain values, and each tensor's shape, dtype and device."""
    leaves, spec = tree_flatten(batch)
    return spec, tuple(_kind(value) for value in leaves)


def why_not_static(batch: Any, device: torch.device) -> str | None:
    """Return why a recorded function cannot read a batch, and what to give instead."""
    for path, value in tree_flatten_with_path(batch)[0]:
        name = f"batch{keystr(path)}"
        if isinstance(value, Tensor):
            if value.device != device:
                return f"{name} is on {value.device} and the model on {device}: move it there first"
            if value.layout != torch.strided or value.is_nested:
                return f"{name} is sparse or nested: give its parts as dense tensors"
            if value.requires_grad:
                return f"{name} requires a gradient: give it detached"
        elif not isinstance(value, _PLAIN):
            return f"{name} is a {type(value).__name__}: give tensors, in lists, tuples and dicts"
    return None


def difference(before: Signature, now: Signature, batch: Any) -> str:
    """Return which parts of a batch of signature ``now`` differ from one of ``before``."""
    (old_spec, old), (new_spec, new) = before, now
    if old_spec != new_spec:
        return f"the batch is another structure: {new_spec} instead of {old_spec}"
    paths = [path for path, _ in tree_flatten_with_path(batch)[0]]
    changes = [
        f"batch{keystr(path)} is {_say(mine)} instead of {_say(theirs)}"
        for path, mine, theirs in zip(paths, new, old, strict=True)
        if mine != theirs
    ]
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    return "; ".join(changes[:3]) + more


def is_variant(now: Signature, before: Signature) -> bool:
    """Return whether two batches differ at most in plain values."""
    (old_spec, old), (new_spec, new) = before, now
    return old_spec == new_spec and all(
        mine == theirs or Tensor not in (mine[0], theirs[0])
        for mine, theirs in zip(new, old, strict=True)
    )


def is_shorter(now: Signature, before: Signature) -> bool:
    """Return whether a batch differs only by fewer rows, as at the end of a data set."""
    (old_spec, old), (new_spec, new) = before, now
    if old_spec != new_spec:
        return False
    rows = set()
    for mine, theirs in zip(new, old, strict=True):
        if mine == theirs:
            continue
        both_tensors = mine[0] is theirs[0] is Tensor
        if not both_tensors or mine[2:] != theirs[2:] or not mine[1] or not theirs[1]:
            return False
        if mine[1][0] >= theirs[1][0] or mine[1][1:] != theirs[1][1:]:
            return False
        rows.add((mine[1][0], theirs[1][0]))
    return len(rows) == 1


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.device
    return (type(value), value if isinstance(value, _PLAIN) else id(value))


def _say(kind: tuple[Any, ...]) -> str:
    if kind[0] is Tensor:
        _, shape, dtype, device = kind
        return f"{str(dtype).removeprefix('torch.')} {shape} on {device}"
    return repr(kind[1])
