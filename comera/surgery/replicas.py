"""A ``DistributedDataParallel`` around a model whose parameters change their shapes."""

import gc

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comera.nn.module import tensor_trains


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Find every ``DistributedDataParallel`` that holds a tensor-train layer of a model.

    A model does not know what it is wrapped in, so all objects of this process are looked
    through: a matter of milliseconds, for what happens once or twice in a run.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    layers = {id(layer) for layer in tensor_trains(model).values()}
    gc.collect()  # one that was given up may live in a cycle
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), DistributedDataParallel)
        and "reducer" in vars(found)  # else its constructor has raised
        and any(id(module) in layers for module in found.modules())
    ]


def renew_(wrapper: DistributedDataParallel) -> None:
    """Let a ``DistributedDataParallel`` average gradients of the shapes that parameters have now.

    It sorts them into buffers once and for all, and follows each parameter by an object that goes
    with its old shape. This is done as by its own ``__setstate__``; all processes do it at the same
    step.
    """
    # The old one first: accumulators of gradients live as long as it, on their old stream.
    del wrapper.reducer, wrapper.logger
    params, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(params)
    wrapper._ddp_init_helper(params, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()  # type: ignore[union-attr]
    for hook, state in wrapper._comm_hooks:
        dist._register_comm_hook(wrapper.reducer, state, hook)
