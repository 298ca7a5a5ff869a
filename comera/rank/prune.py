"""Choose ranks to prune, of all layers together, so that the cores fit a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comera.nn.module import TensorTrainModule
from comera.shapes import is_number
from comera.surgery.truncate import check_min_rank, kept_ranks


@dataclass
class _Bond:
    """One bond while ranks are being chosen: what its ranks are worth, worst first.

    ``relative`` says that this is a share of what the bond as a whole carries.
    """

    layer: int
    position: int
    worth: list[float]
    order: list[int]
    relative: bool


@torch.no_grad()
def prune_to_(
    named: Mapping[str, TensorTrainModule],
    budget: float,
    *,
    min_rank: int = 1,
    worth: Mapping[int, Tensor] | None = None,
    spare: float = 0.0,
) -> list[float]:
    """Close the gates that matter least until the cores fit a budget.

    What matters least per entry it costs goes first, over all layers together. The last one may
    have been large: of those before it, what then still fits stays open, but for layers that have
    gone as a whole. Gates are set to zero, nothing is cut. What counts is what :func:`truncate_`
    leaves at the same ``min_rank``: of a bond whose gates are all closed at 1, its largest.

    Args:
        named: Layers to prune, by name.
        budget: Entries the cores may have afterwards.
        min_rank: Ranks a bond must keep; at 0 a whole layer may go.
        worth: From the ``id`` of a gate to what each of its ranks is worth, ``(R,)``, in one unit
            for the whole model. By default the share a rank has in the squared norm that its bond
            still carries.
        spare: Share of what it would keep if all layers shrank alike that every layer keeps at
            least, in ``[0, 1]``; as far as its ranks can be divided so.

    Returns:
        The values of the gates that were closed.

    Raises:
        ValueError: If the smallest ranks allowed are still above the budget, a gate has no worth,
            or one that is not finite, or a core holds what is not finite.
    """
    check_min_rank(min_rank)
    check_spare(spare)
    layers = list(named.values())
    keeps = [kept_ranks(layer, min_rank) for layer in layers]
    ranks = [[len(keep) for keep in of_layer] for of_layer in keeps]
    bonds = [
        bond
        for number, (name, layer) in enumerate(named.items())
        if all(ranks[number])
        for bond in _rank_bonds(number, name, layer, keeps[number], worth)
    ]
    sizes = [layer.shape.size_at(live) for layer, live in zip(layers, ranks, strict=True)]
    of_layer: dict[int, list[int]] = {}
    for k, bond in enumerate(bonds):
        of_layer.setdefault(bond.layer, []).append(k)
    alike = spare * budget / max(1, sum(sizes))
    least = [alike * size for size in sizes]

    def price_of(bond: _Bond) -> float:
        return _price(bond, layers[bond.layer], ranks[bond.layer], sizes, least, min_rank)

    closed: list[tuple[_Bond, int]] = []
    price = np.array([price_of(bond) for bond in bonds])
    while sum(sizes) > budget:
        if any(least) and len(price) and not np.isfinite(price.min()):
            least = [0.0] * len(layers)  # ranks are too coarse for it
            price = np.array([price_of(bond) for bond in bonds])
        if not len(price) or not np.isfinite(price.min()):
            raise ValueError(
                f"the cores cannot fit {int(budget)} entries: at min_rank={min_rank} they "
                f"still need {sum(sizes)}"
            )
        bond = bonds[int(price.argmin())]
        live = ranks[bond.layer]
        closed.append((bond, bond.order.pop(0)))
        bond.worth.pop(0)
        live[bond.position] -= 1
        if not live[bond.position]:
            ranks[bond.layer] = [0] * len(live)
        sizes[bond.layer] = layers[bond.layer].shape.size_at(ranks[bond.layer])
        for k in of_layer[bond.layer]:
            price[k] = price_of(bonds[k])
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
    """The ranks that have to be closed, of those that were: without the ones that fit again."""
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


def _price(
    bond: _Bond,
    layer: TensorTrainModule,
    live: Sequence[int],
    sizes: Sequence[int],
    least: Sequence[float],
    min_rank: int,
) -> float:
    """What closing its least rank loses, per entry saved.

    A share is measured against what is left, not against the start: many equal ranks are cheap to
    thin out and ever dearer to do without.
    """
    if live[bond.position] <= min_rank or not bond.worth:
        return np.inf
    fewer = [r - (k == bond.position) for k, r in enumerate(live)]
    left = layer.shape.size_at(fewer)
    if left < least[bond.layer]:
        return np.inf
    whole = max(sum(bond.worth), 1e-300) if bond.relative else 1.0
    return bond.worth[0] / whole / (sizes[bond.layer] - left)


def _rank_bonds(
    number: int,
    name: str,
    layer: TensorTrainModule,
    keeps: Sequence[Tensor],
    worth: Mapping[int, Tensor] | None,
) -> list[_Bond]:
    """For each bond the ranks that would be kept by what they are worth."""
    values = (
        _norms(name, layer) if worth is None else [_worth_of(gate, worth) for gate in layer.gates]
    )
    out = []
    for k, alive in enumerate(keeps):
        ours = values[k][alive].tolist()
        order = sorted(range(len(ours)), key=ours.__getitem__)
        ranked = [int(alive[i]) for i in order]
        out.append(_Bond(number, k, [ours[i] for i in order], ranked, worth is None))
    return out


def _worth_of(gate: Tensor, worth: Mapping[int, Tensor]) -> Tensor:
    found = worth.get(id(gate))
    if found is None or found.shape != gate.shape or not found.isfinite().all():
        shown = "nothing" if found is None else str(found.tolist())
        raise ValueError(f"the worth of a gate of {gate.numel()} ranks is {shown}")
    return found


def _norms(name: str, layer: TensorTrainModule) -> list[Tensor]:
    """For each bond, the share of the squared norm of the weight that each of its ranks carries."""
    cores = [core.double() for core in layer.gated_cores()]
    cores = [core.reshape(core.shape[0], -1, core.shape[-1]) for core in cores]
    left = _grams(cores)
    right = _grams([core.transpose(0, 2) for core in reversed(cores)])[::-1]
    total = float((left[0] * right[0]).sum()) if left else 0.0
    pairs = zip(left, right, strict=True)
    norms = [a.diagonal() * b.diagonal() / max(total, 1e-300) for a, b in pairs]
    if not all(of_bond.isfinite().all() for of_bond in norms):
        raise ValueError(
            f"the cores of {name or 'the layer'} hold numbers that are not finite: there is no "
            "telling its ranks apart. Go back to a checkpoint from before"
        )
    return norms


def _grams(cores: Sequence[Tensor]) -> list[Tensor]:
    """Inner products between the ranks of each inner bond, over everything before it."""
    gram, out = cores[0].new_ones(1, 1), []
    for core in cores[:-1]:
        gram = torch.einsum("lm,lnr,mns->rs", gram, core, core)
        out.append(gram)
    return out


def check_spare(spare: Any) -> None:
    """Raise ``ValueError`` for what is no share."""
    if not is_number(spare) or not 0 <= spare <= 1:
        raise ValueError(f"spare={spare!r} must be in [0, 1]")
