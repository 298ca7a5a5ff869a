"""Contraction trees: the one with the fewest operations, and its products in order.

One tree gives the forward pass and all gradients together, which share partial products.

Tensor networks as index sets: what a layer multiplies, before any order is chosen.

A network is *closed* when its output is empty: every tensor of the layer is in it, the gradient
of the output (``gy``) included. Leaving one tensor out of a closed network gives the network of
that tensor's gradient, and leaving ``gy`` out gives the forward pass.

Indices are single letters, so that equations can be run as they are: ``b`` is the batch, other
lower-case letters are modes, upper-case letters are bonds. The outer bonds, of size one, have no
index.
"""

import math
import string
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opt_einsum import get_symbol
from opt_einsum.paths import DynamicProgramming

from comera.planning.operation import Step, product
from comera.shapes import TTMShape, TTShape

BATCH = "b"
OUTPUT_GRADIENT = "gy"

_MODES = string.ascii_lowercase.replace(BATCH, "")
_BONDS = string.ascii_uppercase
_LETTERS = len(string.ascii_letters)


@dataclass(frozen=True)
class Network:
    """Named tensors, each a tuple of indices; an index shared by tensors is multiplied over.

    Args:
        tensors: The indices of each tensor, in the order in which it is stored.
        sizes: The size of each index.
        output: Indices that are kept; all others are summed. Empty: the network is closed.

    Raises:
        ValueError: If an index has no size, repeats in a tensor, or belongs to one tensor alone.
    """

    tensors: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    output: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        holders: dict[str, int] = {}
        for name, indices in (*self.tensors.items(), ("the output", self.output)):
            if len(set(indices)) < len(indices):
                raise ValueError(f"{name} repeats an index: {' '.join(indices)}")
            for index in indices:
                holders[index] = holders.get(index, 0) + 1
        for index, count in holders.items():
            if self.sizes.get(index, 0) < 1:
                raise ValueError(f"index {index} needs a size of at least 1 in {dict(self.sizes)}")
            if count < 2:
                raise ValueError(f"index {index} belongs to one tensor alone; it needs another end")

    def without(self, name: str) -> "Network":
        """Return the network of the gradient of tensor ``name``, whose indices become the output.

        Raises:
            ValueError: If there is no such tensor, or the network is not closed.
        """
        if name not in self.tensors or self.output:
            raise ValueError(
                f"{name!r} can be left out of a closed network that holds it, not of "
                f"{', '.join(self.tensors)} -> ({' '.join(self.output)})"
            )
        rest = {key: indices for key, indices in self.tensors.items() if key != name}
        return Network(rest, self.sizes, self.tensors[name])

    def size_of(self, indices: Iterable[str]) -> int:
        """Count the numbers in a tensor with these indices."""
        return math.prod(self.sizes[index] for index in indices)


def linear_network(shape: TTShape, tokens: int) -> Network:
    """Build the closed network of a linear layer: ``x``, ``core0`` to ``coreN`` and ``gy``.

    ``x`` is ``(batch, *input modes)``, ``gy`` is ``(batch, *output modes)``.
    """
    modes, cores, sizes = _train(shape.slice_sizes, shape.ranks)
    tensors = {
        "x": (BATCH, *modes[: shape.split]),
        **cores,
        OUTPUT_GRADIENT: (BATCH, *modes[shape.split :]),
    }
    return Network(tensors, {BATCH: tokens, **sizes})


def factor_networks(shape: TTShape | TTMShape, names: tuple[str, str]) -> tuple[Network, Network]:
    """Build the closed networks of the left and right factor, each closed by its gradient.

    Args:
        shape: Modes and ranks of a linear layer, split between input and output; or of a table,
            split in the middle, where a core's row and column mode count as one.
        names: What the gradients of the two factors are called.
    """
    modes, cores, sizes = _train(shape.slice_sizes, shape.ranks)
    at, listed = shape.split, list(cores.items())
    middle = _letter(_BONDS, at - 1)
    left = {**dict(listed[:at]), names[0]: (*modes[:at], middle)}
    right = {**dict(listed[at:]), names[1]: (middle, *modes[at:])}
    return _closed(left, sizes), _closed(right, sizes)


def lookup_network(shape: TTMShape, rows: int) -> Network:
    """Build the closed network of a lookup row by row: ``slice0`` to ``sliceN`` and ``gy``.

    The row number picks one slice of each core, so every tensor carries the batch index:
    ``(batch, left bond, column mode, right bond)``, and ``gy`` is ``(batch, *column modes)``.
    """
    modes, cores, sizes = _train(shape.col_modes, shape.ranks)
    tensors = {f"slice{k}": (BATCH, *indices) for k, indices in enumerate(cores.values())}
    return Network({**tensors, OUTPUT_GRADIENT: (BATCH, *modes)}, {BATCH: rows, **sizes})


