import re

import pytest

from comera.planning.contraction import Network, factor_networks, linear_network, lookup_network
from comera.shapes import TTMShape, TTShape


def test_the_closed_network_of_a_linear_layer():
    network = linear_network(TTShape((2, 3), (4,), (5, 6)), 7)
    assert network.tensors == {
        "x": ("b", "a", "c"),
        "core0": ("a", "A"),
        "core1": ("A", "c", "B"),
        "core2": ("B", "d"),
        "gy": ("b", "d"),
    }
    assert network.sizes == {"b": 7, "a": 2, "c": 3, "d": 4, "A": 5, "B": 6}
    assert network.output == ()
    assert network.size_of(network.tensors["core1"]) == 5 * 3 * 6


def test_leaving_a_tensor_out_gives_the_network_of_its_gradient():
    closed = linear_network(TTShape((2,), (3,), (2,)), 5)
    forward, of_core = closed.without("gy"), closed.without("core1")
    assert (set(forward.tensors), forward.output) == ({"x", "core0", "core1"}, ("b", "c"))
    assert (set(of_core.tensors), of_core.output) == ({"x", "core0", "gy"}, ("A", "c"))
    with pytest.raises(ValueError, match=r"'y' can be left out of a closed network that holds it"):
        closed.without("y")
    with pytest.raises(ValueError, match="closed network"):
        forward.without("x")


def test_the_halves_close_with_the_gradients_of_their_products():
    left, right = factor_networks(TTShape((2, 3), (4,), (5, 6)), ("grad(A)", "grad(core2)"))
    assert left.tensors["grad(A)"] == ("a", "c", "B")
    assert right.tensors == {"core2": ("B", "d"), "grad(core2)": ("B", "d")}
    table = TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3))
    left, right = factor_networks(table, ("grad(A)", "grad(B)"))
    assert left.size_of(left.tensors["grad(A)"]) == 4 * 6 * 5
    assert right.size_of(right.tensors["grad(B)"]) == 5 * 2 * 4


def test_every_tensor_of_a_look_up_carries_the_batch():
    network = lookup_network(TTMShape((3, 2, 4), (2, 1, 3), (4, 3)), 9)
    assert network.tensors["slice1"] == ("b", "A", "c", "B")
    assert network.size_of(network.tensors["slice1"]) == 9 * 4 * 1 * 3
    assert network.tensors["gy"] == ("b", "a", "c", "d")


def test_many_modes_still_have_distinct_indices():
    shape = TTShape((2,) * 20, (2,) * 20, (2,) * 39)
    network = linear_network(shape, 3)
    assert len(network.sizes) == 1 + 40 + 39


@pytest.mark.parametrize(
    ("tensors", "sizes", "problem"),
    [
        ({"p": ("i", "i"), "q": ("i",)}, {"i": 2}, "p repeats an index: i i"),
        ({"p": ("i", "j"), "q": ("i",)}, {"i": 2, "j": 2}, "index j belongs to one tensor alone"),
        ({"p": ("i",), "q": ("i",)}, {"i": 0}, "index i needs a size of at least 1"),
        ({"p": ("i",), "q": ("i",)}, {}, "index i needs a size of at least 1"),
    ],
)
def test_what_is_no_network_is_named(tensors, sizes, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        Network(tensors, sizes)
