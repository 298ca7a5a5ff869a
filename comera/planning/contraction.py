"""Contraction trees: the one with the fewest operations, and its products in order.

One tree gives the forward pass and all gradients together, which share partial products."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from opt_einsum.paths import DynamicProgramming

from comera.planning.network import Network
from comera.planning.operation import Step, product

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