def _closed(tensors: dict[str, tuple[str, ...]], sizes: Mapping[str, int]) -> Network:
    held = {index for indices in tensors.values() for index in indices}
    return Network(tensors, {index: sizes[index] for index in sizes if index in held})


def _train(
    modes: Sequence[int], ranks: Sequence[int]
) -> tuple[list[str], dict[str, tuple[str, ...]], dict[str, int]]:
    """Name the modes and bonds of a chain: mode indices, indices of each core, and all sizes."""
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
    return get_symbol(_LETTERS + 2 * (k - len(alphabet)) + (alphabet is _BONDS))


Tree: TypeAlias = "str | tuple[Tree, Tree]"
"""Nested pairs of tensor names, e.g. ``("x", ("core0", "core1"))``; the closing leaf is left out.
"""

Indices: TypeAlias = tuple[str, ...]
Tensor: TypeAlias = tuple[str, Indices]
"""A name, and its indices in the order in which the numbers lie."""


@dataclass(frozen=True)
class Schedule:
    """Products in the order in which they run.

    Attributes:
        forward: The messages towards the closing leaf.
        backward: The messages away from it, those nobody asked for left out.
        gradients: How many leaves get a gradient.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    gradients: int

    @property
    def operations(self) -> int:
        """Multiply-adds of both passes, every partial product made once."""
        return sum(step.operations for step in (*self.forward, *self.backward))

    @property
    def separate_operations(self) -> int:
        """Multiply-adds of the forward pass and each gradient along this tree, nothing shared.

        Hung up at another leaf, the best tree of the forward pass is the best tree of that leaf's
        gradient and costs the same, so this is also the sum of the separate optima.
        """
        return (1 + self.gradients) * sum(step.operations for step in self.forward)


def schedule(
    network: Network, tree: Tree, *, root: str, result: str, wanted: Container[str]
) -> Schedule:
    """Order the products of the forward and the backward pass along one tree.

    Args:
        network: A closed network; ``root`` is one of its tensors.
        tree: The tree over all tensors but ``root``.
        root: The tensor that is known only after the forward pass: the gradient of its result.
        result: Name of the forward pass's result. It is stored in the order of ``root``.
        wanted: Tensors whose gradient is needed.

    Returns:
        The schedule. A partial product is called by its tensors, ``core0·core1``, the gradient
        of anything ``grad(core0·core1)``. A tree of one tensor needs no products.
    """
    closing = network.tensors[root]
    made: dict[Tree, Tensor] = {}
    forward: list[Step] = []
    backward: list[Step] = []

    # Messages towards the closing leaf: together they are the forward pass.
    def up(node: Tree, inside: frozenset[str]) -> Tensor:
        if isinstance(node, str):
            made[node] = (node, network.tensors[node])
            return made[node]
        left, right = (up(child, leaves(child)) for child in node)
        # The last product is the result, which has to lie in memory as its gradient does.
        last = inside | {root} == set(network.tensors)
        name = result if last else f"{left[0]}·{right[0]}"
        order = closing if last else None
        step, indices = _contract(network, left, right, name, _edge(network, inside), order, last)
        forward.append(step)
        made[node] = (name, indices)
        return made[node]

    # Messages away from it: the gradient of one side of a product is that of the whole, times the
    # other side as the forward pass has made it. So no partial product is computed twice.
    def down(node: Tree, gradient: Tensor) -> None:
        if isinstance(node, str):
            return
        later = []
        for child, other in (node, node[::-1]):
            if not any(name in wanted for name in leaves(child)):
                continue
            # The gradient of a tensor has to lie as the tensor; that of a partial product may lie
            # as the product leaves it.
            name, stored = made[child]
            goal, exact = f"grad({name})", isinstance(child, str)
            operands = (gradient, made[other])
            step, indices = _contract(network, *operands, goal, frozenset(stored), stored, exact)
            backward.append(step)
            later.append((child, (goal, indices)))
        # After both sides, so that the gradient which they share can be freed before going on.
        for child, message in later:
            down(child, message)

    up(tree, leaves(tree))
    down(tree, (root, closing))
    gradients = sum(name in wanted for name in leaves(tree))
    return Schedule(tuple(forward), tuple(backward), gradients)


def leaves(tree: Tree) -> frozenset[str]:
    """Return the names in a tree."""
    if isinstance(tree, str):
        return frozenset([tree])
    return leaves(tree[0]) | leaves(tree[1])


def _edge(network: Network, inside: frozenset[str]) -> frozenset[str]:
    """Return the indices that tensors inside share with tensors outside."""
    within, beyond = set[str](), set[str]()
    for name, indices in network.tensors.items():
        (within if name in inside else beyond).update(indices)
    return frozenset(within & beyond)


def _contract(
    network: Network,
    one: Tensor,
    two: Tensor,
    name: str,
    kept: frozenset[str],
    order: Indices | None,
    exact: bool,
) -> tuple[Step, Indices]:
    """Describe one contraction as a batched matrix product, its operands in the better order.

    Args:
        network: The network, which says how large indices are.
        one: First operand.
        two: Second operand.
        name: Name of the result.
        kept: Indices of the result.
        order: How the result would best lie in memory, if that matters.
        exact: Whether it has to lie so, by a copy if need be.

    Returns:
        The step, and the indices of its result in the order in which it lies.
    """
    pairs = [_Product(network, *pair, kept) for pair in ((one, two), (two, one))]

    def copied(pair: _Product) -> tuple[int, bool]:
        other = order is not None and _unlike(pair.natural, order, network.sizes)
        return sum(pair.copies) + (network.size_of(kept) if other and exact else 0), other

    best = min(pairs, key=copied)
    numbers, other = copied(best)
    indices = order if exact and order is not None else best.natural
    equation = f"{''.join(best.left[1])},{''.join(best.right[1])}->{''.join(indices)}"
    calls = 1 + len(best.copies) + (other and exact)
    step = product(name, (best.left[0], best.right[0]), equation, best.dims, numbers, calls)
    return step, indices


class _Product:
    """Two operands in a given order, as matrices.

    Attributes:
        left: First operand.
        right: Second operand.
        dims: ``(batch, rows, depth, columns)``.
        natural: Indices of the result as the product leaves it.
        copies: Sizes of the operands that do not lie as matrices and are copied first.
    """

    def __init__(self, network: Network, left: Tensor, right: Tensor, kept: frozenset[str]) -> None:
        self.left, self.right = left, right
        sides = left[1], right[1]
        both = set(sides[0]) & set(sides[1])
        batch = tuple(i for i in sides[0] if i in both and i in kept)
        rows, columns = (tuple(i for i in side if i not in both) for side in sides)
        depth, again = (tuple(i for i in side if i in both and i not in kept) for side in sides)
        self.dims = (
            network.size_of(batch),
            network.size_of(rows),
            network.size_of(depth),
            network.size_of(columns),
        )
        self.natural: Indices = (*batch, *rows, *columns)
        moves = [not _is_matrix(side, both, kept, network.sizes) for side in sides]
        if not any(moves) and _unlike(depth, again, network.sizes):  # one has to follow the other
            moves[network.size_of(sides[1]) < network.size_of(sides[0])] = True
        self.copies = [
            network.size_of(side) for side, moved in zip(sides, moves, strict=True) if moved
        ]


def _unlike(one: Indices, two: Indices, sizes: Mapping[str, int]) -> bool:
    """Tell whether numbers lie in another order; indices of size one do not matter."""
    return [i for i in one if sizes[i] > 1] != [i for i in two if sizes[i] > 1]


def _is_matrix(
    indices: Indices, both: Container[str], kept: Container[str], sizes: Mapping[str, int]
) -> bool:
    """Tell whether an operand as it lies is a (batch of) matrix: its free, its summed and its
    batch indices each stand together, the batch not last."""
    blocks: list[str] = []
    for index in indices:
        if sizes[index] == 1:
            continue
        role = "free" if index not in both else "batch" if index in kept else "summed"
        if blocks[-1:] != [role]:
            blocks.append(role)
    return len(set(blocks)) == len(blocks) and (len(blocks) == 1 or blocks[-1:] != ["batch"])


ALL_TREES_UP_TO = 9
"""Tensors of an open network up to which every tree is considered. Beyond (more than 4 + 4 modes)
trees with outer products are left out, which keeps the search below a tenth of a second."""


def find_tree(network: Network) -> Tree:
    """Find the pairwise contractions of an open network that take the fewest operations.

    opt_einsum's dynamic programming counts one multiply-add for each point of the joint index
    space, as this package does. Its ``optimal`` counts two where an index is summed and one where
    none is, so its trees can take more multiply-adds; it is also slower.

    Args:
        network: A network of at least one tensor; the output's indices are kept. For the joint plan
            of a closed network leave out the tensor at which the forward pass ends.

    Returns:
        Nested pairs of names; within a pair the side that holds the earlier tensor comes first.
    """
    names = list(network.tensors)
    if len(names) == 1:
        return names[0]
    search = DynamicProgramming("flops", search_outer=len(names) <= ALL_TREES_UP_TO)
    inputs = [frozenset(network.tensors[name]) for name in names]
    path = search(inputs, frozenset(network.output), dict(network.sizes))
    place = {name: k for k, name in enumerate(names)}
    nodes: list[Tree] = list(names)
    for pair in path:
        taken = [nodes.pop(k) for k in sorted(pair, reverse=True)]
        first, second = sorted(taken, key=lambda node: min(place[name] for name in leaves(node)))
        nodes.append((first, second))
    (tree,) = nodes
    return tree
