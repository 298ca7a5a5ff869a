import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.planning.contraction import find_tree, leaves, linear_network, lookup_network, schedule
from comera.shapes import TTMShape, TTShape
from tests.planning.running import cheapest


@st.composite
def shapes(draw, most=8):
    """Any split of up to ``most`` cores, modes and ranks of one included."""
    cores = draw(st.integers(2, most))
    split = draw(st.integers(1, cores - 1))
    modes = tuple(draw(st.lists(st.integers(1, 9), min_size=cores, max_size=cores)))
    ranks = draw(st.lists(st.integers(1, 20), min_size=cores - 1, max_size=cores - 1))
    return TTShape(modes[:split], modes[split:], tuple(ranks))


def forward_cost(network, tree):
    return sum(
        step.operations
        for step in schedule(network, tree, root="gy", result="y", wanted=()).forward
    )


@given(shapes(), st.sampled_from([1, 2, 7, 64, 4096]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_tree_takes_fewer_operations(shape, tokens):
    network = linear_network(shape, tokens)
    tree = find_tree(network.without("gy"))
    assert leaves(tree) == set(network.tensors) - {"gy"}
    assert forward_cost(network, tree) == cheapest(network.without("gy"))


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    "shape", [TTMShape((3, 2), (2, 4), (5,)), TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3))]
)
def test_no_tree_of_a_look_up_takes_fewer_operations(shape, tokens):
    network = lookup_network(shape, tokens)
    tree = find_tree(network.without("gy"))
    assert forward_cost(network, tree) == cheapest(network.without("gy"))


@given(shapes(most=5), st.sampled_from([1, 3, 50]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_gradient_by_itself_costs_what_the_forward_pass_does(shape, tokens):
    """Why the best tree of the forward pass is the best for all gradients together."""
    network = linear_network(shape, tokens)
    assert len({cheapest(network.without(name)) for name in network.tensors}) == 1


def test_outer_products_are_considered():
    """Two vectors and a matrix between them: joining the vectors first is cheaper here."""
    shape = TTShape((1, 2, 9), (9,), (1, 2, 9))
    network = linear_network(shape, 1)
    assert forward_cost(network, find_tree(network.without("gy"))) == cheapest(
        network.without("gy")
    )


def test_long_trains_are_searched_too():
    shape = TTShape((2,) * 8, (2,) * 8, (1,) * 15).with_rank(6)
    network = linear_network(shape, 64)
    tree = find_tree(network.without("gy"))
    halves = 64 * 6 * (256 + 256) + 2 * 256 * 6 * 6 * 2
    assert forward_cost(network, tree) <= halves


def test_one_tensor_is_its_own_tree():
    network = lookup_network(TTMShape((3, 2), (2, 4), (5,)), 3)
    assert find_tree(network.without("gy")) == ("slice0", "slice1")
    alone = network.without("gy").tensors
    assert list(alone) == ["slice0", "slice1"]
