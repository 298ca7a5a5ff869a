import math

import numpy as np
import pytest
import tensorly
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.planning.contraction import find_tree, linear_network, lookup_network, schedule
from comera.shapes import TTMShape, TTShape
from tests.planning.running import random_tensors, run
from tests.planning.test_contraction_search import shapes

PAPER = TTShape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12))


def every_tree(names):
    """All binary trees over the names."""
    if len(names) == 1:
        yield names[0]
        return
    first, *rest = names
    for chosen in range(1 << len(rest)):
        left = [first, *(name for k, name in enumerate(rest) if chosen >> k & 1)]
        right = [name for k, name in enumerate(rest) if not chosen >> k & 1]
        if right:
            yield from ((a, b) for a in every_tree(left) for b in every_tree(right))


def planned(network, tree, without=()):
    wanted = set(network.tensors) - set(without)
    return schedule(network, tree, root="gy", result="y", wanted=wanted)


def by_autograd(network, values):
    """Forward and every gradient from one einsum over the whole network."""
    tensors = {
        name: torch.tensor(value, requires_grad=name != "gy") for name, value in values.items()
    }
    inputs = [name for name in network.tensors if name != "gy"]
    equation = ",".join("".join(network.tensors[name]) for name in inputs)
    y = torch.einsum(f"{equation}->{''.join(network.tensors['gy'])}", *[tensors[n] for n in inputs])
    y.backward(tensors["gy"])
    return y.detach().numpy(), {name: tensors[name].grad.numpy() for name in inputs}


def check(network, tree, *, literally=False):
    values = random_tensors(network)
    plan, tensors = planned(network, tree), dict(values)
    forward = run(plan.forward, tensors, literally=literally)
    assert plan.operations == forward + run(plan.backward, tensors, literally=literally)
    assert plan.operations == 3 * forward
    y, gradients = by_autograd(network, values)
    np.testing.assert_allclose(tensors["y"], y, rtol=1e-9, atol=1e-9)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(tensors[f"grad({name})"], gradient, rtol=1e-9, atol=1e-9)


@given(shapes(most=7), st.integers(1, 5))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_the_best_tree_gives_forward_and_gradients_at_the_stated_cost(shape, tokens):
    shape = shape.with_rank(4)
    network = linear_network(shape, tokens)
    check(network, find_tree(network.without("gy")))


def test_so_does_every_other_tree():
    network = linear_network(TTShape((2, 3), (3, 1), (2, 3, 1)), 3)
    trees = list(every_tree([name for name in network.tensors if name != "gy"]))
    assert len(trees) == math.prod([1, 3, 5, 7])
    for tree in trees:
        check(network, tree)


@pytest.mark.parametrize(
    "network",
    [
        linear_network(TTShape((2,), (3,), (2,)), 3),
        linear_network(TTShape((2, 2), (3,), (2, 1)), 2),
        lookup_network(TTMShape((2, 2, 2), (2, 1, 3), (2, 2)), 3),
    ],
    ids=["1+1", "2+1", "lookup"],
)
def test_operations_counted_one_by_one(network):
    check(network, find_tree(network.without("gy")), literally=True)


@pytest.mark.parametrize(
    "shape", [TTMShape((3, 2), (2, 4), (5,)), TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3))]
)
def test_a_look_up_row_by_row(shape):
    network = lookup_network(shape, 6)
    check(network, find_tree(network.without("gy")))


@pytest.mark.usefixtures("tensorly_on_numpy")
def test_against_the_tensor_that_tensorly_reconstructs():
    shape = TTShape((3, 2), (2, 4), (3, 4, 2))
    network = linear_network(shape, 5)
    values = random_tensors(network)
    cores = [values[f"core{k}"].reshape(size) for k, size in enumerate(shape.core_shapes)]
    weight = np.asarray(tensorly.tt_to_tensor(cores)).reshape(6, 8)
    plan = planned(network, find_tree(network.without("gy")))
    run(plan.forward, values)
    np.testing.assert_allclose(values["y"].reshape(5, 8), values["x"].reshape(5, 6) @ weight)


def test_sharing_at_the_papers_attention_layer():
    network = linear_network(PAPER, 4096)
    tree = find_tree(network.without("gy"))
    plan = planned(network, tree, without=["gy"])
    forward = sum(step.operations for step in plan.forward)
    backward = plan.operations - forward
    assert plan.gradients == 7
    # Seven gradients by themselves against two forward passes' worth.
    assert (plan.separate_operations - forward) / backward == 3.5
    assert plan.separate_operations / plan.operations == pytest.approx(8 / 3)
    assert forward == 2 * (4096 * 768 * 30 + 12 * 12 * 8 * 30 + 96 * 30 * 8 * 30)


def test_gradients_nobody_wants_are_left_out():
    network = linear_network(PAPER, 4096)
    tree = find_tree(network.without("gy"))
    everything, frozen = planned(network, tree), planned(network, tree, without=["x"])
    (dropped,) = {step.result for step in everything.backward} - {
        step.result for step in frozen.backward
    }
    assert dropped == "grad(x)"
    cost = next(step.operations for step in everything.backward if step.result == "grad(x)")
    assert everything.operations - frozen.operations == cost
    only_x = schedule(network, tree, root="gy", result="y", wanted={"x"})
    assert [step.result for step in only_x.backward][-1] == "grad(x)"
    assert len(only_x.backward) == 2
    assert schedule(network, tree, root="gy", result="y", wanted=()).backward == ()


def test_partial_products_have_names_and_equations():
    network = linear_network(TTShape((2, 3), (4,), (2, 3)), 5)
    plan = planned(network, (("x", ("core0", "core1")), "core2"))
    assert [(step.label, step.what) for step in plan.forward] == [
        ("core0·core1", "aA,AcB->acB"),
        ("x·core0·core1", "bac,acB->bB"),
        ("y = x·core0·core1 × core2", "bB,Bd->bd"),
    ]
    assert plan.backward[0].label == "grad(x·core0·core1) = gy × core2"


def test_copies_are_counted_where_an_operand_does_not_lie_as_a_matrix():
    network = linear_network(TTShape((2, 3), (4,), (2, 3)), 5)
    plan = planned(network, ((("x", "core0"), "core1"), "core2"))
    first, second, _ = plan.forward
    assert (first.copied, first.calls) == (5 * 2 * 3, 2)  # the mode summed over is in the middle
    assert second.what == "bcA,AcB->bB"
    assert second.copied == min(5 * 3 * 2, 2 * 3 * 3)  # summed in different orders
