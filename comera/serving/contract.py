"""Contract the cores of a layer once and for all, pruned ranks left out, in float64."""

import torch
from torch import Tensor

from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule
from comera.nn.table import HotRows, TTTable
from comera.ops.cores import is_open


@torch.no_grad()
def thin_factors(layer: TTLinear | HotRows) -> tuple[Tensor, Tensor]:
    """Return A ``(in, R)`` and B ``(R, out)`` of a layer that is ``x @ A @ B``.

    R is the bond between the two sides without its pruned ranks, at least one; the dtype is that of
    the cores.
    """
    split, dtype = layer.shape.split, layer.cores[0].dtype
    # as the cores of a table whose columns are of width one
    cores = [core.unsqueeze(2) for core in _open_cores(layer)]
    left, right = (_joined(part).squeeze(2) for part in (cores[:split], cores[split:]))
    left, right = left.squeeze(0), right.squeeze(-1)
    if isinstance(layer, TTLinear):
        left, right = left[: layer.in_features], right[:, : layer.out_features]
    return left.to(dtype).contiguous(), right.to(dtype).contiguous()


@torch.no_grad()
def table_factors(table: TTTable) -> tuple[Tensor, Tensor]:
    """Return ``left (V, P, R)`` and ``right (W, R, Q)`` of the rows of a table that are not hot.

    Row ``v * W + w`` is ``left[v] @ right[w]``; the dtype is that of the cores.
    """
    split, dtype = table.shape.split, table.cores[0].dtype
    cores = _open_cores(table)
    left, right = _joined(cores[:split]).squeeze(0), _joined(cores[split:]).squeeze(-1)
    return left.to(dtype).contiguous(), right.transpose(0, 1).to(dtype).contiguous()


def _open_cores(layer: TensorTrainModule) -> list[Tensor]:
    """Return the cores in float64 with gates multiplied in, and only the ranks that are open."""
    cores = [core.detach().double() for core in layer.cores]
    for k, gate in enumerate(layer.gates):
        keep = is_open(gate, layer.prune_below).nonzero().flatten()
        if not len(keep):  # the weight has vanished
            return [core.new_zeros(1, *core.shape[1:-1], 1) for core in cores]
        cores[k] = cores[k].index_select(-1, keep) * gate.detach().double()[keep]
        cores[k + 1] = cores[k + 1].index_select(0, keep)
    return cores


def _joined(cores: list[Tensor]) -> Tensor:
    """Contract cores ``(r, v, p, s)`` to ``(r, product of v, product of p, s)``."""
    whole = cores[0]
    for core in cores[1:]:
        whole = torch.einsum("rvps,swqt->rvwpqt", whole, core).flatten(3, 4).flatten(1, 2)
    return whole
