"""Contraction trees of tensor networks: the tree with the fewest operations.

The best tree of the forward pass is also the best one for all gradients together. The gradient of
one side of a product is the gradient of the product times its other side, so each product costs its
multiply-adds once in the forward pass, and once more for each side that leads to a gradient.

Indices are single letters: ``b`` is the batch, other lower-case letters are modes, upper-case
letters are bonds. The outer bonds, of size one, have no index.
"""

import math
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opt_einsum import get_symbol
from opt_einsum.paths import DynamicProgramming

from comera.shapes import TTMShape, TTShape

BATCH = "b"
_MODES = string.ascii_lowercase.replace(BATCH, "")
_BONDS = string.ascii_uppercase

_ALL_TREES_UP_TO = 9
"""Tensors of a network up to which every tree is considered. Beyond (more than 4 + 4 modes) trees
with outer products are left out, which keeps the search below a tenth of a second."""

Indices: TypeAlias = tuple[str, ...]
Tree: TypeAlias = "str | tuple[Tree, Tree]"
"""Nested pairs of tensor names, e.g. ``("x", ("core0", "core1"))``."""


@dataclass(frozen=True)
class Network:
    """Named tensors; an index is summed over unless the output keeps it.

    Attributes:
        tensors: The indices of each tensor, in the order in which it is stored.
        sizes: The size of each index.
        output: The indices of the result.
    """

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
    """Return the letters of a chain's modes, the indices of each core, and the index sizes."""
    mode_letters = [_letter(_MODES, k) for k in range(len(modes))]
    bond_letters = [_letter(_BONDS, k) for k in range(len(ranks))]
    cores = {
        f"core{k}": (*bond_letters[max(0, k - 1) : k], mode, *bond_letters[k : k + 1])
        for k, mode in enumerate(mode_letters)
    }
    sizes = dict(zip([*mode_letters, *bond_letters], [*modes, *ranks], strict=True))
    return mode_letters, cores, sizes


def _letter(alphabet: str, k: int) -> str:
    """Return the k-th letter; past the end, symbols that opt_einsum takes, odd and even apart."""
    if k < len(alphabet):
        return alphabet[k]
    return get_symbol(len(string.ascii_letters) + 2 * (k - len(alphabet)) + (alphabet is _BONDS))


@dataclass(frozen=True)
class Search:
    """The contraction tree with the fewest operations.

    Attributes:
        tree: The products, as nested pairs of tensor names.
        forward: Multiply-adds of the forward pass.
        operations: Multiply-adds of both passes, every partial product computed once.
        gradients: Number of tensors that get a gradient.
    """

    tree: Tree
    forward: int
    operations: int
    gradients: int

    @property
    def separate_operations(self) -> int:
        """Multiply-adds of the forward pass and each gradient by itself, nothing shared.

        With another tensor as its root, the best tree of the forward pass is the best tree of that
        tensor's gradient and costs the same.
        """
        return (1 + self.gradients) * self.forward


def search(network: Network, wanted: Collection[str]) -> Search:
    """Search the tree of a network that takes the fewest multiply-adds.

    opt_einsum's dynamic programming counts one multiply-add for each point of the joint index
    space, as this package does; its ``optimal`` counts two where an index is summed.

    Args:
        network: The network of the forward pass.
        wanted: Names of the tensors whose gradient is needed.
    """
    names = list(network.tensors)
    find = DynamicProgramming("flops", search_outer=len(names) <= _ALL_TREES_UP_TO)
    inputs = [frozenset(network.tensors[name]) for name in names]
    path = find(inputs, frozenset(network.output), dict(network.sizes)) if len(names) > 1 else []
    # Each node: the place of its first tensor, its tree, its indices, whether it gets a gradient.
    nodes: list[tuple[int, Tree, frozenset[str], bool]] = [
        (k, name, inputs[k], name in wanted) for k, name in enumerate(names)
    ]
    forward = backward = 0
    for pair in path:
        taken = sorted((nodes.pop(k) for k in sorted(pair, reverse=True)), key=lambda node: node[0])
        (place, left, left_indices, left_wanted), (_, right, right_indices, right_wanted) = taken
        joint = left_indices | right_indices
        cost = math.prod(network.sizes[index] for index in joint)
        forward += cost
        backward += cost * (left_wanted + right_wanted)
        kept = joint & frozenset(network.output).union(*(node[2] for node in nodes))
        nodes.append((place, (left, right), kept, left_wanted or right_wanted))
    ((_, tree, _, _),) = nodes
    return Search(tree, forward, forward + backward, sum(name in wanted for name in names))
