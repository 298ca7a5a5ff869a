"""Streams, events and CUDA graphs of a card that is only pretended."""

import contextlib
import itertools
import time

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.kernels.emulation import emulate
from tests.simulated_card import places
from tests.simulated_card.places import CARD, CaptureError, counts
from tests.train import tape

_VALUES_KEPT = 40
"""Arguments of the latest launches, to whose memory a launch points while it is prepared."""

values: list[object] = []
"""The latest arguments of launches, in C."""


def keep_value(value: object) -> None:
    """Keep an argument of a launch for as long as the launch may need it."""
    values.append(value)
    del values[:-_VALUES_KEPT]


def launch(file, name, device, sizes, threads, shared, pointers) -> None:
    """Run a kernel in the emulator, and note it in a capture."""
    counts[f"launch: {name}"] += 1
    emulate(file, name, sizes, threads, shared, pointers)
    if places.capture is not None:
        places.capture.note_launch((file, name, list(sizes), threads, shared, pointers))


class _Recorder(tape.Recorder):
    """Notes the operations and launches of a capture, which changes no tensor in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []  # a graph holds the memory of all that was made in it
        self.broken = False  # by something that no capture allows

    def run(self, func, args, kwargs):
        try:
            tape.check_capturable(func, args, kwargs)
        except tape.NotCapturableError:
            self.broken = True
            raise
        args, kwargs = tree_map(_detached, (args, kwargs))
        made = super().run(func, args, kwargs)
        self.kept.append(tree_map(_detached, made))
        return made

    def note_launch(self, call: tuple) -> None:
        self.kept.append(values[-len(call[-1]) :])
        self.calls.append(call)


def _detached(value):
    return value.detach() if isinstance(value, Tensor) else value


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.recorder: _Recorder | None = None
        self.keep_graph = keep_graph

    def capture_begin(self, *args, **kwargs) -> None:
        assert places.capture is None, "one capture at a time"
        places.capture = _Recorder()
        places.random["captured"] = True
        self._random = torch.get_rng_state()

    def capture_end(self) -> None:
        self.recorder, places.capture = places.capture, None
        torch.set_rng_state(self._random)
        self.recorder.undo()
        if self.recorder.broken:  # torch raises before it takes the generator out of the capture
            raise RuntimeError("operation failed due to a previous error during capture")
        places.random["captured"] = False

    def instantiate(self) -> None:
        assert self.keep_graph

    @torch.no_grad()
    def replay(self) -> None:
        assert self.recorder is not None, "replayed before it was captured, or after a reset"
        for call in self.recorder.calls:
            is_launch = isinstance(call[0], str)  # which begins with the file of the kernel
            (emulate if is_launch else tape.replay_call)(*call)

    def reset(self) -> None:
        self.recorder = None

    def pool(self) -> tuple[int, int]:
        return 0, id(self)

    def raw_cuda_graph(self) -> int:
        return 1

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, *args) -> None: ...


class Stream:
    """Stands for ``torch.cuda.Stream``: what is asked of it is done at once."""

    _numbers = itertools.count()
    device, device_index = CARD, 0

    def __init__(self, device=None, priority: int = 0, **kwargs) -> None:
        self.cuda_stream = next(self._numbers)

    def wait_stream(self, other) -> None: ...

    def wait_event(self, event) -> None: ...

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        return True

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream


_streams = [Stream()]


def current_stream(device=None) -> Stream:
    return _streams[-1]


def default_stream(device=None) -> Stream:
    return _streams[0]


@contextlib.contextmanager
def stream(entered):
    if entered is None:
        yield
        return
    before = list(_streams)
    _streams.append(entered)
    try:
        yield
    finally:
        _streams[:] = before


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, *args, **kwargs) -> None:
        self._at = 0.0

    def record(self, stream=None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        synchronize()

    def wait(self, stream=None) -> None: ...

    def elapsed_time(self, other) -> float:
        return max(1e-6, 1e3 * (other._at - self._at))


class capture_graph(contextlib.ContextDecorator):
    """Stands for ``torch.cuda.graph``."""

    def __init__(self, graph: Graph, pool=None, stream=None, capture_error_mode="global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        self._graph, self._stream = graph, stream or Stream()

    def __enter__(self) -> None:
        _streams.append(self._stream)
        self._graph.capture_begin()

    def __exit__(self, *problem) -> None:
        self._graph.capture_end()  # if it raises, torch's stream stays
        _streams.pop()


def synchronize(*args) -> None:
    if places.capture is not None:
        raise CaptureError("the host waits for the card in a capture")
