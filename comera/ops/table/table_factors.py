"""Contract the cores of a tensor-train table to its two factors, rows and columns apart.

Shape suffixes: V = left and W = right part of a row's number, P and Q = left and right part of the
width, R = the bond between the factors.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.ops.contract_cores import CONTRACT, contract_groups, layout_of
from comera.ops.cores import (
    Chains,
    contract_chains,
    contract_chains_grads,
    gate_chains,
    gate_grads,
    stack_chains,
    stack_gates,
    unstack_chains,
    unstack_gates,
)
from comera.ops.dispatch import Case, Times, Ways
from comera.ops.kernels.warp_lookup_kernel import takes
from comera.ops.operator import operator

Table = tuple[Sequence[Tensor], Sequence[Tensor], float]
"""Cores, gates and the threshold of a table."""


def contract_table(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Contract to ``left (V, P, R)`` and ``right (W, R, Q)``; row v * W + w is left[v] @ right[w].

    Where torch makes it, the right factor lies in memory as ``(W, Q, R)``: rows are made, and their
    gradients taken, of slices whose bond is innermost.

    Args:
        cores: ``(left bond, row mode, column mode, right bond)`` each, at least two.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.

    Returns:
        Two tensors in the dtype of the cores.
    """
    return contract_tables([(cores, gates, threshold)])[0]


