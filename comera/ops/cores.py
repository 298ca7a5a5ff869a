"""Contract neighbouring cores along their bonds, gates applied on the way.

The chains of a layer are small next to its batch, so they are contracted first; everything
the batch then meets is a narrow matrix. The backward pass absorbs one core at a time and shares
the partial products between all the cores' gradients (CoMERA, arXiv 2405.14377, section 4).

Chains of equal shape are contracted together, so that a model of many layers costs as few calls as
one: ``G`` such chains are kept as one tensor ``(G, L, N, R)`` for each position.

Shape suffixes: G = chains, L and R = left and right bond, N = modes of a core, multiplied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.ops.operator import operator
from comera.ops.product import stacked_product
from comera.shapes import padded_rank


@dataclass(slots=True)
class Chains:
    """Layers of one shape.

    Attributes:
        cores: Listed layer by layer, ``(left bond, mode, right bond)`` each.
        gates: One for each inner bond, listed layer by layer, or none.
        biases: One for each layer, or none.
        num_layers: How many there are.
        split: How many cores of a layer carry the input.
        threshold: A gate at or below it is a pruned rank.
        padded: Whether the bond between the factors is padded, for a bias and for fast products.
        dtype: Of the factors; None for that of the cores.
    """

    cores: Sequence[Tensor]
    gates: Sequence[Tensor]
    biases: Sequence[Tensor]
    num_layers: int
    split: int
    threshold: float
    padded: bool = True
    dtype: torch.dtype | None = None

    @property
    def factor_dtype(self) -> torch.dtype:
        return self.cores[0].dtype if self.dtype is None else self.dtype

    @property
    def length(self) -> int:
        return len(self.cores) // self.num_layers

    @property
    def modes(self) -> list[int]:
        return [core.shape[1] for core in self.cores[: self.length]]

    @property
    def bonds(self) -> list[int]:
        return [core.shape[0] for core in self.cores[: self.length]] + [1]

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the factors ``left (G, I, R)`` and ``right (G, R, O)``."""
        modes, split = self.modes, self.split
        return (
            (self.num_layers, math.prod(modes[:split]), self.width),
            (self.num_layers, self.width, math.prod(modes[split:])),
        )

    @property
    def width(self) -> int:
        """Width of the bond between the factors, what pads it included."""
        rank = self.cores[self.split].shape[0]
        return padded_rank(rank, bool(self.biases)) if self.padded else rank

    def of_layers(self, first: int, count: int) -> "Chains":
        """Select ``count`` of the layers, from number ``first`` on."""

        def some(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            each = len(tensors) // self.num_layers
            return tensors[first * each : (first + count) * each]

        return Chains(
            some(self.cores), some(self.gates), some(self.biases), count, self.split,
            self.threshold, self.padded, self.dtype,
        )  # fmt: skip


def contract_chain(
    cores: Sequence[Tensor], gates: Sequence[Tensor] = (), threshold: float = 0.0
) -> Tensor:
    """Contract a run of cores into one ``(first bond, product of modes, last bond)``.

    Core by core, for autograd to differentiate: what everything faster is compared with.

    Args:
        cores: Each ``(left bond, mode(s), right bond)``; neighbours agree on their bond.
        gates: ``gates[k]`` scales the right bond of ``cores[k]``; there may be fewer than cores.
        threshold: A gate at or below it is a pruned rank.

    Returns:
        A tensor of the cores' dtype. Narrow dtypes are contracted in float32 and rounded once.
    """
    wide = torch.promote_types(cores[0].dtype, torch.float32)
    with without_autocast(cores[0]):
        gated = [core.to(wide) for core in cores]
        for k, gate in enumerate(gates):
            gated[k] = rank_gate_reference(gated[k], gate, threshold)
        contracted = gated[0]
        for core in gated[1:]:
            contracted = torch.tensordot(contracted, core, 1)
        return contracted.flatten(1, -2).to(cores[0].dtype)


def stack_chains(cores: Sequence[Tensor], num_chains: int) -> list[Tensor]:
    """Stack cores that are listed chain by chain: ``(G, L, N, R)`` a position, at least float32.

    One chain alone is not copied.
    """
    length = len(cores) // num_chains
    wide = torch.promote_types(cores[0].dtype, torch.float32)
    stacked = []
    for k in range(length):
        together = cores[k][None] if num_chains == 1 else torch.stack(list(cores[k::length]))
        if together.dim() != 4:
            together = together.flatten(2, -2)
        stacked.append(together.to(wide))
    return stacked


def unstack_chains(
    stacked: Sequence[Tensor], cores: Sequence[Tensor], num_chains: int
) -> list[Tensor]:
    """Undo :func:`stack_chains`: shapes and dtype of ``cores``, listed chain by chain."""
    length = len(stacked)
    sizes = [core.shape for core in cores[:length]]
    apart = [s.to(cores[0].dtype).unbind(0) for s in stacked]
    return [apart[k][g].reshape(sizes[k]) for g in range(num_chains) for k in range(length)]


def stack_gates(
    gates: Sequence[Tensor], num_chains: int, threshold: float
) -> tuple[list[Tensor], Tensor | None]:
    """Return ``(G, R)`` a bond, zero where its rank is pruned, and which of all are not pruned."""
    if not gates:
        return [], None
    bonds = [gate.shape[0] for gate in gates[: len(gates) // num_chains]]
    flat = gates[0] if len(gates) == 1 else torch.cat(list(gates))
    opened = open_gate(flat, threshold).reshape(num_chains, sum(bonds))
    return list(opened.split(bonds, 1)), is_open(flat, threshold)


def unstack_gates(
    per_gate: Sequence[Tensor], live: Tensor | None, gates: Sequence[Tensor], num_chains: int
) -> list[Tensor]:
    """Split gradients ``(G, R)`` a bond into one a gate; that of a pruned rank is zero."""
    if live is None:
        return []
    flat = torch.where(live, torch.cat(list(per_gate), 1).flatten().to(gates[0].dtype), 0)
    return list(flat.split([gate.shape[0] for gate in gates]))


def gate_chains(stacked: Sequence[Tensor], open_gates: Sequence[Tensor]) -> list[Tensor]:
    """Scale right bonds; there may be fewer gates than cores."""
    gated = [
        core * gate[:, None, None, :].to(core.dtype)
        for core, gate in zip(stacked, open_gates, strict=False)
    ]
    return [*gated, *stacked[len(gated) :]]


def gate_grads(
    grads: Sequence[Tensor], stacked: Sequence[Tensor], open_gates: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Turn gradients of the gated cores into those of cores and gates."""
    per_gate = [
        (grad * core).sum((1, 2)) for grad, core, _ in zip(grads, stacked, open_gates, strict=False)
    ]
    return gate_chains(grads, open_gates), per_gate


def contract_chains(cores: Sequence[Tensor]) -> Tensor:
    """Contract all cores ``(G, L, N, R)`` of each chain into one."""
    contracted = _partial_products(cores, len(cores))[-1]
    modes = math.prod(core.shape[2] for core in cores)
    return contracted.reshape(contracted.shape[0], cores[0].shape[1], modes, cores[-1].shape[3])


def contract_chains_grads(grad: Tensor, cores: Sequence[Tensor]) -> list[Tensor]:
    """Return each core's gradient; the remaining gradient shrinks by one core at a time."""
    partial, grads = _partial_products(cores, len(cores) - 1), []
    G = cores[0].shape[0]
    if _starts_left(cores):
        rest = grad
        for core, before in zip(reversed(cores[1:]), reversed(partial), strict=True):
            rest = rest.reshape(G, before.shape[1], core.shape[2] * core.shape[3])
            grads.append(stacked_product(before.mT, rest).view(core.shape))
            rest = stacked_product(rest, core.flatten(2).mT)
        return [rest.reshape(cores[0].shape), *reversed(grads)]
    rest = grad
    for core, after in zip(cores[:-1], reversed(partial), strict=True):
        rest = rest.reshape(G, core.shape[1] * core.shape[2], after.shape[2])
        grads.append(stacked_product(rest, after.mT).view(core.shape))
        rest = stacked_product(core.flatten(1, 2).mT, rest)
    return [*grads, rest.reshape(cores[-1].shape)]


def _partial_products(cores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Multiply the first one, two, ... ``count`` cores, counted from the narrower end."""
    out: list[Tensor] = []
    if _starts_left(cores):
        for core in cores[:count]:
            G, L, N, R = core.shape
            if not out:
                out.append(core.reshape(G, L * N, R))
                continue
            rows = out[-1].shape[1] * N
            out.append(stacked_product(out[-1], core.reshape(G, L, N * R)).view(G, rows, R))
        return out
    for core in list(reversed(cores))[:count]:
        G, L, N, R = core.shape
        if not out:
            out.append(core.reshape(G, L, N * R))
            continue
        columns = N * out[-1].shape[2]
        out.append(stacked_product(core.reshape(G, L * N, R), out[-1]).view(G, L, columns))
    return out


def _starts_left(cores: Sequence[Tensor]) -> bool:
    return cores[0].shape[1] <= cores[-1].shape[3]


def is_open(gate_R: Tensor, threshold: float | Tensor) -> Tensor:
    """Tell which ranks of a gate are not pruned: those above the threshold; no NaN is.

    The one place that says so; ``kernels/contract.cuh`` repeats it for the card.

    Args:
        gate_R: ``(R,)``.
        threshold: One for all, or ``(R,)``.

    Returns:
        Booleans ``(R,)``.
    """
    return gate_R > threshold


def open_gate(gate_R: Tensor, threshold: float) -> Tensor:
    """Return the gate where :func:`is_open`, and zero where not; NaN stays, to be seen."""
    return torch.threshold(gate_R, threshold, 0.0)


def rank_gate_reference(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    return core * open_gate(gate_R, threshold).to(core.dtype)


@operator("comera::rank_gate")
def rank_gate(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    """Multiply the last dimension of ``core`` by ``gate_R`` where that is above ``threshold``.

    Args:
        core: ``(..., R)``, any floating dtype.
        gate_R: ``(R,)``, float32 or float64.
        threshold: At or below it a rank is pruned: its slice is zero and gets no gradient.

    Returns:
        A tensor like ``core``.
    """
    return rank_gate_reference(core, gate_R, threshold)


@rank_gate.register_fake
def _(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(core)


def _setup_context(ctx, inputs, output) -> None:
    core, gate_R, ctx.threshold = inputs
    ctx.save_for_backward(core, gate_R)


def rank_gate_grads(
    grad: Tensor, core: Tensor, gate_R: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a core and its gate from that of the gated core."""
    per_rank_R = (grad.to(gate_R.dtype) * core).flatten(0, -2).sum(0)
    grad_gate_R = torch.where(is_open(gate_R, threshold), per_rank_R, 0)
    return rank_gate_reference(grad, gate_R, threshold), grad_gate_R


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    core, gate_R = ctx.saved_tensors
    return *rank_gate_grads(grad, core, gate_R, ctx.threshold), None


rank_gate.register_autograd(_backward, setup_context=_setup_context)
