"""What :class:`CudaGraphs` asks of torch and of cuda-bindings, against stand-ins for both.

Without a GPU this shows the order of calls and what becomes of errors, and nothing more.
"""

import contextlib
import enum
import gc
import sys
import types
import weakref
from types import SimpleNamespace

import pytest
import torch

from comera.train import step as step_module
from comera.train.capture import WARM_UP
from comera.train.graphs import CudaGraphs

from .conftest import get_batch, loss_fn, make_step


class Cuda:
    """The part of ``torch.cuda`` that is used, writing down what is called."""

    def __init__(self, monkeypatch):
        self.calls, self.end_fails, self.now = [], False, "default"
        cuda = self
        generator = SimpleNamespace(
            clone_state=lambda: "clone",
            graphsafe_set_state=lambda state: cuda.calls.append(f"generator {state}"),
        )

        class Stream:
            def __init__(self, name="side"):
                self.name = "side" if isinstance(name, torch.device) else name

            def wait_stream(self, other):
                cuda.calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def __init__(self, keep_graph):
                assert keep_graph
                self.pool = lambda: (0, 7)
                self.raw_cuda_graph = lambda: 42
                for name in ("instantiate", "replay", "reset"):
                    setattr(self, name, lambda name=name: cuda.calls.append(name))

        @contextlib.contextmanager
        def stream(to):
            before, cuda.now = cuda.now, to.name
            try:
                yield
            finally:
                cuda.now = before

        class Capturing:
            def __init__(self, graph, pool, stream, capture_error_mode):
                assert (pool, capture_error_mode) == ((0, 7), "thread_local")

            def __enter__(self):
                cuda.calls.append(f"begin on {cuda.now}")
                self.before, cuda.now = cuda.now, "captured"

            def __exit__(self, *error):
                cuda.calls.append("end")
                if cuda.end_fails:  # torch then leaves its stream in place
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.now = self.before

        segments = [
            {"segment_pool_id": pool, "device": k, "total_size": size, "allocated_size": size // 2}
            for pool, k, size in (((0, 7), 0, 100), ((0, 0), 0, 5000), ((0, 0), 1, 700))
        ]
        stand_ins = {
            "Stream": Stream, "CUDAGraph": Graph, "stream": stream, "graph": Capturing,
            "current_stream": lambda device: Stream(cuda.now),
            "current_device": lambda: 0, "default_generators": (generator,),
            "graph_pool_handle": lambda: (0, 7), "memory_snapshot": lambda: segments,
            "synchronize": lambda device: cuda.calls.append("synchronize"),
        }  # fmt: skip
        for name, value in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C, name, lambda *_, name=name: self.calls.append(name), raising=False
            )


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.fixture
def graphs(cuda):
    return CudaGraphs(torch.device("cuda", 0))


def test_a_recorder_for_gpus_alone(cuda):
    assert isinstance(step_module.graphs_on(torch.device("cuda", 0)), CudaGraphs)
    assert step_module.graphs_on(torch.device("cpu")) is None


def test_nothing_of_the_steps_before_is_alive_when_a_capture_begins(cuda, graphs):
    """Not even in a cycle: torch frees what its allocator has cached, and cannot free this."""

    class Held:
        pass

    held = Held()
    held.itself = held
    gone = weakref.ref(held)
    del held
    gc.disable()
    try:
        assert gone() is not None
        graphs.record(lambda: torch.ones(()) * (gone() is None))
    finally:
        gc.enable()
    assert gone() is None


def test_steps_before_run_on_the_stream_of_the_capture(cuda, graphs):
    with graphs.stream():
        assert cuda.now == "side"
    assert cuda.calls == ["side waits for default", "default waits for side"]
    with pytest.raises(KeyError), graphs.stream():
        raise KeyError
    assert cuda.calls[-1] == "default waits for side"


def test_a_function_is_recorded_replayed_and_freed(cuda, graphs):
    loss = torch.ones(())
    recording = graphs.record(lambda: cuda.calls.append(f"run on {cuda.now}") or loss)
    assert cuda.calls == ["begin on side", "run on captured", "end", "instantiate"]
    assert recording.output is loss
    recording.replay()
    recording.free()
    assert cuda.calls[4:] == ["replay", "synchronize", "reset"]
    assert cuda.now == "default"


@pytest.mark.slow
def test_recordings_beside_each_other_share_a_pool(cuda, graphs, monkeypatch):
    first = graphs.record(lambda: torch.ones(()))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 8))  # asserted when captured
    second = graphs.record(lambda: torch.ones(()), beside=first)
    assert second._graph.pool() == first._graph.pool()
    first.free()
    third = graphs.record(lambda: torch.ones(()), beside=second)
    assert third._graph.pool() == second._graph.pool()


@pytest.mark.parametrize(
    ("name", "end_fails"), [("cuda:0", False), ("cuda:0", True), ("cuda", True)]
)
def test_an_error_inside_is_the_one_that_is_raised(cuda, name, end_fails):
    cuda.end_fails, graphs = end_fails, CudaGraphs(torch.device(name))

    def reads_back():
        raise ValueError("a value was read back")

    with pytest.raises(ValueError, match="a value was read back"):
        graphs.record(reads_back)
    assert cuda.calls[1:] == [
        "end", "generator clone", "_cuda_endAllocateToPool", "_cuda_releasePool", "reset",
    ]  # fmt: skip
    assert cuda.now == "default"


