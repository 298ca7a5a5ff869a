"""The contraction tree with the fewest multiply-adds, by opt_einsum."""

from opt_einsum.paths import DynamicProgramming

from comera.planning.network import Network
from comera.planning.schedule import Tree, leaves

ALL_TREES_UP_TO = 9
"""Tensors of an open network up to which every tree is considered. Beyond (more than 4 + 4 modes)
trees with outer products are left out, which keeps the search below a tenth of a second."""


def find_tree(network: Network) -> Tree:
    """The best order of pairwise contractions of an open network.

    opt_einsum's dynamic programming counts one multiply-add for each point of the joint index
    space, as this package does. Its ``optimal`` counts two where an index is summed and one where
    none is, so its trees can take more multiply-adds; it is also slower.

    Args:
        network: At least one tensor; the output's indices are kept. For the joint plan of a
            closed network leave out the tensor at which the forward pass ends.

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
