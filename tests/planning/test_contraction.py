"""The products that the planner lists, beside the cheapest order there is."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import comera
from comera.ops.linear.tt_linear import tt_to_dense
from comera.planning.candidate import factor_chains
from comera.planning.machine import default_machine
from comera.planning.planner import plan_layer
from comera.planning.ways import Layer
from comera.shapes import TTShape

ATTENTION = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))
FEED_FORWARD = TTShape((12, 8, 8), (12, 16, 16), (12, 30, 30, 30, 16))


class Network(NamedTuple):
    """Indices of tensors and of the output, with sizes; a product sums over all other indices."""

    tensors: dict
    sizes: dict
    output: tuple


def linear_network(shape, tokens) -> Network:
    """The network of a linear layer: ``x`` of ``(batch, *input modes)``, and its cores."""
    modes = [f"mode{k}" for k in range(len(shape.slice_sizes))]
    bonds = [f"bond{k}" for k in range(len(shape.ranks))]
    sizes = dict(zip([*modes, *bonds], [*shape.slice_sizes, *shape.ranks], strict=True))
    tensors = {"x": ("b", *modes[: shape.split])}
    for k, mode in enumerate(modes):
        tensors[f"core{k}"] = (*bonds[max(0, k - 1) : k], mode, *bonds[k : k + 1])
    return Network(tensors, {"b": tokens, **sizes}, ("b", *modes[shape.split :]))


@st.composite
def shapes(draw):
    """Any split of up to five cores, modes and ranks of one included."""
    cores = draw(st.integers(2, 5))
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


@pytest.mark.parametrize("shape", [ATTENTION, FEED_FORWARD], ids=["attention", "feed-forward"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_no_order_takes_much_fewer_operations(shape, tokens):
    """Each of the two gradients of a product costs what the product does."""
    chosen = plan_layer(Layer(shape, tokens), machine=default_machine("cpu")).chosen
    fewest = 3 * cheapest(linear_network(shape, tokens))
    assert 1 <= chosen.operations / fewest < 1.07  # the bond of 30 is padded to 32


@given(shapes(), st.sampled_from([1, 3, 50]))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_gradient_by_itself_costs_what_the_forward_pass_does(shape, tokens):
    """Why the best order of the forward pass is the best for all gradients together."""
    network = linear_network(shape, tokens)
    each = {cheapest(leaving_out(network, name)) for name in network.tensors}
    assert each == {cheapest(network)}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=5))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_the_cores_of_a_factor_are_contracted_in_the_cheapest_order(sizes):
    """The cheapest of all trees, or the usual order where it takes a tenth more at most."""
    modes, bonds = zip(*sizes, strict=True)
    shape = TTShape(modes, (3,), bonds)
    ((_, forward, _, usual), _), sizes = factor_chains(shape), dict(enumerate((1, *bonds)))
    sizes |= {f"mode{k}": mode for k, mode in enumerate(modes)}
    tensors = {f"core{k}": (k, f"mode{k}", k + 1) for k in range(len(modes))}
    whole = (0, *(f"mode{k}" for k in range(len(modes))), len(modes))
    found = sum(step.operations for step in forward)
    fewest = cheapest(Network(tensors, sizes, whole)) if len(modes) > 1 else 0
    assert fewest <= found <= min(usual, fewest / 0.9)


def test_a_pruned_layer_is_contracted_in_another_order_and_its_plan_says_so():
    layer = comera.TTLinear(8 * 6 * 4 * 4, 32, shape=((8, 6, 4, 4), (32,)), rank=[8, 16, 8, 2])
    plan = plan_layer(layer.at(64), machine=default_machine("cpu"))
    assert "cores contracted in 34.8k operations, outermost first in 43k" in str(plan)
    wanted = tt_to_dense(layer.gated_cores(), 4)
    torch.testing.assert_close(layer.factors().left @ layer.factors().right[:, :32], wanted.T)


def test_many_modes_still_have_distinct_letters():
    left, right = factor_chains(TTShape((2,) * 40, (2,) * 40, (3,) * 79))
    letters = {letter for chain in (left, right) for step in chain.forward for letter in step.what}
    assert len(letters - set(",->")) == 80 + 79
