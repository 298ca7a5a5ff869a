"""Count and check the parameters of models, and renew wrappers of those that were replaced."""

import gc
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comera.extras import listed


class Undisturbed:
    """Watch named tensors for writes, while a model is saved; writes via ``.data`` go unnoticed."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._versions = {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not tensor.is_inference()
        }

    def check(self) -> None:
        """Raise RuntimeError with the names of tensors that were written to since the start."""
        written = [name for name, (tensor, at) in self._versions.items() if tensor._version > at]
        if written:
            raise RuntimeError(
                f"written to while the model was being saved: {listed(written)}. That would save a "
                "mixture of before and after; save between two steps, or save a copy that was made "
                "between them: copy.deepcopy(model)"
            )


class ModelSize(NamedTuple):
    """Number of parameters of a model and their bytes; shared ones count once."""

    params: int
    bytes: int


def model_size(model: nn.Module) -> ModelSize:
    """Count the parameters of a model on any device, even ``meta``."""
    params = list(model.parameters())
    return ModelSize(sum(param.numel() for param in params), sum(param.nbytes for param in params))


def checksum(tensor: Tensor, start: int = 0) -> int:
    """Return a checksum of a tensor's bytes, continued from ``start``."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return zlib.crc32(data, start)


_looked: tuple[object, Mapping[int, DistributedDataParallel]] = None, {}
"""What ``during`` was in the last call of :func:`wrappers_of`, and all wrappers there were."""


def wrappers_of(
    modules: Iterable[nn.Module], during: object = None
) -> list[DistributedDataParallel]:
    """Return every ``DistributedDataParallel`` around one of the modules.

    It takes up to half a second; calls in a row with one object ``during`` look only once.
    """
    global _looked
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if during is None or during is not _looked[0]:
        gc.collect()  # dropped ones may live in a cycle
        found = [
            each
            for each in gc.get_objects()
            if issubclass(type(each), DistributedDataParallel)
            and "reducer" in vars(each)  # else its constructor has raised
        ]
        _looked = during, WeakValueDictionary(enumerate(found))
    wanted = set(map(id, modules))
    return [
        wrapper
        for wrapper in _looked[1].values()
        if any(id(module) in wanted for module in wrapper.modules())
    ]


def renew_wrappers_(modules: Iterable[nn.Module], during: object = None) -> None:
    """Call :func:`renew_` for :func:`wrappers_of`, after parameters were replaced or resized."""
    for wrapper in wrappers_of(modules, during):
        renew_(wrapper)


def renew_(wrapper: DistributedDataParallel) -> None:
    """Rebuild the buffers of a ``DistributedDataParallel``; all processes call this together."""
    # The old one first: accumulators of gradients live as long as it, on their old stream.
    del wrapper.reducer, wrapper.logger
    params, sparse = wrapper._build_params_for_reducer()
    wrapper._module_parameters = params  # else it would hold what was replaced
    names = wrapper._build_debug_param_to_name_mapping(params)
    wrapper._ddp_init_helper(params, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()  # type: ignore[union-attr]
    state: Any
    for hook, state in wrapper._comm_hooks:
        if hasattr(state, "error_dict"):  # PowerSGD's memories of the buckets: it starts anew
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
            state.iter = 0
        dist._register_comm_hook(wrapper.reducer, state, hook)
