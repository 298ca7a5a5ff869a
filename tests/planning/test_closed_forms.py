import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera.nn.linear import TTLinear
from comera.ops.context import static_shapes
from comera.ops.contract_cores import contract_cores
from comera.ops.linear.tt_linear import factorized_linears
from comera.ops.table.tt_embedding import contract_table
from comera.shapes import TTMShape, TTShape
from tests.planning.closed_forms import (
    dense_embedding_cost,
    dense_linear_cost,
    tt_embedding_cost,
    tt_linear_cost,
)

LINEAR = [
    TTShape((4,), (3,), (2,)),
    TTShape((6,), (3, 2), (4, 2)),
    TTShape((2, 3, 4), (4, 3, 2), (2, 5, 6, 5, 2)),
    TTShape((2, 3, 4, 2), (5, 2), (2, 3, 4, 3, 2)),
]
TABLES = [
    TTMShape((4, 3), (2, 3), (5,)),
    TTMShape((3, 2, 4), (2, 1, 3), (4, 3)),
    TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3)),
]


def multiply_adds(run):
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops() // 2, result


def cores_of(shape):
    return [torch.randn(size) for size in shape.core_shapes]


@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_linear_forward_is_what_the_reference_order_multiplies(shape):
    """Half-chains joined core by core from the outside, then two products with the batch."""
    x, cores = torch.randn(7, shape.in_width), cores_of(shape)

    def run():
        left = cores[0].flatten(0, 1)
        for core in cores[1 : shape.split]:
            left = (left @ core.flatten(1)).reshape(-1, core.shape[-1])
        right = cores[-1].flatten(1)
        for core in reversed(cores[shape.split : -1]):
            right = (core.flatten(0, 1) @ right).reshape(core.shape[0], -1)
        return x @ left @ right

    want, y = multiply_adds(run)
    left, right = contract_cores(cores, [], [], 1, shape.split, 0.0)
    torch.testing.assert_close(y, x @ left[0] @ right[0])
    assert tt_linear_cost(shape, 7).forward == want


@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_backward_is_twice_forward(shape):
    cost = tt_linear_cost(shape, 11)
    assert cost.backward == 2 * cost.forward
    assert cost.total == 3 * cost.forward


@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 100])
def test_saved_covers_what_the_op_keeps(shape, tokens):
    layer = TTLinear(shape.in_width, shape.out_width, bias=False, shape=shape)
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with static_shapes(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        left, right, bias = layer.factors()
        x = torch.randn(tokens, shape.in_width, requires_grad=True)
        factorized_linears(x, [left], [right], bias)
    params = {p.data_ptr() for p in layer.parameters()}
    assert (
        sum(n for key, n in kept.items() if key not in params)
        == tt_linear_cost(shape, tokens).saved
    )


@pytest.mark.parametrize("shape", TABLES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_look_ups_cost_one_small_product_each(shape, tokens):
    middle = shape.ranks[shape.split - 1]
    cost, one_more = tt_embedding_cost(shape, tokens), tt_embedding_cost(shape, tokens + 1)
    assert one_more.forward - cost.forward == middle * shape.num_cols
    halves = sum(half.numel() for half in contract_table(cores_of(shape)))
    assert cost.saved == tokens + halves


def test_the_merge_of_a_known_table():
    shape = TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3))
    left, right = (2 * 2) * 4 * (3 * 2) * 5, (2 * 2) * 3 * (2 * 1) * 5
    assert tt_embedding_cost(shape, 0).forward == left + right


@pytest.mark.parametrize(
    ("cost", "shape"), [(tt_linear_cost, LINEAR[2]), (tt_embedding_cost, TABLES[2])]
)
def test_costs_at_other_ranks_are_those_of_that_shape(cost, shape):
    ranks = tuple(max(1, rank - 1) for rank in shape.ranks)
    smaller = type(shape)(*(getattr(shape, name) for name in list(vars(shape))[:2]), ranks)
    assert cost(shape, 5, ranks) == cost(smaller, 5)
    assert cost(shape, 5, list(ranks)) == cost(smaller, 5)
    assert cost(shape, 5, (0,) * len(ranks)).forward == 0


def test_dense_costs_are_those_of_plain_products():
    want, _ = multiply_adds(lambda: torch.randn(7, 6) @ torch.randn(6, 5))
    cost = dense_linear_cost(6, 5, 7)
    assert (cost.forward, cost.backward, cost.saved) == (want, 2 * want, 42)
    assert dense_embedding_cost(9).total == 0
    assert dense_embedding_cost(9).saved == 9


def test_a_transformer_layer_of_the_paper_is_cheaper_than_dense():
    shape = TTShape.fit(768, 3072, shape=((12, 8, 8), (12, 16, 16)), rank=30)
    tokens = 32 * 128
    thin, dense = tt_linear_cost(shape, tokens), dense_linear_cost(768, 3072, tokens)
    assert math.isclose(dense.total / thin.total, 20.5, rel_tol=0.05)
