"""A plugin of pytest by which tests that need a GPU run on a card that is only pretended."""

import contextlib
import os
import sys
import tempfile
import types

import pytest
import torch
import torch._dynamo
import torch.distributed.tensor
from torch import Tensor

from tests.simulated_card import card_graphs, places
from tests.simulated_card.places import CARD, Calls, Operations, counts, on_card, plain

_MIB, _GIB = 1 << 20, 1 << 30
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * _GIB,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=50 * _MIB,
    shared_memory_per_block_optin=227 << 10,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
)

_BEYOND = {
    "compile": "compiled code of a card is not simulated",
    "memory": "nor is its memory",
    "nodes_of": "nor what its graphs hold",
    "test_data_parallel.py": "nor are several cards",
    "test_cores.py": "torch's own checks of gradients and operators see through it",
}
"""Words in the names of tests that need a real card, and why."""


def pytest_configure(config) -> None:
    os.environ.setdefault("COMERA_CACHE", tempfile.mkdtemp(prefix="simulated-card-"))
    _install()


def pytest_collection_modifyitems(config, items) -> None:
    for item in items:
        reason = next((why for word, why in _BEYOND.items() if word in item.nodeid), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter) -> None:
    for what, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:9,} {what}")


def _install() -> None:
    """Put the pretended card in the place of ``torch.cuda``, for the rest of the process."""
    for name, value in _cuda().items():
        setattr(torch.cuda, name, value)
    _let_tensors_say_where_they_are()
    _run_autocast_on_the_cpu()
    _group_tensors_by_place()
    _emulate_kernels()
    Calls().__enter__()
    Operations().__enter__()


def _cuda() -> dict[str, object]:
    class device(contextlib.nullcontext):
        def __init__(self, which) -> None:
            super().__init__()

    random = types.SimpleNamespace(
        clone_state=lambda: {"captured": False}, graphsafe_set_state=places.random.update
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda which: None,
        "device": device,
        "get_device_name": lambda which=None: _PROPERTIES.name,
        "get_device_capability": lambda which=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "get_device_properties": lambda which=None: _PROPERTIES,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "mem_get_info": lambda which=None: (70 * _GIB, 80 * _GIB),
        "memory_allocated": lambda which=None: _MIB,
        "max_memory_allocated": lambda which=None: 2 * _MIB,
        "memory_reserved": lambda which=None: 4 * _MIB,
        "max_memory_reserved": lambda which=None: 4 * _MIB,
        "reset_peak_memory_stats": lambda which=None: None,
        "memory_snapshot": lambda *args, **kwargs: [],
        "empty_cache": lambda: None,
        "default_generators": (random,),
        "get_rng_state": lambda which="cuda": torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "Event": card_graphs.Event,
        "Stream": card_graphs.Stream,
        "stream": card_graphs.stream,
        "StreamContext": card_graphs.stream,
        "current_stream": card_graphs.current_stream,
        "default_stream": card_graphs.default_stream,
        "synchronize": card_graphs.synchronize,
        "CUDAGraph": card_graphs.Graph,
        "graph": card_graphs.capture_graph,
        "graph_pool_handle": lambda: (0, 7),
        "is_current_stream_capturing": lambda: places.capture is not None,
    }


def _let_tensors_say_where_they_are() -> None:
    Tensor.is_cuda = property(lambda self: on_card(self) or plain("is_cuda", self))
    Tensor.is_cpu = property(lambda self: not on_card(self) and plain("is_cpu", self))
    Tensor.device = property(lambda self: CARD if on_card(self) else plain("device", self))
    Tensor.get_device = lambda self: 0 if on_card(self) else -1
    Tensor.to = places.to
    Tensor.cuda = lambda self, *args, **kwargs: places.to(self, CARD)
    Tensor.cpu = lambda self, *args, **kwargs: places.to(self, places.HOST)
    Tensor.pin_memory = lambda self, *args: self.clone()

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return torch._C.Generator.__new__(cls, "cpu")

        device = CARD

    torch.Generator = Generator


def _run_autocast_on_the_cpu() -> None:
    def on_cpu(kind: str | None) -> str:
        return "cpu" if kind in (None, "cuda") else kind

    autocast, enabled, dtype = (
        torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype,
    )  # fmt: skip
    torch.autocast = lambda device_type, *args, **kwargs: autocast(
        on_cpu(device_type), *args, **kwargs
    )
    torch.is_autocast_enabled = lambda kind=None: enabled(on_cpu(kind))
    torch.get_autocast_dtype = lambda kind: dtype(on_cpu(kind))


def _group_tensors_by_place() -> None:
    """Tell torch's optimizers which lists of tensors are on the card: they ask C++ for that."""
    grouped = sys.modules["torch.utils._foreach_utils"]._group_tensors_by_device_and_dtype

    def group(lists, with_indices=False):
        found = {}
        for (device, dtype), value in grouped(lists, with_indices).items():
            first, *others = value[0]
            steps = [x for each in others for x in each if x is not None and not x.dim()]
            where = {on_card(x) for each in value[0] for x in each if x is not None}
            if steps and not any(map(on_card, steps)):  # torch leaves counts of steps on the CPU
                where = {on_card(x) for x in first}
            assert len(where) == 1, "tensors of one list are on several devices"
            found[CARD if where.pop() else device, dtype] = value
        return found

    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad"):
        sys.modules[name]._group_tensors_by_device_and_dtype = group


def _emulate_kernels() -> None:
    from comera.ops.kernels import launch as launches
    from comera.train import graphs

    in_c = launches._value

    def value_of(argument):
        if isinstance(argument, Tensor):
            assert on_card(argument), "a tensor of a launch is on the host"
        value = in_c(argument)
        card_graphs.keep_value(value)
        return value

    launches._value = value_of
    launches.start = card_graphs.launch
    launches.function = lambda *args: 1
    graphs._nodes = lambda graph: ({"kernel": 1}, {"simulated": 1})
