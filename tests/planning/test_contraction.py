import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.planning.contraction import Network, linear_network, lookup_network, search
from comera.shapes import TTMShape, TTShape

PAPER = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))


@st.composite
def shapes(draw, most=8):
    """Any split of up to ``most`` cores, modes and ranks of one included."""
    cores = draw(st.integers(2, most))
    split = draw(st.integers(1, cores - 1))
    modes = tuple(draw(st.lists(st.integers(1, 9), min_size=cores, max_size=cores)))
    ranks = draw(st.lists(st.integers(1, 20), min_size=cores - 1, max_size=cores - 1))
    return TTShape(modes[:split], modes[split:], tuple(ranks))


def cheapest(network) -> int:
    """The fewest multiply-adds of any contraction tree of an open network, by dynamic programming
    over all subsets of its tensors and all their splits."""
    names = list(network.tensors)
    everything = (1 << len(names)) - 1

    def held(subset):
        return {i for k, n in enumerate(names) if subset >> k & 1 for i in network.tensors[n]}

    kept = {
        s: held(s) & (held(everything ^ s) | set(network.output)) for s in range(1, everything + 1)
    }
    best = {1 << k: 0 for k in range(len(names))}
    for subset in sorted(range(1, everything + 1), key=int.bit_count):
        if subset in best:
            continue
        lowest, part, least = subset & -subset, (subset - 1) & subset, math.inf
        while part:
            if part & lowest:
                joint = kept[part] | kept[subset ^ part]
                cost = math.prod(network.sizes[i] for i in joint)
                least = min(least, best[part] + best[subset ^ part] + cost)
            part = (part - 1) & subset
        best[subset] = least
    return best[everything]


def leaving_out(network, name):
    """The network of the gradient of one tensor, from that of the output."""
    rest = {key: each for key, each in network.tensors.items() if key != name}
    return Network({**rest, "gy": network.output}, network.sizes, network.tensors[name])


@given(shapes(), st.sampled_from([1, 2, 7, 64, 4096]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_tree_takes_fewer_operations(shape, tokens):
    network = linear_network(shape, tokens)
    found = search(network)
    assert found.forward == cheapest(network)
    assert found.operations == 3 * found.forward


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    "shape", [TTMShape((3, 2), (2, 4), (5,)), TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3))]
)
def test_no_tree_of_a_look_up_takes_fewer_operations(shape, tokens):
    network = lookup_network(shape, tokens)
    assert search(network).forward == cheapest(network)


@given(shapes(most=5), st.sampled_from([1, 3, 50]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_gradient_by_itself_costs_what_the_forward_pass_does(shape, tokens):
    """Why the best tree of the forward pass is the best for all gradients together."""
    network = linear_network(shape, tokens)
    each = {cheapest(leaving_out(network, name)) for name in network.tensors}
    assert each == {search(network).forward}


def test_each_gradient_by_itself_is_one_more_pass():
    found = search(linear_network(PAPER, 4096))
    assert found.separate == 8 * found.forward


def test_outer_products_are_considered():
    """Two vectors and a matrix between them: joining the vectors first is cheaper here."""
    network = linear_network(TTShape((1, 2, 9), (9,), (1, 2, 9)), 1)
    assert search(network).forward == cheapest(network)


def test_long_trains_are_searched_too():
    shape = TTShape((2,) * 8, (2,) * 8, (1,) * 15).with_rank(6)
    halves = 64 * 6 * (256 + 256) + 2 * 256 * 6 * 6 * 2
    assert search(linear_network(shape, 64)).forward <= halves


def test_the_network_of_a_linear_layer():
    network = linear_network(TTShape((2, 3), (4,), (5, 6)), 7)
    assert network.tensors == {
        "x": ("b", "a", "c"),
        "core0": ("a", "A"),
        "core1": ("A", "c", "B"),
        "core2": ("B", "d"),
    }
    assert network.sizes == {"b": 7, "a": 2, "c": 3, "d": 4, "A": 5, "B": 6}
    assert network.output == ("b", "d")


def test_every_tensor_of_a_look_up_carries_the_batch():
    network = lookup_network(TTMShape((3, 2, 4), (2, 1, 3), (4, 3)), 9)
    assert network.tensors["slice1"] == ("b", "A", "c", "B")
    assert math.prod(network.sizes[i] for i in network.tensors["slice1"]) == 9 * 4 * 1 * 3
    assert network.output == ("b", "a", "c", "d")


def test_many_modes_still_have_distinct_indices():
    network = linear_network(TTShape((2,) * 20, (2,) * 20, (2,) * 39), 3)
    assert len(network.sizes) == 1 + 40 + 39
