"""Contract tensor trains to two factors each, all layers of one shape together.

The bond between ``left`` and ``right`` is padded to a multiple of eight, for fast products. The
bias is the last row of ``right``; the batch has a one in that column. In eager mode autograd
differentiates the torch operations; a graph takes an operator, whose backward pass runs them again,
or a kernel. The reference is :func:`~comera.ops.cores.contract_chain`.

Shape suffixes: G = layers, I = input width, O = output width, R = padded bond between the factors.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.nn import functional as F

from comera.ops.context import is_autocast_on, shapes_are_static, without_autocast
from comera.ops.cores import Chains, open_gate
from comera.ops.dispatch import Case, Way, Ways, is_eager
from comera.ops.kernels import choose, contract_kernel
from comera.ops.operator import gradients_again, is_concrete, is_traced, operator
from comera.planning.candidate import contraction_order, outermost_first


def contract_layer(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    split: int,
    threshold: float,
    in_features: int,
    out_features: int,
) -> tuple[Tensor, Tensor]:
    """Contract the cores of one layer to its two factors, whose common bond is not padded.

    The arguments are those of :class:`~comera.ops.cores.Chains`, with gates of float32 or wider;
    padding beyond the widths of the layer is cut. Returns
    ``(in_features, R)`` and ``(R, out_features)`` of the cores' dtype, rounded once from the dtype
    of the gates. Both can be differentiated any number of times.
    """
    if is_autocast_on(cores[0]):
        with without_autocast(cores[0]):
            return contract_layer(cores, gates, split, threshold, in_features, out_features)
    dtype, wide = cores[-1].dtype, gates[0].dtype
    # Reading so few numbers takes an eighth of the time of autograd's operations on gates. Twice
    # the threshold, as it may be rounded up to the dtype of the gates.
    numbers = itertools.chain.from_iterable(map(Tensor.tolist, gates))
    readable = gates[0].is_cpu and is_concrete(gates[0]) and not is_traced()
    if not (readable and min(numbers, default=1.0) > 2 * threshold):
        gates = [open_gate(gate, threshold) for gate in gates]
    gated = [*scale_bonds(cores[:-1], gates), cores[-1]]
    if dtype != wide:
        gated[-1] = gated[-1].to(wide)
    left_IR, right_RO = contract(gated[:split], True), contract(gated[split:], False)
    if dtype != wide:
        left_IR, right_RO = left_IR.to(dtype), right_RO.to(dtype)
    if left_IR.shape[0] != in_features:
        left_IR = left_IR[:in_features]
    if right_RO.shape[1] != out_features:
        right_RO = right_RO[:, :out_features]
    return left_IR, right_RO


def scale_bonds(cores: Sequence[Tensor], gates: Sequence[Tensor]) -> list[Tensor]:
    """Multiply each core by its gate; one call for all, unless ``torch.func`` transforms them."""
    if torch._C._are_functorch_transforms_active():  # torch.vmap knows no multiplication of lists
        return [core * gate for core, gate in zip(cores, gates, strict=True)]
    return list(torch._foreach_mul(list(cores), list(gates)))


def contract(cores: Sequence[Tensor], is_left: bool) -> Tensor:
    """Contract cores ``(L, N, R)``, or those of G layers, stacked, to a factor in the best order.

    The left factor is ``(modes, R)``, the right one ``(L, modes)``.
    """
    sizes = tuple([core.shape[-3:] for core in cores])
    try:
        order = contraction_order(sizes)
    except TypeError:  # symbolic sizes, while a graph is traced, have no hash
        order = outermost_first(sizes)
    lead, left, within = cores[0].shape[:-3], list(cores), list(sizes)
    multiply = torch.bmm if lead else torch.mm
    for k in order:
        (start, n, bond), (_, m, end) = within[k : k + 2]
        one = left[k].reshape(*lead, start * n, bond)
        left[k : k + 2] = [multiply(one, left[k + 1].reshape(*lead, bond, m * end))]
        within[k : k + 2] = [torch.Size((start, n * m, end))]
    ((start, modes, end),) = within
    shape = (modes, end) if is_left else (start, modes)
    return left[0].reshape(*lead, *shape)


def contract_by_torch(group: Chains) -> tuple[Tensor, Tensor]:
    """Contract one group as :func:`contract_groups` does, by torch; differentiable repeatedly."""
    cores, split, layers = group.cores, group.split, group.num_layers
    with without_autocast(cores[0]):
        wide = torch.promote_types(cores[0].dtype, torch.float32)
        positions = [cores[k :: group.length] for k in range(group.length)]
        gated = [torch.stack(list(of)) if layers > 1 else of[0][None] for of in positions]
        gated = [core.to(wide) for core in gated]
        if group.gates:
            bonds = group.bonds[1:-1]
            opened = open_gate(torch.cat(list(group.gates)), group.threshold).to(wide)
            opened = opened.view(layers, 1, 1, sum(bonds)).split(bonds, 3)
            gated = [*scale_bonds(gated[:-1], opened), gated[-1]]
        right_GRO = contract(gated[split:], False)
        more = group.width - right_GRO.shape[1]
        if more:  # of the left factor its last core is padded, which is smaller
            gated[split - 1] = F.pad(gated[split - 1], (0, more))
            if group.biases:
                rows = torch.stack(list(group.biases)).unsqueeze(1).to(wide)
                missing = right_GRO.shape[2] - rows.shape[2]
                if missing or more > 1:
                    rows = F.pad(rows, (0, missing, more - 1, 0))
            else:
                rows = right_GRO.new_zeros(layers, more, right_GRO.shape[2])
            right_GRO = torch.cat([right_GRO, rows], 1)
        left_GIR = contract(gated[:split], True)
        return left_GIR.to(group.factor_dtype), right_GRO.to(group.factor_dtype)


_FEW = 1 << 19
"""Numbers of a layer's cores up to which calls take most of the time. Autograd saves them twice:
stacked, and multiplied by gates."""


def contract_groups(groups: Sequence[Chains]) -> list[Tensor]:
    """Contract the cores of several groups of layers into the two factors of each layer.

    The left factor is made of a layer's first ``split`` cores, the right one of the others. Factors
    are rounded to their dtype once, from sums in float32. Returns ``left (G, I, R)`` and
    ``right (G, R, O)`` of each group. The padding of the bond is zero, except the last row of
    ``right``, which holds the bias.
    """
    core = groups[0].cores[0]
    numbers = sum(core.numel() for group in groups for core in group.cores)
    if not is_eager() or (
        not is_traced()
        and (  # one node of a graph saves and launches less
            shapes_are_static(core)
            or numbers > _FEW * sum(group.num_layers for group in groups)  # autograd saves as many
            or kernel_refuses(groups) is None  # a kernel is one launch
        )
    ):
        return _contract_groups(*arguments_of(groups))
    return [factor for group in groups for factor in contract_by_torch(group)]


_DTYPES = None, torch.float64, torch.float32, torch.bfloat16, torch.float16
"""Dtypes of factors, by the last number of a layout."""

_PER_GROUP = 7  # numbers of a group in a layout


_Arguments = tuple[
    Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[int], Sequence[float]
]


def arguments_of(groups: Sequence[Chains]) -> _Arguments:
    """Return the groups as arguments of an operator: cores, gates, biases, layouts, thresholds."""
    lists = [(group.cores, group.gates, group.biases) for group in groups]
    layout = [
        number
        for g, of in zip(groups, lists, strict=True)
        for number in (*map(len, of), g.num_layers, g.split, int(g.padded), _DTYPES.index(g.dtype))
    ]
    cores, gates, biases = ([t for part in of for t in part] for of in zip(*lists, strict=True))
    return cores, gates, biases, layout, [group.threshold for group in groups]


def _groups(given: _Arguments) -> list[Chains]:
    """Rebuild the groups from :func:`arguments_of`; if there are no biases, no group has any."""
    cores, gates, biases, layout, thresholds = given
    rest = iter(cores), iter(gates), iter(biases)
    groups = []
    for number, threshold in enumerate(thresholds):
        *counts, num_layers, split, padded, dtype = layout[number * _PER_GROUP :][:_PER_GROUP]
        lists = [list(itertools.islice(*pair)) for pair in zip(rest, counts, strict=True)]
        more = threshold, bool(padded), _DTYPES[dtype]
        groups.append(Chains(lists[0], lists[1], lists[2], num_layers, split, *more))
    return groups


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
    """Compute :func:`contract_groups`, with one launch for all groups if a kernel runs."""
    return CONTRACT(_groups((cores, gates, biases, layout, thresholds)))


@_contract_groups.register_fake
def _(*given):
    return [
        given[0][0].new_empty(shape, dtype=group.factor_dtype)
        for group in _groups(given)
        for shape in group.factor_shapes
    ]


def _setup_context(ctx, inputs, output) -> None:
    cores, gates, biases, ctx.layout, ctx.thresholds = inputs
    ctx.num_cores = len(cores)
    ctx.biases = [(bias.shape[0], bias.dtype) for bias in biases]
    ctx.save_for_backward(*cores, *gates)


def _backward(ctx, grads: Sequence[Tensor]):
    saved = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    cores, gates = list(saved[: ctx.num_cores]), list(saved[ctx.num_cores :])
    groups = _groups((cores, gates, [], ctx.layout, ctx.thresholds))
    grad_cores, grad_gates = _CONTRACT_BACK(groups, grads)
    grad_biases: list[Tensor] = []
    for right, count in zip(grads[1::2], ctx.layout[2::_PER_GROUP], strict=True):
        if count:
            width, dtype = ctx.biases[len(grad_biases)]
            grad_biases += list(right[:, -1, :width].to(dtype).unbind(0))
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
    """Return the gradients of all cores, followed by those of all gates."""
    groups = _groups((cores, gates, [], layout, thresholds))
    if kernel_refuses(groups) is None:
        return list(contract_kernel.contract_backward(groups, grads))
    # A graph that was compiled where kernels run may be called where they do not.
    of_cores, of_gates = _grads_by_torch(groups, grads)
    flat_cores = [grad.flatten() for grad in of_cores]
    return [torch.cat(flat_cores), torch.cat(of_gates or [cores[0].new_empty(0)]).float()]


@_contract_backward.register_fake
def _(grads, cores, gates, layout, thresholds):
    wide = cores[0].new_empty(sum(gate.numel() for gate in gates), dtype=torch.float32)
    return [cores[0].new_empty(sum(core.numel() for core in cores)), wide]


def _case(groups: Sequence[Chains], *_: Any) -> Case:
    core = groups[0].cores[groups[0].split]
    return core, groups[0].factor_dtype, (sum(group.num_layers for group in groups), core.shape[0])


def _sample(new: Callable[..., Any]) -> tuple[list[Chains]]:
    return ([Chains([new(1, 32, 32), new(32, 32, 1)], [], [], 1, 1, 0.0)],)


def _grads_by_kernel(
    groups: Sequence[Chains], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    cores, gates, _, layout, thresholds = arguments_of(groups)
    if is_eager() and is_concrete(cores[0]):
        of_cores, of_gates = contract_kernel.contract_backward(groups, grads)
        apart: Callable[..., Sequence[Tensor]] = _unflatten_dense_tensors
    else:
        of_cores, of_gates = _contract_backward(grads, cores, gates, layout, thresholds)
        apart = _apart
    return list(apart(of_cores, cores)), list(apart(of_gates, gates))


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Take a vector apart; torch's own function knows no symbolic sizes."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _grads_by_torch(
    groups: Sequence[Chains], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    grad_cores: list[Tensor] = []
    grad_gates: list[Tensor] = []
    for group, grad_left_GIR, grad_right_GRO in zip(groups, grads[::2], grads[1::2], strict=True):
        count, rank = len(group.cores), group.bonds[group.split]

        def run(*params: Tensor, group: Chains = group, count: int = count) -> tuple[Tensor, ...]:
            cores, gates = params[:count], params[count:]
            return contract_by_torch(replace(group, cores=cores, gates=gates, padded=False))

        with without_autocast(grad_left_GIR):
            own = grad_left_GIR[..., :rank], grad_right_GRO[:, :rank]
            found = gradients_again(run, [*group.cores, *group.gates], own)
        grad_cores += found[:count]
        grad_gates += found[count:]
    return grad_cores, grad_gates


def kernel_refuses(groups: Sequence[Chains]) -> str | None:
    """Return why no kernel contracts these groups, or None."""
    like, dtype = groups[0].cores[0], groups[0].factor_dtype
    file = choose.CONTRACT.get((like.dtype, dtype))
    if file is None and like.dtype in choose.DTYPES:
        return f"no kernel contracts cores of {like.dtype} to factors of {dtype}"
    reason = choose.kernel_refuses(file or "contract_f32", like)
    return reason if reason is not None else contract_kernel.unfit(groups)


def may_take_kernel(groups: Sequence[Chains]) -> bool:
    """Return whether a kernel contracts these groups; on a GPU True while compiling."""
    return kernel_refuses(groups) is None if is_eager() else groups[0].cores[0].is_cuda


def _by_torch(groups: Sequence[Chains]) -> list[Tensor]:
    # Copied: an operator may not return its input, which one core without a gate is.
    factors = [factor for group in groups for factor in contract_by_torch(group)]
    return [factor.clone(memory_format=torch.contiguous_format) for factor in factors]


CONTRACT = Ways(
    "contract_cores", "contract_cores", _case, _sample,
    Way("kernel", contract_kernel.contract, kernel_refuses, "contract_cores"),
    Way("torch", _by_torch),
)  # fmt: skip
_CONTRACT_BACK = Ways(
    "contract_cores_backward", "contract_cores", _case, _sample,
    Way("kernel", _grads_by_kernel, lambda groups, *_: choose.DIFFERENTIATED
        if torch.is_grad_enabled() else kernel_refuses(groups), "contract_cores"),
    Way("torch", _grads_by_torch),
)  # fmt: skip
