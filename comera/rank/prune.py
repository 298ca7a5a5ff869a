"""Choose ranks to prune, of all layers together, so that the cores fit a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.nn.module import TensorTrainModule
from comera.shapes import check_min_rank, is_number
from comera.surgery.truncate import check_finite, kept_ranks, not_finite


@dataclass
class _Bond:
    """One bond while ranks are chosen, with importance and index of its ranks, the least first."""

    layer: int
    position: int
    ranks: list[tuple[float, int]]


@torch.no_grad()
def prune_to_(
    named: Mapping[str, TensorTrainModule],
    budget: float,
    *,
    min_rank: int = 1,
    importance: Mapping[int, Tensor] | None = None,
    min_keep: float = 0.0,
) -> list[float]:
    """Close the least important gates until the cores fit a budget.

    Ranks of all layers are pruned by importance per entry, the least first. If pruning a large last
    rank leaves room, earlier ranks that still fit stay, except in layers that have vanished. Gates
    of pruned ranks become zero; no core is cut. Sizes are those after :func:`truncate_` with this
    ``min_rank``. ``importance`` has that of each rank, ``(R,)``, by the ``id`` of the gate, in one
    unit for the whole model; by default it is the rank's share in the squared norm of the bond's
    remaining ranks. Every layer keeps at least the share ``min_keep``, in ``[0, 1]``, of what it
    would keep if all layers shrank alike, as far as whole ranks allow. Returns the values that
    these gates had. Raises ``ValueError`` if the smallest ranks allowed are still above the budget,
    or a core or gate is not finite.
    """
    check_min_rank(min_rank)
    check_min_keep(min_keep)
    check_finite(named)
    layers = list(named.values())
    keeps = [kept_ranks(layer, min_rank) for layer in layers]
    ranks = [[len(keep) for keep in of_layer] for of_layer in keeps]
    bonds_of = [  # a layer that has vanished has nothing left to close
        _rank_bonds(number, name, layer, keeps[number], importance) if all(ranks[number]) else []
        for number, (name, layer) in enumerate(named.items())
    ]
    bonds = [bond for of_layer in bonds_of for bond in of_layer]
    sizes = [layer.shape.size_at(live) for layer, live in zip(layers, ranks, strict=True)]
    alike = min_keep * budget / max(1, sum(sizes))
    least = [alike * size for size in sizes]

    def cost_of(bond: _Bond) -> float:
        """Return the importance per entry of a bond's next rank; infinite if it must stay."""
        live = ranks[bond.layer]
        if live[bond.position] <= min_rank or not bond.ranks:
            return np.inf
        fewer = [r - (k == bond.position) for k, r in enumerate(live)]
        left = layers[bond.layer].shape.size_at(fewer)
        if left < least[bond.layer]:
            return np.inf
        whole = 1.0 if importance is not None else max(sum(one for one, _ in bond.ranks), 1e-300)
        return bond.ranks[0][0] / whole / (sizes[bond.layer] - left)

    # Greedily, one rank at a time. What a rank saves depends on the other bonds of its layer, so
    # the costs of that layer are counted again.
    closed: list[tuple[_Bond, int]] = []
    first = np.cumsum([0, *map(len, bonds_of)])
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
        number, live = bond.layer, ranks[bond.layer]
        closed.append((bond, bond.ranks.pop(0)[1]))
        live[bond.position] -= 1
        if not live[bond.position]:  # only at min_rank=0: without one bond the layer is zero
            ranks[number] = [0] * len(live)
        sizes[number] = layers[number].shape.size_at(ranks[number])
        cost[first[number] : first[number + 1]] = [cost_of(other) for other in bonds_of[number]]
    # Open again what still fits, the most important first.
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
    # No gate has been touched so far: whatever raised has left the model as it was.
    values = []
    for bond, index in reversed(needed):
        gate = layers[bond.layer].gates[bond.position]
        values.append(float(gate[index]))
        gate[index] = 0
    return values


def _rank_bonds(
    number: int,
    name: str,
    layer: TensorTrainModule,
    keeps: Sequence[Tensor],
    importance: Mapping[int, Tensor] | None,
) -> list[_Bond]:
    if importance is None:
        values = layer.rank_norms()
        if not all(of_bond.isfinite().all() for of_bond in values):
            raise not_finite(name, "cores")
    else:
        values = [importance[id(gate)] for gate in layer.gates]
    return [
        _Bond(number, k, sorted(zip(of_bond[alive].tolist(), alive.tolist(), strict=True)))
        for k, (of_bond, alive) in enumerate(zip(values, keeps, strict=True))
    ]


def check_min_keep(min_keep: Any) -> None:
    if not is_number(min_keep) or not 0 <= min_keep <= 1:
        raise ValueError(f"min_keep={min_keep!r} must be in [0, 1]")
