import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.planning.contraction import Network, linear_network, lookup_network, search
from comera.shapes import TTMShape, TTShape
from tests.planning.running import cheapest, count

PAPER = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))


@st.composite
def shapes(draw, most=8):
    """Any split of up to ``most`` cores, modes and ranks of one included."""
    cores = draw(st.integers(2, most))
    split = draw(st.integers(1, cores - 1))
    modes = tuple(draw(st.lists(st.integers(1, 9), min_size=cores, max_size=cores)))
    ranks = draw(st.lists(st.integers(1, 20), min_size=cores - 1, max_size=cores - 1))
    return TTShape(modes[:split], modes[split:], tuple(ranks))


def leaves(tree):
    return [tree] if isinstance(tree, str) else [name for side in tree for name in leaves(side)]


def multiply(network, tree, tensors):
    """The product along a tree, by einsum: its indices, its numbers, the multiply-adds made."""
    if isinstance(tree, str):
        return network.tensors[tree], tensors[tree], 0
    (one, a, made_a), (two, b, made_b) = (multiply(network, side, tensors) for side in tree)
    inside = set(leaves(tree))
    beyond = {i for name, each in network.tensors.items() if name not in inside for i in each}
    kept = [i for i in dict.fromkeys((*one, *two)) if i in beyond or i in network.output]
    equation = f"{''.join(one)},{''.join(two)}->{''.join(kept)}"
    return tuple(kept), np.einsum(equation, a, b), made_a + made_b + count(equation, a, b)


def leaving_out(network, name):
    """The network of the gradient of one tensor, from that of the output."""
    rest = {key: each for key, each in network.tensors.items() if key != name}
    return Network({**rest, "gy": network.output}, network.sizes, network.tensors[name])


@given(shapes(), st.sampled_from([1, 2, 7, 64, 4096]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_tree_takes_fewer_operations(shape, tokens):
    network = linear_network(shape, tokens)
    found = search(network, network.tensors)
    assert set(leaves(found.tree)) == set(network.tensors)
    assert found.forward == cheapest(network)
    assert found.operations == 3 * found.forward


@given(shapes(most=7), st.integers(1, 5))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_the_best_tree_gives_the_result_at_the_stated_cost(shape, tokens):
    network = linear_network(shape.with_rank(4), tokens)
    draw = np.random.default_rng(0)
    tensors = {
        name: draw.standard_normal([network.sizes[i] for i in indices])
        for name, indices in network.tensors.items()
    }
    found = search(network, ())
    indices, result, made = multiply(network, found.tree, tensors)
    equation = ",".join("".join(each) for each in network.tensors.values())
    want = np.einsum(f"{equation}->{''.join(indices)}", *tensors.values(), optimize="greedy")
    assert set(indices) == set(network.output)
    np.testing.assert_allclose(result, want, rtol=1e-9, atol=1e-9)
    assert made == found.forward == found.operations


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    "shape", [TTMShape((3, 2), (2, 4), (5,)), TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3))]
)
def test_no_tree_of_a_look_up_takes_fewer_operations(shape, tokens):
    network = lookup_network(shape, tokens)
    assert search(network, ()).forward == cheapest(network)


@given(shapes(most=5), st.sampled_from([1, 3, 50]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_gradient_by_itself_costs_what_the_forward_pass_does(shape, tokens):
    """Why the best tree of the forward pass is the best for all gradients together."""
    network = linear_network(shape, tokens)
    each = {cheapest(leaving_out(network, name)) for name in network.tensors}
    assert each == {search(network, ()).forward}


def test_gradients_nobody_wants_are_left_out():
    network = linear_network(PAPER, 4096)
    everything = search(network, network.tensors)
    frozen = search(network, set(network.tensors) - {"x"})
    # The way from the output to x: each product on it multiplies once less.
    assert everything.operations - frozen.operations == 4096 * 768 * 30
    assert frozen.gradients == 6
    assert search(network, ()).operations == everything.forward


def test_outer_products_are_considered():
    """Two vectors and a matrix between them: joining the vectors first is cheaper here."""
    network = linear_network(TTShape((1, 2, 9), (9,), (1, 2, 9)), 1)
    assert search(network, ()).forward == cheapest(network)


def test_long_trains_are_searched_too():
    shape = TTShape((2,) * 8, (2,) * 8, (1,) * 15).with_rank(6)
    halves = 64 * 6 * (256 + 256) + 2 * 256 * 6 * 6 * 2
    assert search(linear_network(shape, 64), ()).forward <= halves


def test_two_tensors_are_one_product():
    network = lookup_network(TTMShape((3, 2), (2, 4), (5,)), 3)
    assert search(network, ()).tree == ("slice0", "slice1")


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
