"""Models whose dense matrices are shared out among processes, while tensor trains stay whole."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from comera.nn.module import tensor_trains
from comera.optim.unwrap import AnyOptimizer
from comera.params import is_sharded
from comera.train.sharded_tables import share_tables_


def shard_dense_(model: nn.Module) -> nn.Module:
    """Share the dense matrices of a model out among all processes, by ``fully_shard``.

    Tensor trains, biases and norms stay whole in each process: they are small, and what changes
    ranks needs them so. Blocks of an ``nn.ModuleList`` gather their matrices one after the other.
    Rows of dense embedding bags are looked up where they are, by
    :class:`~comera.train.sharded_tables.RowShardedBag`. Every process calls this, with equal
    weights, before the optimizer is made.

    Returns:
        The model, changed in place.

    Raises:
        ValueError: If it has no dense matrices, or an embedding bag that cannot be shared out.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    trains = tensor_trains(model).values()
    small = {id(p) for layer in trains for p in layer.parameters()}
    whole = {p for p in model.parameters() if p.dim() < 2 or id(p) in small}
    if all(p in whole for p in model.parameters()):
        raise ValueError(
            "the model has no dense matrices to share out: leave it whole in every process, in "
            "DistributedDataParallel (parallel.kind=ddp)"
        )
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    share_tables_(model, mesh)
    whole |= {param for param in model.parameters() if is_sharded(param)}  # fully_shard's no more
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in (block for blocks in lists for block in blocks):
        if any(p not in whole for p in block.parameters()):
            fully_shard(block, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    return model


class Sharded:
    """What a training step has to do between its parts for a model of which parts are shared out.

    By :func:`shard_dense_` or :func:`~comera.train.tensor_parallel.split_dense_`.

    Args:
        model: The model. ``fully_shard`` averages the gradients of what it has shared out, and of
            products that processes compute together they are what they should be; those of what is
            whole are averaged here.
        optimizer: Its optimizer.

    Raises:
        ValueError: If the optimizer cannot step parts of matrices, or would step them together with
            whole ones.
    """

    def __init__(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        _check_steps_parts(optimizer)
        self._params = list(model.parameters())
        shared: Any = next(param for param in self._params if is_sharded(param))
        self.group: dist.ProcessGroup = shared.device_mesh.get_group()

    @torch.no_grad()
    def average_(self) -> None:
        """Average the gradients of parameters that every process holds whole; split the others."""
        for param in filter(is_sharded, self._params):
            _split_gradient_(param)
        grads = [p.grad for p in self._params if p.grad is not None and not is_sharded(p)]
        if not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size(self.group)
        dist.all_reduce(flat, group=self.group)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    @torch.no_grad()
    def clip_(self, largest: float) -> Tensor:
        """Scale all gradients to a norm of at most ``largest``; returns the norm before.

        As ``nn.utils.clip_grad_norm_``, which does not take whole and shared tensors together.
        """
        pairs = [(p, p.grad) for p in self._params if p.grad is not None]
        shared = [_local(grad) for param, grad in pairs if is_sharded(param)]
        whole = [grad for param, grad in pairs if not is_sharded(param)]
        square = _square_of(shared, self._params[0])
        dist.all_reduce(square, group=self.group)
        norm = (square + _square_of(whole, self._params[0])).sqrt()
        share = (largest / (norm + 1e-6)).clamp(max=1.0)
        for grad in (*shared, *whole):
            grad.mul_(share)
        return norm


def _check_steps_parts(optimizer: AnyOptimizer) -> None:
    name = type(optimizer).__name__
    why = None if name == "MuonAdamW" else getattr(optimizer, "needs_whole_matrices", None)
    for group in optimizer.param_groups:
        kinds = {is_sharded(param) for param in group["params"]}
        if True in kinds and why is not None:
            raise ValueError(
                f"{name} {why}, and fully_shard has shared some out: use torch.optim.AdamW or "
                "comera.MuonAdamW, or leave the model whole in DistributedDataParallel"
            )
        if len(kinds) == 2:
            raise ValueError(
                f"the optimizer's group {group.get('name', '')!r} holds parameters that are shared "
                "out and others that are whole, which torch does not step together: make a group "
                "of each, or leave the model whole in DistributedDataParallel"
            )


def has_shared_parts(model: nn.Module) -> bool:
    """Tell whether any parameter of a model is shared out among processes."""
    return any(map(is_sharded, model.parameters()))


def whole_state(state: Any) -> Any:
    """Replace the tensors of a state that are shared out by whole ones; every process calls it."""
    return tree_map(lambda leaf: leaf.full_tensor() if _is_shared(leaf) else leaf, state)


def shared_model_state(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Share a whole state out as the tensors of a model are; every process has all of it."""
    mine = model.state_dict()
    return {name: _shared_like(mine.get(name), value) for name, value in saved.items()}


def shared_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Share the whole state of an optimizer out as its parameters are."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    like = dict(zip(numbers, params, strict=True))
    state = {
        number: {key: _shared_like(like[number], value) for key, value in parts.items()}
        for number, parts in saved["state"].items()
    }
    return {**saved, "state": state}


def _shared_like(like: Any, value: Any) -> Any:
    """Share a tensor out as one of its shape is; return anything else as it is."""
    from torch.distributed.tensor import distribute_tensor

    if not _is_shared(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_sharded(leaf)


def _split_gradient_(param: Any) -> None:
    """Let a process have its part of a gradient alone: of an embedding it may have the whole."""
    if param.grad is not None and param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)


def _local(grad: Any) -> Tensor:
    return grad.to_local()


def _square_of(grads: Iterable[Tensor], like: Tensor) -> Tensor:
    square = torch.zeros((), device=like.device)
    for grad in grads:
        square += grad.float().square().sum()
    return square
