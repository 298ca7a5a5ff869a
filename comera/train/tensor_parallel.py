"""Models whose dense layers are split, so that several processes compute one product."""

import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from comera.extras import listed

_log = logging.getLogger("comera")

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def split_dense_(model: nn.Module) -> nn.Module:
    """Split the dense layers of a model in the shape of LLaMA among all processes (DTensor).

    By torch's ``parallelize_module``, as in Megatron (Shoeybi et al. 2019, arXiv 1909.08053): the
    first layers of an attention and of a feed-forward part by columns, the last by rows, which
    needs one sum over the processes in each direction. Where one of the layers is a tensor train,
    it stays whole and every process computes it, and the dense ones beside it are split by columns
    and their outputs put together. Embeddings are split by rows, other layers by columns. Tensor
    trains, norms, and dense layers with a bias or a tied weight stay whole in each.

    All processes train on the same batch, with equal numbers from dropout. Every process calls
    this, with equal weights, before the optimizer is made. :class:`~comera.TrainStep`, rank
    learning and optimizers are as after :func:`~comera.train.sharded.shard_dense_`.

    Args:
        model: The model, such as ``comera.models.decoder.CausalLanguageModel`` or
            ``transformers.LlamaForCausalLM``.

    Returns:
        The model, changed in place.

    Raises:
        ValueError: If it has no such parts, none of them is dense, or sizes cannot be divided by
            the number of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    count = dist.get_world_size()
    plan = plan_split(model, count)
    left = [
        name
        for name, module in model.named_modules()
        if type(module) in _SPLIT and _stays_whole(model, module)
    ]
    if left and dist.get_rank() == 0:
        _log.info(
            "%d dense layers have a bias or a tied weight and stay whole: %s",
            len(left),
            listed(left),
        )
    mesh = init_device_mesh(next(model.parameters()).device.type, (count,))
    return parallelize_module(model, mesh, plan)


def plan_split(model: nn.Module, count: int) -> dict[str, Any]:
    """Return how :func:`split_dense_` splits a model among so many processes, by layers' names.

    Args:
        model: The model, on any device, ``meta`` too.
        count: Number of processes.

    Raises:
        ValueError: As :func:`split_dense_` does.
    """
    parts = list(_parts(model))
    if not parts:
        raise ValueError(
            "the model is not in the shape of LLaMA: no module has "
            f"{listed(_ATTENTION)}, or {listed(_FEED_FORWARD)}: share its dense matrices out by "
            "shard_dense_ (parallel.kind=fsdp), or leave it whole in DistributedDataParallel"
        )
    whole = {name for name, module in model.named_modules() if _stays_whole(model, module)}
    plan: dict[str, Any] = {}
    for name, module, keys in parts:
        plan |= _plan_of_part(name, module, keys, whole, count)
    inside = {f"{name}.{key}" for name, _, keys in parts for key in keys}
    for name, module in model.named_modules():
        if name not in inside and name not in whole:
            plan |= _plan_of_rest(name, module, count)
    if not plan:
        raise ValueError(
            "the model has no dense layers without bias to split: leave it whole in every process, "
            "in DistributedDataParallel (parallel.kind=ddp)"
        )
    return plan


_SPLIT = (nn.Linear, nn.Embedding)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    for name, module in model.named_modules():
        for keys in (_ATTENTION, _FEED_FORWARD):
            if all(isinstance(getattr(module, key, None), nn.Module) for key in keys):
                yield name, module, keys


def _stays_whole(model: nn.Module, module: nn.Module) -> bool:
    """Tell whether a layer is of another kind, has a bias, or shares its weight with another."""
    if type(module) not in _SPLIT:
        return True
    weight: Any = module.weight
    users = [m for m in model.modules() if getattr(m, "weight", None) is weight]
    return getattr(module, "bias", None) is not None or len(users) > 1


def _plan_of_part(
    name: str, module: nn.Module, keys: tuple[str, ...], whole: set[str], count: int
) -> dict[str, Any]:
    """Return how the layers of an attention or a feed-forward part are split, by their names."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    names = [f"{name}.{key}".lstrip(".") for key in keys]
    layers = [getattr(module, key) for key in keys]
    dense = [(n, layer) for n, layer in zip(names, layers, strict=True) if n not in whole]
    if len(dense) < len(layers):
        for each, layer in dense:
            _check_divides(each, layer.out_features, 1, count)
        return {each: ColwiseParallel(output_layouts=Replicate()) for each, _ in dense}
    head: Any = 1
    if keys == _ATTENTION:
        head = getattr(module, "head_width", None) or getattr(module, "head_dim", 0)
        if not head:
            raise ValueError(
                f"{name} has neither head_dim nor head_width, which say where heads begin"
            )
    for each, layer in dense[:-1]:
        _check_divides(each, layer.out_features, head, count)
    return {n: ColwiseParallel() for n in names[:-1]} | {names[-1]: RowwiseParallel()}


def _plan_of_rest(name: str, module: nn.Module, count: int) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(module, nn.Embedding):
        return {name: RowwiseParallel(input_layouts=Replicate())}
    assert isinstance(module, nn.Linear), "of another kind it would stay whole"
    _check_divides(name, module.out_features, 1, count)
    return {name: ColwiseParallel(output_layouts=Replicate())}


def _check_divides(name: str, width: int, head: int, count: int) -> None:
    units, what = width // head, "heads" if head > 1 else "columns"
    if units % count:
        raise ValueError(
            f"{name} has {units} {what}, which {count} processes cannot have equal parts of: start "
            f"a number of processes that divides {units}, or make tensor trains of such layers"
        )
