"""Choose ranks to prune, of all layers together, so that the cores fit a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.nn.module import TensorTrainModule
from comera.shapes import is_number
from comera.surgery.truncate import check_finite, check_min_rank, kept_ranks, not_finite


@dataclass
class _Bond:
    """One bond while ranks are being chosen: the importance of its ranks, the least first.

    ``relative`` says that this is a share of what the bond as a whole carries.
    """

    layer: int
    position: int
    importance: list[float]
    order: list[int]
    relative: bool


@torch.no_grad()
def prune_to_(
    named: Mapping[str, TensorTrainModule],
    budget: float,
    *,
    min_rank: int = 1,
    importance: Mapping[int, Tensor] | None = None,
    min_keep: float = 0.0,
) -> list[float]:
    """Close the gates that matter least until the cores fit a budget.

    Ranks go by their importance for each entry they cost, the least first, over all layers
    together. The last one may have been large: of those before it, what then still fits stays open,
    but for layers that have gone as a whole. Gates are set to zero, nothing is cut. What counts is
    what :func:`truncate_` leaves at the same ``min_rank``: of a bond whose gates are all closed at
    1, its largest.

    Args:
        named: Layers to prune, by name.
        budget: Entries the cores may have afterwards.
        min_rank: Ranks a bond must keep; at 0 a whole layer may go.
        importance: The importance of each rank, ``(R,)``, by the ``id`` of its gate, in one unit
            for the whole model. By default the share a rank has in the squared norm that its bond
            still carries.
        min_keep: Share of what it would keep if all layers shrank alike that every layer keeps at
            least, in ``[0, 1]``; as far as its ranks can be divided so.

    Returns:
        The values of the gates that were closed.

    Raises:
        ValueError: If the smallest ranks allowed are still above the budget, the importance of a
            gate is not given or not finite, or a core or gate holds what is not finite.
    """
    check_min_rank(min_rank)
    check_min_keep(min_keep)
    check_finite(named)
    layers = list(named.values())
    keeps = [kept_ranks(layer, min_rank) for layer in layers]
    ranks = [[len(keep) for keep in of_layer] for of_layer in keeps]
    # A layer that has vanished has nothing left to close.
    bonds = [
        bond
        for number, (name, layer) in enumerate(named.items())
        if all(ranks[number])
        for bond in _rank_bonds(number, name, layer, keeps[number], importance)
    ]
    sizes = [layer.shape.size_at(live) for layer, live in zip(layers, ranks, strict=True)]
    of_layer: dict[int, list[int]] = {}
    for k, bond in enumerate(bonds):
        of_layer.setdefault(bond.layer, []).append(k)
    alike = min_keep * budget / max(1, sum(sizes))
    least = [alike * size for size in sizes]

    def cost_of(bond: _Bond) -> float:
        return _cost(bond, layers[bond.layer], ranks[bond.layer], sizes, least, min_rank)

    # Greedily, one rank at a time. What a rank saves depends on the other bonds of its layer, so
    # that with each one closed the costs of one layer, and of no other, are counted anew.
    closed: list[tuple[_Bond, int]] = []
    cost = np.array([cost_of(bond) for bond in bonds])
    while sum(sizes) > budget:
        if any(least) and len(cost) and not np.isfinite(cost.min()):
            # Every layer is at its share, give or take a rank: ranks are too coarse for it.
            least = [0.0] * len(layers)
            cost = np.array([cost_of(bond) for bond in bonds])
        if not len(cost) or not np.isfinite(cost.min()):
            raise ValueError(
                f"the cores cannot fit {int(budget)} entries: at min_rank={min_rank} they "
                f"still need {sum(sizes)}"
            )
        bond = bonds[int(cost.argmin())]
        live = ranks[bond.layer]
        closed.append((bond, bond.order.pop(0)))
        bond.importance.pop(0)
        live[bond.position] -= 1
        if not live[bond.position]:  # only at min_rank=0: without one bond the layer is zero
            ranks[bond.layer] = [0] * len(live)
        sizes[bond.layer] = layers[bond.layer].shape.size_at(ranks[bond.layer])
        for k in of_layer[bond.layer]:
            cost[k] = cost_of(bonds[k])
    # No gate has been touched so far: whatever raised has left the model as it was.
    values = []
    for bond, index in _still_needed(closed, layers, ranks, sizes, budget):
        gate = layers[bond.layer].gates[bond.position]
        values.append(float(gate[index]))
        gate[index] = 0
    return values


def _still_needed(
    closed: Sequence[tuple[_Bond, int]],
    layers: Sequence[TensorTrainModule],
    ranks: Sequence[list[int]],
    sizes: list[int],
    budget: float,
) -> list[tuple[_Bond, int]]:
    """Return the ranks that have to be closed, of those that were: all but what fits again.

    From the last one backwards, which is the most important first.
    """
    needed = []
    for bond, index in reversed(closed):
        live = ranks[bond.layer]
        more = [r + (k == bond.position) for k, r in enumerate(live)]
        size = layers[bond.layer].shape.size_at(more)
        if all(live) and sum(sizes) - sizes[bond.layer] + size <= budget:
            live[bond.position] += 1
            sizes[bond.layer] = size
        else:
            needed.append((bond, index))
    return needed[::-1]


def _cost(
    bond: _Bond,
    layer: TensorTrainModule,
    live: Sequence[int],
    sizes: Sequence[int],
    least: Sequence[float],
    min_rank: int,
) -> float:
    """Return what closing its least important rank loses, per entry saved; infinite if it may not.

    A share is measured against what is left, not against the start: many equal ranks cost little to
    thin out and ever more to do without.
    """
    if live[bond.position] <= min_rank or not bond.importance:
        return np.inf
    fewer = [r - (k == bond.position) for k, r in enumerate(live)]
    left = layer.shape.size_at(fewer)
    if left < least[bond.layer]:
        return np.inf
    whole = max(sum(bond.importance), 1e-300) if bond.relative else 1.0
    return bond.importance[0] / whole / (sizes[bond.layer] - left)


def _rank_bonds(
    number: int,
    name: str,
    layer: TensorTrainModule,
    keeps: Sequence[Tensor],
    importance: Mapping[int, Tensor] | None,
) -> list[_Bond]:
    """Sort the ranks of each bond that would be kept by their importance."""
    values = (
        _norms(name, layer)
        if importance is None
        else [_importance_of(gate, importance) for gate in layer.gates]
    )
    out = []
    for k, alive in enumerate(keeps):
        ours = values[k][alive].tolist()
        order = sorted(range(len(ours)), key=ours.__getitem__)
        ranked = [int(alive[i]) for i in order]
        out.append(_Bond(number, k, [ours[i] for i in order], ranked, importance is None))
    return out


def _importance_of(gate: Tensor, importance: Mapping[int, Tensor]) -> Tensor:
    found = importance.get(id(gate))
    if found is None or found.shape != gate.shape or not found.isfinite().all():
        shown = "nothing" if found is None else str(found.tolist())
        raise ValueError(f"the importance of a gate of {gate.numel()} ranks is {shown}")
    return found


def _norms(name: str, layer: TensorTrainModule) -> list[Tensor]:
    """Return, for each bond, the share of the weight's squared norm that each rank carries."""
    norms = _norms_of_chain(layer) if layer.is_chain else [_shares(layer.rank_norms())]
    if not all(of_bond.isfinite().all() for of_bond in norms):
        raise not_finite(name, "cores")
    return norms


def _shares(norms: Tensor) -> Tensor:
    return norms / norms.sum().clamp(min=1e-300)


def _norms_of_chain(layer: TensorTrainModule) -> list[Tensor]:
    cores = [core.double() for core in layer.gated_cores()]
    cores = [core.reshape(core.shape[0], -1, core.shape[-1]) for core in cores]
    left = _grams(cores)
    right = _grams([core.transpose(0, 2) for core in reversed(cores)])[::-1]
    total = float((left[0] * right[0]).sum()) if left else 0.0
    pairs = zip(left, right, strict=True)
    return [a.diagonal() * b.diagonal() / max(total, 1e-300) for a, b in pairs]


def _grams(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return the inner products between the ranks of each bond, over everything before it."""
    gram, out = cores[0].new_ones(1, 1), []
    for core in cores[:-1]:
        gram = torch.einsum("lm,lnr,mns->rs", gram, core, core)
        out.append(gram)
    return out


def check_min_keep(min_keep: Any) -> None:
    """Raise ``ValueError`` for what is no share."""
    if not is_number(min_keep) or not 0 <= min_keep <= 1:
        raise ValueError(f"min_keep={min_keep!r} must be in [0, 1]")
