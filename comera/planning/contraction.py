"""Search the contraction tree of a tensor network with the fewest operations.

Each product costs its multiply-adds once in the forward pass, and once more for each of the two
gradients, so the best tree of the forward pass is best for both passes.

Indices are those of :func:`~comera.planning.candidate.chain_indices`, and ``b`` for the batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from opt_einsum.paths import DynamicProgramming

from comera.planning.candidate import BATCH, Indices, chain_indices
from comera.planning.linear_ways import Layer
from comera.planning.lookup_ways import Lookup
from comera.shapes import BTTShape, TTMShape, TTShape

_ALL_TREES_UP_TO = 9
"""Tensors of a network up to which every tree is considered. Beyond (more than 4 + 4 modes) trees
with outer products are left out, which keeps the search below a tenth of a second."""


@dataclass(frozen=True)
class Network:
    """Indices of the tensors and the output, with sizes; a product sums over all other indices."""

    tensors: Mapping[str, Indices]
    sizes: Mapping[str, int]
    output: Indices


def linear_network(shape: TTShape, tokens: int) -> Network:
    """Return the network of a linear layer: ``x`` of ``(batch, *input modes)``, and its cores."""
    modes, cores, sizes = chain_indices(shape.slice_sizes, shape.ranks)
    tensors = {"x": (BATCH, *modes[: shape.split]), **cores}
    return Network(tensors, {BATCH: tokens, **sizes}, (BATCH, *modes[shape.split :]))


def lookup_network(shape: TTMShape, rows: int) -> Network:
    """Return the network of a lookup row by row, of the slices ``slice0`` to ``sliceN``.

    The row number picks one slice of each core, so every tensor carries the batch index:
    ``(batch, left bond, column mode, right bond)``.
    """
    modes, cores, sizes = chain_indices(shape.col_modes, shape.ranks)
    tensors = {f"slice{k}": (BATCH, *indices) for k, indices in enumerate(cores.values())}
    return Network(tensors, {BATCH: rows, **sizes}, (BATCH, *modes))


class Search(NamedTuple):
    """Multiply-adds of the best contraction tree.

    ``forward`` counts the forward pass, ``operations`` both passes with each partial product
    computed once, ``separate`` both passes if no gradient shares a partial product.
    """

    forward: int
    operations: int
    separate: int


def best_tree(work: Layer | Lookup) -> Search | None:
    """Return the best tree of a tensor train; None for blocks, or if a rank is zero."""
    shape: Any = work.shape
    if 0 in shape.ranks or isinstance(shape, BTTShape):
        return None
    of_kind = linear_network if isinstance(work, Layer) else lookup_network
    return search(of_kind(shape, work.tokens))


def search(network: Network) -> Search:
    """Search the tree of a network with the fewest multiply-adds."""
    find = DynamicProgramming("flops", search_outer=len(network.tensors) <= _ALL_TREES_UP_TO)
    nodes, output = [*map(frozenset, network.tensors.values())], frozenset(network.output)
    path = find(list(nodes), output, dict(network.sizes)) if len(nodes) > 1 else []
    forward = 0
    for pair in path:
        one, two = (nodes.pop(k) for k in sorted(pair, reverse=True))
        forward += math.prod(network.sizes[index] for index in one | two)
        nodes.append((one | two) & output.union(*nodes))
    return Search(forward, 3 * forward, (1 + len(network.tensors)) * forward)
