"""Contract the two factors of tensor-train matrices, those of all layers of one shape together.

What comes out is what a batch multiplies by: ``left`` and ``right`` with the bond between them
padded to a multiple of eight, which matrix products are fastest at, and the bias as the last row
of ``right``. Where the batch has a one in that column, adding the bias and summing its gradient
happen inside products that run anyway.

Shape suffixes: G = layers, I = input width, O = output width, R = padded bond between the factors.

Contract cores by operations that autograd knows, those of all layers of a group together.

In eager mode autograd calls these one after the other without a detour over Python; a graph that is
captured or compiled takes operators instead, whose backward passes keep and launch less.

Shape suffixes: G = layers, L and K = left and right bond of a core, N = its mode, I = input width,
O = output width, R = bond between the factors.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.context import shapes_are_static, without_autocast
from comera.ops.cores import (
    Chains,
    contract_chains,
    contract_chains_grads,
    gate_chains,
    gate_grads,
    open_gate,
    stack_chains,
    stack_gates,
    unstack_chains,
    unstack_gates,
)
from comera.ops.dispatch import COMPILING, STATIC, Case, Times, Ways, is_eager
from comera.ops.kernels import choose
from comera.ops.operator import operator


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


def contract_cores(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_layers: int,
    split: int,
    threshold: float,
    padded: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Contract the first ``split`` cores of each layer, and the others.

    Args:
        cores: ``(left bond, mode, right bond)``, listed layer by layer; all layers have the same
            modes and bonds.
        gates: One vector for each inner bond, listed layer by layer, or none at all.
        biases: One for each layer, or none at all; they may be narrower than the output modes.
        num_layers: How many layers there are.
        split: How many cores of a layer carry the input.
        threshold: A gate at or below it is a pruned rank.
        padded: Whether to pad the bond, which a bias needs.
        dtype: Of the factors; None for that of the cores. They are rounded to it once, from sums
            in float32.

    Returns:
        ``left (G, I, R)`` and ``right (G, R, O)``; what pads the bond is zero, but for the last row
        of ``right``, which holds the bias.
    """
    layout = layout_of(cores, gates, biases, num_layers, split, padded, dtype)
    left_GIR, right_GRO = contract_groups(cores, gates, biases, layout, [threshold])
    return left_GIR, right_GRO


def layout_of(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_layers: int,
    split: int,
    padded: bool = True,
    dtype: torch.dtype | None = None,
) -> list[int]:
    """Return what :func:`contract_groups` has to know of a group, as integers."""
    counts = len(cores), len(gates), len(biases)
    return [*counts, num_layers, split, int(padded), _DTYPES.index(dtype)]


