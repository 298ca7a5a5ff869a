"""Count, list, resize and check parameters, and renew wrappers of those that were replaced."""

import gc
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from comera.extras import listed

_fused_steps = 0
"""Steps of optimizers with ``fused=True``, whose writes no tensor's version counts."""

_watching = WeakSet["Undisturbed"]()
"""Models that are being saved."""

_resized = 0
"""Number of times that a parameter was given another shape."""

_compared = WeakKeyDictionary[Optimizer, tuple[int, Any]]()
"""That number, and the state, when :func:`check_fused_state` last found shapes that agree."""


def check_fused_state(optimizer: Optimizer, *_: Any) -> None:
    """Raise ``ValueError`` if a fused step would read and write beyond the end of its state.

    Shapes are compared in the first step, with a loaded state, and after a parameter was resized.
    """
    if torch.compiler.is_compiling():
        return
    resized, state = _compared.get(optimizer, (None, None))
    if resized == _resized and state is optimizer.state:
        return
    fused = isinstance(optimizer, torch.optim.Adam | torch.optim.SGD | torch.optim.Adagrad)
    groups = [group for group in optimizer.param_groups if fused and group.get("fused")]
    for param in (param for group in groups for param in group["params"]):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and key != "step" and value.shape != param.shape:
                raise ValueError(
                    f"state {key!r} of {type(optimizer).__name__} has shape {tuple(value.shape)}, "
                    f"and its parameter {tuple(param.shape)}, as where the state dict of a model "
                    "of other ranks was loaded: load the optimizer's state of the same step too, "
                    "or make a new optimizer"
                )
    _compared[optimizer] = _resized, optimizer.state


hooks.register_optimizer_step_pre_hook(check_fused_state)


@hooks.register_optimizer_step_post_hook
def _count_step(optimizer: Optimizer, *_: Any) -> None:
    global _fused_steps
    if torch.compiler.is_compiling():  # a graph would be compiled for each count
        return
    if any(group.get("fused") for group in optimizer.param_groups):
        _fused_steps += 1
        for watched in list(_watching):
            watched.see(optimizer)


class Undisturbed:
    """Watch named tensors for writes, while a model is saved; writes via ``.data`` go unnoticed."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._versions = {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not tensor.is_inference()
        }
        self._fused: set[int] = set()  # addresses of what fused optimizers have stepped
        _watching.add(self)

    def see(self, optimizer: Optimizer) -> None:
        """Record what a fused optimizer has stepped, whose writes no version counts."""
        for group in optimizer.param_groups:
            if group.get("fused"):
                local = (getattr(param, "_local_tensor", param) for param in group["params"])
                self._fused.update(param.data_ptr() for param in local)

    def check(self) -> None:
        """Raise RuntimeError with the names of tensors that were written to since the start."""
        _watching.discard(self)
        written = [
            name for name, (tensor, at) in self._versions.items()
            if tensor._version > at or (self._fused and tensor.data_ptr() in self._fused)
        ]  # fmt: skip
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


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a flat array of numpy, a view if the tensor is contiguous."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


def checksum(tensor: Tensor, start: int = 0) -> int:
    """Return a checksum of a tensor's bytes, continued from ``start``."""
    return zlib.crc32(bytes_of(tensor), start)


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
        kinds = [DistributedDataParallel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        # Not all objects: a tuple that another thread is making may have no second reference.
        found = [
            each
            for each in gc.get_referrers(*kinds)
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


def versions_of(params: Sequence[Tensor]) -> list[int] | None:
    """Return numbers that change if parameters are written to, but for writes into ``.data``.

    None in ``inference_mode``.
    """
    try:
        versions = [param._version for param in params]
        # others, such as fake tensors, have no address
        places = [param.data_ptr() for param in params if type(param) is nn.Parameter]
        return [_fused_steps, *versions, *places]
    except RuntimeError:  # an inference tensor
        return None


def may_share(made: Tensor, param: Tensor) -> bool:
    """Return whether a tensor computed from ``param`` passes on the gradient ``param`` needs.

    Where no gradient is wanted, one with a gradient is not taken either: a teacher whose numbers
    stand in the student's parameters meanwhile, written through ``.data``, is seen to.
    """
    wanted = torch.is_grad_enabled()
    return wanted if made.requires_grad else not (wanted and param.requires_grad)


_NUMBERS = tuple(map(str, range(64)))


def params_of(params: nn.ParameterList) -> list[Tensor]:
    """List parameters by number, or the tensors by which FSDP, pruning and the like replace them.

    It is faster than iteration of ``ParameterList``: forward passes and rank learning call it.
    """
    found = params._parameters
    if tuple(found) == _NUMBERS[: params._size] and type(None) not in map(type, found.values()):
        return list(found.values())  # type: ignore[arg-type]
    for hook in params._forward_pre_hooks.values():  # torch.nn.utils.prune computes in these
        hook(params, ())
    return [params[k] for k in range(len(params))]  # type: ignore[misc]


@torch.no_grad()
def set_data_(param: Tensor, new: Tensor) -> None:
    """Replace a parameter's data, of any shape, and drop its gradient.

    The dtype changes for a moment, as torch then makes a new gradient accumulator: the old one,
    which a graph may keep alive, expects the old shape.
    """
    global _resized
    _resized += 1
    param.grad = None
    other = torch.float64 if new.dtype != torch.float64 else torch.float32
    param.data = torch.empty(0, dtype=other, device=new.device)
    param.data = new


@torch.no_grad()
def resize_(param: Tensor, size: Sequence[int]) -> None:
    """Resize a parameter in place, without defined contents; it stays the same object."""
    if param.shape != torch.Size(size):
        set_data_(param, torch.empty(size, device=param.device, dtype=param.dtype))


def check_unflattened(params: Iterable[Tensor], what: str) -> None:
    """Raise ``ValueError``, naming ``what``, for parameters of ``FullyShardedDataParallel``."""
    if any(hasattr(param, "_fsdp_flattened") for param in params):
        raise ValueError(
            f"{what} does not take the flat parts of parameters in FullyShardedDataParallel: shard "
            "by torch.distributed.fsdp.fully_shard, or leave the model whole in "
            "DistributedDataParallel"
        )


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, or a flat part in ``FullyShardedDataParallel``."""
    # By name: the class need not be imported to be asked for.
    is_plain = type(param) is nn.Parameter
    of_dtensor = not is_plain and any(cls.__name__ == "DTensor" for cls in type(param).__mro__)
    return of_dtensor or hasattr(param, "_fsdp_flattened")
