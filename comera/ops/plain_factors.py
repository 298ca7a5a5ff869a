"""Contract cores by operations that autograd knows, those of all layers of a group together.

In eager mode autograd calls these one after the other without a detour over Python; a graph that is
captured or compiled takes operators instead, whose backward passes keep and launch less.

Shape suffixes: G = layers, L and K = left and right bond of a core, N = its mode, I = input width,
O = output width, R = bond between the factors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import without_autocast
from comera.ops.cores import Chains, open_gate, stack_chains


def plain_factors(group: Chains) -> tuple[Tensor, Tensor]:
    """Contract the cores of a group to ``left (G, I, R)`` and ``right (G, R, O)``.

    They are those of :func:`~comera.ops.contract_cores.contract_cores`, and can be differentiated
    as often as one likes.
    """
    cores, split = group.cores, group.split
    with without_autocast(cores[0]):
        stacked = stack_chains(cores, group.num_layers)
        gated = [*_gated(stacked[:-1], group), stacked[-1]]
        right_GRO = _from_right(gated[split:])
        more = group.width - right_GRO.shape[1]
        if more:  # of the left factor its last core is padded, which is smaller
            gated[split - 1] = F.pad(gated[split - 1], (0, more))
            right_GRO = torch.cat([right_GRO, _rows_below(right_GRO, more, group.biases)], 1)
        left_GIR = _from_left(gated[:split])
        return left_GIR.to(group.factor_dtype), right_GRO.to(group.factor_dtype)


def multiply_pairs(cores: Sequence[Tensor], opened: Sequence[Tensor]) -> list[Tensor]:
    """Multiply each core by its gate, in one call where nothing is transformed."""
    if torch._C._are_functorch_transforms_active():  # torch.vmap knows no multiplication of lists
        return [core * gate for core, gate in zip(cores, opened, strict=True)]
    return list(torch._foreach_mul(list(cores), list(opened)))


def _gated(stacked: Sequence[Tensor], group: Chains) -> Sequence[Tensor]:
    if not group.gates:
        return stacked
    bonds = [gate.shape[0] for gate in group.gates[: len(stacked)]]
    opened = open_gate(torch.cat(list(group.gates)), group.threshold).to(stacked[0].dtype)
    return multiply_pairs(stacked, opened.view(group.num_layers, 1, 1, sum(bonds)).split(bonds, 3))


def _from_left(cores_GLNK: Sequence[Tensor]) -> Tensor:
    """Contract the cores of the input to ``(G, I, R)``."""
    made = cores_GLNK[0].squeeze(1)
    for core in cores_GLNK[1:]:
        layers, _, modes, bond = core.shape
        rows = made.shape[1] * modes
        made = torch.bmm(made, core.flatten(2)).view(layers, rows, bond)
    return made


def _from_right(cores_GLNK: Sequence[Tensor]) -> Tensor:
    """Contract the cores of the output to ``(G, R, O)``."""
    made = cores_GLNK[-1].squeeze(3)
    for core in cores_GLNK[-2::-1]:
        layers, bond, modes, _ = core.shape
        columns = modes * made.shape[2]
        made = torch.bmm(core.flatten(1, 2), made).view(layers, bond, columns)
    return made


def _rows_below(right_GRO: Tensor, more: int, biases: Sequence[Tensor]) -> Tensor:
    """Return the rows that pad right factors: zeros, of which a bias takes the last."""
    layers, _, width = right_GRO.shape
    if not biases:
        return right_GRO.new_zeros(layers, more, width)
    bias_G1O = torch.stack(list(biases)).unsqueeze(1).to(right_GRO.dtype)
    missing = width - bias_G1O.shape[2]
    return F.pad(bias_G1O, (0, missing, more - 1, 0)) if missing or more > 1 else bias_G1O
