"""Search the contraction tree of a tensor network with the fewest operations.

Each product costs its multiply-adds once in the forward pass, and once more for each operand that
needs a gradient, so the best tree of the forward pass is the best one for both passes.

Indices are single letters: ``b`` is the batch, other lower-case letters are modes, upper-case
letters are bonds. The outer bonds, of size one, have no index.
"""

import math
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opt_einsum import get_symbol
from opt_einsum.paths import DynamicProgramming

from comera.shapes import TTMShape, TTShape

BATCH = "b"
_MODES = string.ascii_lowercase.replace(BATCH, "")
_BONDS = string.ascii_uppercase

_ALL_TREES_UP_TO = 9
"""Tensors of a network up to which every tree is considered. Beyond (more than 4 + 4 modes) trees
with outer products are left out, which keeps the search below a tenth of a second."""

Indices = tuple[str, ...]


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


def chain_indices(
    modes: Sequence[int], ranks: Sequence[int]
) -> tuple[list[str], dict[str, Indices], dict[str, int]]:
    """Return the letters of a chain's modes, the indices of each core, and all index sizes."""
    mode_letters = [_letter(_MODES, k) for k in range(len(modes))]
    bond_letters = [_letter(_BONDS, k) for k in range(len(ranks))]
    cores = {
        f"core{k}": (*bond_letters[max(0, k - 1) : k], mode, *bond_letters[k : k + 1])
        for k, mode in enumerate(mode_letters)
    }
    sizes = dict(zip([*mode_letters, *bond_letters], [*modes, *ranks], strict=True))
    return mode_letters, cores, sizes


def _letter(alphabet: str, k: int) -> str:
    """Return the k-th letter, or past the end a symbol that opt_einsum takes."""
    if k < len(alphabet):
        return alphabet[k]
    return get_symbol(len(string.ascii_letters) + 2 * (k - len(alphabet)) + (alphabet is _BONDS))


class Search(NamedTuple):
    """Multiply-adds of the best contraction tree.

    ``forward`` counts the forward pass, ``operations`` both passes with each partial product
    computed once, ``separate`` both passes if no gradient shares a partial product.
    """

    forward: int
    operations: int
    separate: int


def search(network: Network, wanted: Collection[str]) -> Search:
    """Search the tree with the fewest multiply-adds; tensors in ``wanted`` need a gradient."""
    find = DynamicProgramming("flops", search_outer=len(network.tensors) <= _ALL_TREES_UP_TO)
    # The indices of each tensor or partial product, and whether it gets a gradient.
    nodes = [(frozenset(each), name in wanted) for name, each in network.tensors.items()]
    gradients, output = sum(grad for _, grad in nodes), frozenset(network.output)
    inputs = [indices for indices, _ in nodes]
    path = find(inputs, output, dict(network.sizes)) if len(nodes) > 1 else []
    forward = backward = 0
    for pair in path:
        (one, one_grad), (two, two_grad) = (nodes.pop(k) for k in sorted(pair, reverse=True))
        cost = math.prod(network.sizes[index] for index in one | two)
        forward += cost
        backward += cost * (one_grad + two_grad)
        kept = (one | two) & output.union(*(indices for indices, _ in nodes))
        nodes.append((kept, one_grad or two_grad))
    return Search(forward, forward + backward, (1 + gradients) * forward)
