"""Dense embedding bags whose rows are shared out: sums travel between processes, not rows.

Shape suffixes: N = entries of all bags of a process, B = bags of a process, D = width, P =
processes, R = rows that a process holds.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# By their names since torch 2.13, before which they had others.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RowShardedBag(nn.EmbeddingBag):
    """An embedding bag of which every process holds some rows, and looks them up for all.

    The indices of all processes are gathered, each process adds up those of its rows in every bag,
    and each gets the sums of its own bags. So a step exchanges indices and vectors of bags, as
    many as batches ask for, however large the table is. Gradients are averaged over processes. The
    weight is a DTensor, sharded by rows. Made by :func:`share_tables_`.
    """

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Add up bags; all processes call this, with as many bags each.

        Args:
            input: ``(bags, entries)`` integers, or ``(N,)`` with offsets.
            offsets: ``(bags,)``: where each bag begins.
            per_sample_weights: Not for sharded tables.

        Returns:
            ``(bags, width)`` sums or means.

        Raises:
            ValueError: For weights, missing offsets, or numbers of bags that differ.
            IndexError: If an index is no row.
        """
        if per_sample_weights is not None:
            raise ValueError("per_sample_weights are not for tables that are shared out by rows")
        if input.dim() == 1 and offsets is None:
            raise ValueError("indices (N,) need offsets, which say where bags begin")
        indices_N, bags_N, count = _flat(input, offsets)
        if offsets is not None and self.include_last_offset:
            count -= 1
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < self.num_embeddings:
            raise IndexError(f"an index is no row of {self.num_embeddings}")
        weight: Any = self.weight
        group = weight.device_mesh.get_group()
        begin = _rows_before(self.num_embeddings, group)
        local_RD = weight.to_local()
        sums_BD = _Lookup.apply(local_RD, indices_N, bags_N, count, begin, group)
        if self.mode == "sum":
            return sums_BD
        sizes_B = torch.bincount(bags_N, minlength=count).clamp(min=1)
        return sums_BD / sizes_B[:, None]


def share_tables_(model: nn.Module, mesh: Any) -> int:
    """Share the rows of a model's dense embedding bags out among the processes of a mesh.

    Every process calls this, with equal weights, before the optimizer is made.

    Returns:
        How many there are.

    Raises:
        ValueError: If a table is of a kind that cannot be shared out; says which, and why.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    tables = {n: m for n, m in model.named_modules() if type(m) is nn.EmbeddingBag}
    for name, table in tables.items():
        why = _why_not(table)
        if why is not None:
            raise ValueError(
                f"{name} {why}, and cannot be shared out by rows: change that, or keep the model "
                "whole in DistributedDataParallel (parallel.kind=ddp)"
            )
    for table in tables.values():
        grad = table.weight.requires_grad
        shared = distribute_tensor(table.weight.detach(), mesh, [Shard(0)])
        table.weight = nn.Parameter(shared, requires_grad=grad)
        table.__class__ = RowShardedBag
    return len(tables)


def _why_not(table: nn.EmbeddingBag) -> str | None:
    if table.mode == "max":
        return "takes the largest of a bag (mode='max')"
    if table.sparse:
        return "has sparse gradients (sparse=True)"
    if table.max_norm is not None or table.scale_grad_by_freq or table.padding_idx is not None:
        return "has max_norm, scale_grad_by_freq or padding_idx"
    return None


def _flat(input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Return all indices, the bag of each, and the number of bags (or offsets)."""
    if offsets is None:
        count, entries = input.shape
        bags = torch.arange(count, device=input.device).repeat_interleave(entries)
        return input.flatten(), bags, count
    places = torch.arange(len(input), device=input.device)
    return input, torch.searchsorted(offsets, places, right=True) - 1, len(offsets)


def _rows_before(rows: int, group: dist.ProcessGroup) -> int:
    """Return the number of the first row that this process holds, as DTensor shares rows out."""
    each = -(-rows // dist.get_world_size(group))
    return min(rows, dist.get_rank(group) * each)


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
        # Asked by every process: rows, and the bags they go to, numbered through all processes.
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
