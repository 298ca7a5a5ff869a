"""Shard the dense matrices of models among processes, while tensor trains stay whole.

Shape suffixes: N = entries of all bags of a process, B = bags of a process, D = width, P =
processes, R = rows that a process holds.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from comera.nn.module import tensor_trains
from comera.ops.table.distinct_rows import bag_of_entries
from comera.optim.state_layout import AnyOptimizer
from comera.params import check_unflattened, is_sharded

# Before torch 2.13 they had other names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RowShardedBag(nn.EmbeddingBag):
    """An embedding bag whose rows are sharded over all processes, made by :func:`shard_dense_`.

    A step exchanges indices and sums of bags, so its traffic does not depend on the table's size.
    Gradients are averaged over processes. The weight is a DTensor.
    """

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return sums or means ``(bags, width)``; all processes call this with equally many bags.

        ``input`` are integers ``(bags, entries)``, or ``(N,)`` with ``offsets (bags,)``. Raises
        ``ValueError`` for per-sample weights, missing offsets, or unequal numbers of bags, and
        ``IndexError`` if an index is no row.
        """
        if per_sample_weights is not None:
            raise ValueError("per_sample_weights are not for tables that are shared out by rows")
        if input.dim() == 1 and offsets is None:
            raise ValueError("indices (N,) need offsets, which say where bags begin")
        if offsets is None:
            count, entries = input.shape
            offsets = torch.arange(count, device=input.device) * entries
        else:
            count = len(offsets) - self.include_last_offset
        indices_N = input.flatten()
        bags_N = bag_of_entries(offsets, len(indices_N))
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"an index is no row of {self.num_embeddings}")
        weight: Any = self.weight
        group = weight.device_mesh.get_group()
        # As DTensor shards rows.
        each = -(-self.num_embeddings // dist.get_world_size(group))
        begin = min(self.num_embeddings, dist.get_rank(group) * each)
        sums_BD = _Lookup.apply(weight.to_local(), indices_N, bags_N, count, begin, group)
        if self.mode == "sum":
            return sums_BD
        return sums_BD / torch.bincount(bags_N, minlength=count).clamp(min=1)[:, None]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_RD: Tensor,
        indices_N: Tensor,
        bags_N: Tensor,
        count: int,
        begin: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        processes = dist.get_world_size(group)
        sizes_P2 = indices_N.new_empty(processes, 2)
        mine = torch.tensor([[len(indices_N), count]], device=indices_N.device).to(indices_N)
        _gather(sizes_P2, mine, group=group)
        longest, counts = int(sizes_P2[:, 0].max()), sizes_P2[:, 1].tolist()
        if counts != [count] * processes:
            raise ValueError(
                f"the processes ask for {counts} bags; tables that are shared out by rows need as "
                "many in each"
            )
        # Rows that every process asks for, and their bags, numbered through all processes.
        asked = indices_N.new_full((2, longest), -1)
        asked[0, : len(indices_N)] = indices_N
        asked[1, : len(indices_N)] = bags_N + dist.get_rank(group) * count
        all_asked = asked.new_empty(processes * 2, longest)
        _gather(all_asked, asked, group=group)
        rows, bags = all_asked.unflatten(0, (processes, 2)).transpose(0, 1).flatten(1)
        held = (rows >= begin) & (rows < begin + len(local_RD))
        rows, bags = rows[held] - begin, bags[held]
        sums_PBD = local_RD.new_zeros(processes * count, local_RD.shape[1])
        sums_PBD.index_add_(0, bags, local_RD[rows])
        sums_BD = local_RD.new_empty(count, local_RD.shape[1])
        _reduce_scatter(sums_BD, sums_PBD, group=group)
        ctx.save_for_backward(rows, bags)
        ctx.group, ctx.shape = group, local_RD.shape
        return sums_BD

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, bags = ctx.saved_tensors
        processes = dist.get_world_size(ctx.group)
        grad_PBD = grad_BD.new_empty(processes * len(grad_BD), grad_BD.shape[1])
        _gather(grad_PBD, grad_BD.contiguous(), group=ctx.group)
        grad_RD = grad_BD.new_zeros(ctx.shape).index_add_(0, rows, grad_PBD[bags] / processes)
        return grad_RD, None, None, None, None, None


def shard_dense_(model: nn.Module) -> nn.Module:
    """Shard the dense matrices of a model among all processes, by ``fully_shard``, in place.

    Tensor trains, biases and norms stay whole in each process. Blocks of an ``nn.ModuleList``
    gather their matrices one after the other. Dense embedding bags become
    :class:`~comera.train.sharded.RowShardedBag`. Every process calls this, with equal weights,
    before the optimizer is made. Raises ``ValueError`` if the model has no dense matrices, or has
    an embedding bag that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    small = {id(p) for layer in tensor_trains(model).values() for p in layer.parameters()}
    whole = {p for p in model.parameters() if p.dim() < 2 or id(p) in small}
    if all(p in whole for p in model.parameters()):
        raise ValueError(
            "the model has no dense matrices to share out: leave it whole in every process, in "
            "DistributedDataParallel (parallel=ddp)"
        )
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tables = {n: m for n, m in model.named_modules() if type(m) is nn.EmbeddingBag}
    for name, table in tables.items():
        rare = table.max_norm is not None or table.scale_grad_by_freq
        why = None
        if table.mode == "max":
            why = "takes the largest of a bag (mode='max')"
        elif table.sparse:
            why = "has sparse gradients (sparse=True)"
        elif rare or table.padding_idx is not None:
            why = "has max_norm, scale_grad_by_freq or padding_idx"
        if why is not None:
            raise ValueError(
                f"{name} {why}, and cannot be shared out by rows: change that, or keep the model "
                "whole in DistributedDataParallel (parallel=ddp)"
            )
    for table in tables.values():
        grad = table.weight.requires_grad
        shared = distribute_tensor(table.weight.detach(), mesh, [Shard(0)])
        table.weight = nn.Parameter(shared, requires_grad=grad)
        table.__class__ = RowShardedBag
    whole |= {param for param in model.parameters() if is_sharded(param)}  # fully_shard's no more
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in (block for blocks in lists for block in blocks):
        if any(p not in whole for p in block.parameters()):
            fully_shard(block, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    return model


class Sharded:
    """Averages and clips gradients of a model with sharded parameters.

    Parameters are sharded by :func:`shard_dense_` or torch's ``parallelize_module``; this class
    averages the gradients of whole parameters. Raises ``ValueError`` if the optimizer cannot step
    parts of matrices, or would step sharded and whole parameters in one call.
    """

    def __init__(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        check_unflattened(model.parameters(), "TrainStep")
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
                    f"the optimizer's group {group.get('name', '')!r} holds parameters that are "
                    "shared out and others that are whole, which torch does not step together: "
                    "make a group of each, or leave the model whole in DistributedDataParallel"
                )
        self._params = list(model.parameters())
        shared: Any = next(param for param in self._params if is_sharded(param))
        self.group: dist.ProcessGroup = shared.device_mesh.get_group()

    @torch.no_grad()
    def average_(self) -> None:
        """Average gradients of whole parameters; shard whole gradients of sharded parameters."""
        for param in filter(is_sharded, self._params):
            grad: Any = param.grad
            if grad is not None and grad.placements != param.placements:  # type: ignore[attr-defined]
                param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
        grads = [p.grad for p in self._params if p.grad is not None and not is_sharded(p)]
        if not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size(self.group)
        dist.all_reduce(flat, group=self.group)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    @torch.no_grad()
    def clip_(self, largest: float) -> Tensor:
        """Clip whole and sharded gradients to a common norm ``largest``; return the norm before."""
        grads: list[Any] = [param.grad for param in self._params if param.grad is not None]
        split = [is_sharded(grad) and any(p.is_shard() for p in grad.placements) for grad in grads]
        local = [grad.to_local() if is_sharded(grad) else grad for grad in grads]
        dtype = functools.reduce(torch.promote_types, (g.dtype for g in grads), torch.float32)
        square, rest = torch.zeros((2, 1), dtype=dtype, device=grads[0].device).unbind()
        for grad, part in zip(local, split, strict=True):  # what is replicated counts once
            (square if part else rest).add_(grad.to(dtype).square().sum())
        dist.all_reduce(square, group=self.group)
        norm = (square + rest).squeeze().sqrt()
        share = (largest / (norm + 1e-6)).clamp(max=1.0)
        for grad in local:
            grad.mul_(share)
        return norm


def whole_state(state: Any) -> Any:
    """Return a state with whole tensors instead of sharded ones; all processes call this."""
    return tree_map(lambda leaf: leaf.full_tensor() if is_sharded(leaf) else leaf, state)


def shared_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    like = dict(zip(numbers, params, strict=True))
    state = {
        number: {key: shared_like(like[number], value) for key, value in parts.items()}
        for number, parts in saved["state"].items()
    }
    return {**saved, "state": state}


def shared_like(like: Any, value: Any) -> Any:
    """Shard a tensor like ``like`` if that is sharded and has its shape; else leave it."""
    from torch.distributed.tensor import distribute_tensor

    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