def contract_tables(tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    """Apply :func:`contract_table` to each table; by kernels all at once.

    Args:
        tables: What :func:`contract_table` takes of each, all of one dtype and device.
    """
    chains = [
        Chains([c.flatten(1, 2) for c in cores], list(gates), [], 1, len(cores) // 2, threshold)
        for cores, gates, threshold in tables
    ]
    return _TABLES(chains, tables)


def _case(chains: Sequence[Chains], tables: Sequence[Table]) -> Case:
    core = chains[0].cores[chains[0].split]
    return core, chains[0].factor_dtype, (len(chains), core.shape[0])


_TABLES = Ways(
    "contract_tables",
    lambda new: ([Chains([new(1, 64, 32), new(32, 64, 1)], [], [], 1, 1, 0.0)], []),
    Times("contract_cores", _case),
)


def _not_together(chains: Sequence[Chains], tables: Sequence[Table]) -> str | None:
    return CONTRACT.refusal_of_graph(chains[0].cores[0], chains)


@_TABLES.way("all at once, as layers", _not_together, kernel="contract_cores")
def _together(chains: Sequence[Chains], tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    by_warps = takes(chains[0].cores[0].dtype)  # 16 bytes at a time, whose bond is innermost
    factors = contract_groups(
        [core for chain in chains for core in chain.cores],
        [gate for chain in chains for gate in chain.gates],
        [],
        [n for c in chains for n in layout_of(c.cores, c.gates, [], 1, c.split, padded=by_warps)],
        [chain.threshold for chain in chains],
    )
    found = []
    for (cores, _, _), left_1IR, right_1RO in zip(tables, factors[::2], factors[1::2], strict=True):
        split = len(cores) // 2
        left, right = _left_apart(left_1IR[0], cores[:split]), right_1RO[0]
        found.append((left, _right_apart(right, cores[split:], turned=by_warps)))
    return found


@_TABLES.way("one by one")
def _one_by_one(chains: Sequence[Chains], tables: Sequence[Table]) -> list[tuple[Tensor, Tensor]]:
    return [_contract_table(list(c), list(g), threshold) for c, g, threshold in tables]


@operator("comera::contract_table")
def _contract_table(
    cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    split = len(cores) // 2
    with without_autocast(cores[0]):
        gated = gate_chains(stack_chains(cores, 1), stack_gates(gates, 1, threshold)[0])
        left, right = (
            contract_chains(gated[:split])[0, 0],
            contract_chains(gated[split:])[0, ..., 0],
        )
        return _left_apart(left, cores[:split]), _right_apart(right, cores[split:], turned=True)


@_contract_table.register_fake
def _(cores, gates, threshold):
    split = len(cores) // 2
    (V, P), (W, Q) = _sizes(cores[:split]), _sizes(cores[split:])
    R = cores[split].shape[0]
    return cores[0].new_empty(V, P, R), cores[0].new_empty(W, Q, R).mT


def _setup_context(ctx, inputs, output) -> None:
    cores, gates, ctx.threshold = inputs
    ctx.num_cores = len(cores)
    ctx.save_for_backward(*cores, *gates)


def _backward(ctx, grad_left_VPR: Tensor, grad_right_WRQ: Tensor):
    saved = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    cores, gates = saved[: ctx.num_cores], saved[ctx.num_cores :]
    split = len(cores) // 2
    with without_autocast(grad_left_VPR):
        stacked = stack_chains(cores, 1)
        open_gates, live = stack_gates(gates, 1, ctx.threshold)
        gated = gate_chains(stacked, open_gates)
        wide = stacked[0].dtype
        left = _left_together(grad_left_VPR.to(wide), cores[:split])
        right = _right_together(grad_right_WRQ.to(wide), cores[split:])
        grads = contract_chains_grads(left[None, None], gated[:split])
        grads += contract_chains_grads(right[None, ..., None], gated[split:])
        grads, per_gate = gate_grads(grads, stacked, open_gates)
        grad_gates = unstack_gates(per_gate, live, gates, 1)
        return unstack_chains(grads, cores, 1), grad_gates, None


_contract_table.register_autograd(_backward, setup_context=_setup_context)


def _sizes(cores: Sequence[Tensor]) -> tuple[int, int]:
    """Count rows and columns of a part of the train."""
    return math.prod(core.shape[1] for core in cores), math.prod(core.shape[2] for core in cores)


def _left_apart(contracted: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Undo the interleaving of modes: ``(v1 p1 v2 p2, R)`` to ``(V, P, R)``."""
    count, modes = len(cores), _modes(cores)
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2), 2 * count]
    rank = contracted.shape[-1]
    return _new(contracted.view(*modes, rank).permute(order), cores).view(*_sizes(cores), rank)


def _left_together(apart: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Undo :func:`_left_apart`."""
    rows, columns, count = _modes(cores)[::2], _modes(cores)[1::2], len(cores)
    order = [k for i in range(count) for k in (i, count + i)]
    split = apart.view(*rows, *columns, apart.shape[2])
    return split.permute(*order, 2 * count).reshape(math.prod(_sizes(cores)), apart.shape[2])


def _right_apart(contracted: Tensor, cores: Sequence[Tensor], *, turned: bool) -> Tensor:
    """Permute ``(R, w1 q1 w2 q2)`` to ``(W, R, Q)``, in memory ``(W, Q, R)`` if turned."""
    count, modes = len(cores), _modes(cores)
    rows, columns = range(1, 2 * count, 2), range(2, 2 * count + 1, 2)
    order = [*rows, *columns, 0] if turned else [*rows, 0, *columns]
    rank, (W, Q) = contracted.shape[0], _sizes(cores)
    made = _new(contracted.view(rank, *modes).permute(order), cores)
    return made.view(W, Q, rank).mT if turned else made.view(W, rank, Q)


def _right_together(apart: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Undo :func:`_right_apart`, however it lies."""
    rows, columns, count = _modes(cores)[::2], _modes(cores)[1::2], len(cores)
    order = [k for i in range(count) for k in (i, count + 1 + i)]
    rank = apart.shape[1]
    split = apart.unflatten(2, columns).unflatten(0, rows)
    return split.permute(count, *order).reshape(rank, math.prod(_sizes(cores)))


def _modes(cores: Sequence[Tensor]) -> list[int]:
    """List row mode and column mode of each core in turn."""
    return [size for core in cores for size in core.shape[1:3]]


def _new(tensor: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Copy to a contiguous tensor, never a view: an operator may not return its input."""
    return tensor.to(cores[0].dtype, copy=True, memory_format=torch.contiguous_format)