def contract_groups(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> list[Tensor]:
    """Contract as :func:`contract_cores` does, for several groups of layers of one shape each.

    Args:
        cores: Those of all groups, one group after the other.
        gates: Those of all groups, in the same order.
        biases: Those of all groups, in the same order.
        layout: :func:`layout_of` each group, in a row.
        thresholds: One for each group: a gate at or below it is a pruned rank.

    Returns:
        ``left`` and ``right`` of each group.
    """
    return _GROUPS(cores, gates, biases, layout, thresholds)


def _sample_lists(new: Callable[..., Any]) -> tuple[Any, ...]:
    cores = [new(1, 32, 32), new(32, 32, 1)]
    return cores, [], [], layout_of(cores, [], [], 1, 1), [0.0]


_GROUPS = Ways("contract_groups", _sample_lists)

_FEW = 1 << 19
"""Numbers of a layer's cores up to which calls are what contracting them takes. Autograd keeps them
twice: stacked, and multiplied by gates."""


def _not_plain(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> str | None:
    if not is_eager():
        return COMPILING
    if shapes_are_static(cores[0]):
        return STATIC
    if sum(core.numel() for core in cores) > _FEW * sum(layout[3::_PER_GROUP]):
        return "the cores are large"
    groups = _groups(cores, gates, biases, layout, thresholds)
    return "a kernel contracts them" if CONTRACT.refusal(groups) is None else None


@_GROUPS.way("plain", _not_plain)
def _plainly(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> list[Tensor]:
    groups = _groups(cores, gates, biases, layout, thresholds)
    return [factor for group in groups for factor in plain_factors(group)]


_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)
"""Descriptors that kernels keep must not lie in the memory of torch.compile's own CUDA graphs,
which it takes for everything that is made while they warm up."""


@operator("comera::contract_cores", tags=_OUTSIDE_GRAPHS)
def _contract_groups(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> list[Tensor]:
    """Compute :func:`contract_groups`, in one launch where kernels run."""
    return CONTRACT(_groups(cores, gates, biases, layout, thresholds))


_GROUPS.way("one operator")(_contract_groups)


@_contract_groups.register_fake
def _(cores, gates, biases, layout, thresholds):
    groups = _groups(cores, gates, biases, layout, thresholds)
    return [
        cores[0].new_empty(shape, dtype=group.factor_dtype)
        for group in groups
        for shape in group.factor_shapes
    ]


def _setup_context(ctx, inputs, output) -> None:
    cores, gates, biases, ctx.layout, ctx.thresholds = inputs
    ctx.num_cores = len(cores)
    ctx.bias_widths = [bias.shape[0] for bias in biases]
    ctx.bias_dtypes = [bias.dtype for bias in biases]
    ctx.save_for_backward(*cores, *gates)


def _backward(ctx, grads: Sequence[Tensor]):
    saved = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    cores, gates = list(saved[: ctx.num_cores]), list(saved[ctx.num_cores :])
    groups = _groups(cores, gates, [], _without_biases(ctx.layout), ctx.thresholds)
    layout = ctx.layout, ctx.thresholds
    grad_cores, grad_gates = _CONTRACT_BACK(groups, grads, cores, gates, *layout)
    grad_biases: list[Tensor] = []
    for number, count in enumerate(ctx.layout[2::_PER_GROUP]):
        if count:
            first = len(grad_biases)
            rows = grads[2 * number + 1][:, -1, : ctx.bias_widths[first]]
            grad_biases += list(rows.to(ctx.bias_dtypes[first]).unbind(0))
    return grad_cores, grad_gates, grad_biases, None, None


_contract_groups.register_autograd(_backward, setup_context=_setup_context)


@operator("comera::contract_cores_backward", tags=_OUTSIDE_GRAPHS)
def _contract_backward(
    grads: Sequence[Tensor],
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> list[Tensor]:
    """Return gradients of all cores one after the other, then those of all gates."""
    groups = _groups(cores, gates, [], _without_biases(layout), thresholds)
    if CONTRACT.refusal(groups) is None:
        from comera.ops.kernels.contract_kernel import contract_backward

        return list(contract_backward(groups, grads))
    # A graph that was compiled where kernels run may be called where they do not.
    of_cores, of_gates = _grads_by_torch(groups, grads)
    flat_cores = [grad.flatten() for grad in of_cores]
    return [torch.cat(flat_cores), torch.cat(of_gates or [cores[0].new_empty(0)]).float()]


@_contract_backward.register_fake
def _(grads, cores, gates, layout, thresholds):
    wide = cores[0].new_empty(sum(gate.numel() for gate in gates), dtype=torch.float32)
    return [cores[0].new_empty(sum(core.numel() for core in cores)), wide]


def _case(groups: Sequence[Chains], *_: Any) -> Case:
    """Time depends on how many layers there are, and on the bond between the factors."""
    core = groups[0].cores[groups[0].split]
    return core, groups[0].factor_dtype, (sum(group.num_layers for group in groups), core.shape[0])


_TIMES = Times("contract_cores", _case)
_CONTRACT_BACK = Ways("contract_cores_backward", lambda new: (_sample_groups(new),), _TIMES)


def _back_refuses(groups: Sequence[Chains], *_: Any) -> str | None:
    if torch.is_grad_enabled():
        return choose.DIFFERENTIATED
    return _kernel_refuses(groups)


@_CONTRACT_BACK.way("kernel", _back_refuses, kernel="contract_cores")
def _grads_by_kernel(
    groups: Sequence[Chains],
    grads: Sequence[Tensor],
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> tuple[list[Tensor], list[Tensor]]:
    flat = _contract_backward(grads, cores, gates, layout, thresholds)
    return _apart(flat[0], cores), _apart(flat[1], gates)


@_CONTRACT_BACK.way("torch")
def _grads_by_torch(
    groups: Sequence[Chains], grads: Sequence[Tensor], *_: Any
) -> tuple[list[Tensor], list[Tensor]]:
    grad_cores: list[Tensor] = []
    grad_gates: list[Tensor] = []
    for group, grad_left, grad_right in zip(groups, grads[::2], grads[1::2], strict=True):
        of_cores, of_gates = _contract_grads(group, grad_left, grad_right)
        grad_cores += of_cores
        grad_gates += of_gates
    return grad_cores, grad_gates


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into tensors with the shapes of others."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


_PER_GROUP = 7
"""Numbers of a group in a layout."""

_DTYPES = None, torch.float64, torch.float32, torch.bfloat16, torch.float16
"""What the last of them stands for."""


def _groups(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    layout: Sequence[int],
    thresholds: Sequence[float],
) -> list[Chains]:
    if len(thresholds) == 1:
        *_, num_layers, split, padded, dtype = layout
        more = thresholds[0], bool(padded), _DTYPES[dtype]
        return [Chains(cores, gates, biases, num_layers, split, *more)]
    groups, rest = [], [iter(cores), iter(gates), iter(biases)]
    for number, threshold in enumerate(thresholds):
        *counts, num_layers, split, padded, dtype = layout[number * _PER_GROUP :][:_PER_GROUP]
        of_cores, of_gates, of_biases = (
            list(itertools.islice(tensors, count))
            for tensors, count in zip(rest, counts, strict=True)
        )
        more = threshold, bool(padded), _DTYPES[dtype]
        groups.append(Chains(of_cores, of_gates, of_biases, num_layers, split, *more))
    return groups


def _without_biases(layout: Sequence[int]) -> list[int]:
    return [0 if k % _PER_GROUP == 2 else number for k, number in enumerate(layout)]


def _sample_groups(new: Callable[..., Any]) -> list[Chains]:
    return [Chains([new(1, 32, 32), new(32, 32, 1)], [], [], 1, 1, 0.0)]


CONTRACT = Ways("contract_cores", lambda new: (_sample_groups(new),), _TIMES)


def _kernel_refuses(groups: Sequence[Chains]) -> str | None:
    like, dtype = groups[0].cores[0], groups[0].factor_dtype
    file = choose.CONTRACT.get((like.dtype, dtype))
    if file is None and like.dtype in choose.DTYPES:
        return f"no kernel contracts cores of {like.dtype} to factors of {dtype}"
    reason = choose.kernel_refuses(file or "contract_f32", like)
    if reason is not None:
        return reason
    from comera.ops.kernels.contract_kernel import unfit  # where a kernel may run

    return unfit(groups)


@CONTRACT.way("kernel", _kernel_refuses, kernel="contract_cores")
def _by_kernel(groups: Sequence[Chains]) -> list[Tensor]:
    from comera.ops.kernels.contract_kernel import contract

    return contract(groups)


@CONTRACT.way("torch")
def _by_torch(groups: Sequence[Chains]) -> list[Tensor]:
    return [factor for group in groups for factor in _contract(group)]


def _contract(group: Chains) -> tuple[Tensor, Tensor]:
    """Contract a group to its left and right factors by torch operations."""
    cores, split = group.cores, group.split
    with without_autocast(cores[0]):
        stacked, open_gates, _ = _stack(group)
        gated = gate_chains(stacked, open_gates)
        more = group.width - cores[split].shape[0]
        gated[split - 1] = F.pad(gated[split - 1], (0, more))  # copies, even where more is 0
        gated[split] = F.pad(gated[split], (0, 0, 0, 0, 0, more))
        left, right = contract_chains(gated[:split])[:, 0], contract_chains(gated[split:])[..., 0]
        if group.biases:
            right[:, -1, : group.biases[0].shape[0]] = torch.stack(list(group.biases))
        return left.to(group.factor_dtype), right.to(group.factor_dtype)


def _contract_grads(
    group: Chains, grad_left_GIR: Tensor, grad_right_GRO: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients of cores and gates by torch operations, which autograd can differentiate."""
    split, num_layers = group.split, group.num_layers
    with without_autocast(grad_left_GIR):
        stacked, open_gates, live = _stack(group)
        gated = gate_chains(stacked, open_gates)
        rank, wide = stacked[split].shape[1], stacked[0].dtype
        grads = [
            *contract_chains_grads(grad_left_GIR[:, None, :, :rank].to(wide), gated[:split]),
            *contract_chains_grads(grad_right_GRO[:, :rank, :, None].to(wide), gated[split:]),
        ]
        grads, per_gate = gate_grads(grads, stacked, open_gates)
        return (
            unstack_chains(grads, group.cores, num_layers),
            unstack_gates(per_gate, live, group.gates, num_layers),
        )


def _stack(group: Chains) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    return (
        stack_chains(group.cores, group.num_layers),
        *stack_gates(group.gates, group.num_layers, group.threshold),
    )