def test_a_capture_that_only_fails_at_its_end_says_so(cuda, graphs):
    cuda.end_fails = True
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.record(lambda: torch.ones(()))
    assert "reset" in cuda.calls


def bindings(monkeypatch):
    class Kind(enum.IntEnum):
        cudaGraphNodeTypeKernel = 0
        cudaGraphNodeTypeMemcpy = 1

    nodes = [11, 12, 13, 14]
    functions = {11: (5, 0), 12: (5, 0), 13: (0, 6)}  # by function, or by kernel of a library

    def get_nodes(graph, count=0):
        assert graph == 42
        return (0, nodes if count else [], len(nodes))

    runtime = SimpleNamespace(
        cudaGraphGetNodes=get_nodes,
        cudaGraphNodeType=Kind,
        cudaGraphNodeGetType=lambda node: (0, Kind(int(node == 14))),
    )
    driver = SimpleNamespace(
        CUgraphNode=lambda node: node,
        cuGraphKernelNodeGetParams=lambda node: (
            0, SimpleNamespace(func=functions[node][0], kern=functions[node][1]),
        ),
        cuFuncGetName=lambda func: (0, b"gemm"),
        cuKernelGetName=lambda kernel: (0, b"merge"),
    )  # fmt: skip
    package = types.ModuleType("cuda.bindings")
    package.driver, package.runtime = driver, runtime
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return runtime


def test_nodes_are_counted_and_kernels_named(cuda, graphs, monkeypatch):
    runtime = bindings(monkeypatch)
    recording = graphs.record(lambda: torch.ones(()))
    contents = recording.contents()
    assert contents.nodes == {"kernel": 3, "memcpy": 1}
    assert contents.kernels == {"gemm": 2, "merge": 1}
    assert (contents.pool_bytes, contents.peak_bytes) == (100, 2600)  # of this device
    failed = enum.IntEnum("Error", ["cudaErrorInvalidValue"]).cudaErrorInvalidValue
    runtime.cudaGraphGetNodes = lambda *_: (failed, None, None)
    with pytest.raises(RuntimeError, match="a CUDA graph cannot be read: cudaErrorInvalidValue"):
        recording.contents()


def test_without_cuda_bindings_only_the_memory_is_known(cuda, graphs, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    contents = graphs.record(lambda: torch.ones(())).contents()
    assert (contents.nodes, contents.kernels, contents.pool_bytes) == (None, None, 100)


def test_a_failed_recording_keeps_nothing_of_what_it_ran(graphs):
    """Graphs of autograd among it, whose nodes would go on to belong to the capture."""
    made = []

    def fails():
        tensor = torch.ones(1)
        made.append(weakref.ref(tensor))
        raise ValueError(tensor.shape)

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            graphs.record(fails)
        assert made[0]() is None
    finally:
        gc.enable()


def watched_step(cuda, monkeypatch, graphs, loss):
    """A step that writes down on which stream its forward and backward passes run."""
    monkeypatch.setattr(step_module, "graphs_on", lambda device: graphs)
    step = make_step(dropout=0.0)

    def watched(model, batch):
        cuda.calls.append(f"forward on {cuda.now}")
        return loss(model, batch)

    step._loss_fn = watched
    for param in step.model[4].parameters():
        param.register_post_accumulate_grad_hook(
            lambda param: cuda.calls.append(f"backward on {cuda.now}")
        )
    return step


ASIDE = [
    "side waits for default", "forward on side", "backward on side", "backward on side",
    "default waits for side",
]  # fmt: skip


def test_steps_after_a_failed_recording_stay_on_its_stream(cuda, graphs, monkeypatch):
    def reads_back(model, batch):
        if cuda.now == "captured":
            raise RuntimeError("a value was read back")
        return loss_fn(model, batch)

    step = watched_step(cuda, monkeypatch, graphs, reads_back)
    for k in range(WARM_UP + 1):
        step(get_batch(k))
    assert cuda.calls == ASIDE * (WARM_UP + 1)
    step(get_batch(WARM_UP + 1))  # which was to be recorded
    assert "forward on captured" in cuda.calls
    assert step.describe().why == "RuntimeError: a value was read back"
    assert cuda.calls[-5:] == ASIDE
    cuda.calls.clear()
    for k in range(3):
        step(get_batch(k))
    assert cuda.calls == ASIDE * 3
    assert cuda.now == "default"


def test_a_step_that_was_never_to_be_recorded_stays_where_it_is(cuda, graphs, monkeypatch):
    """Nothing of it has run elsewhere."""
    step = watched_step(
        cuda, monkeypatch, graphs, lambda model, batch: loss_fn(model, {**batch, "y": batch["y"]()})
    )
    for k in range(2):
        batch = get_batch(k)
        step({**batch, "y": lambda batch=batch: batch["y"]})
    assert "is a function" in step.describe().why
    assert cuda.calls == ["forward on default", "backward on default", "backward on default"] * 2
