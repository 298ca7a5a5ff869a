import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.compress.allocate import Choice, allocate


def loss_of(choices, ranks):
    return sum(
        0.0 if rank is None else float(one.losses[rank:].sum())
        for one, rank in zip(choices, ranks, strict=True)
    )


def size_of(choices, ranks):
    return sum(one.size(rank) for one, rank in zip(choices, ranks, strict=True))


def every(choices):
    return itertools.product(*([*range(1, len(one.losses)), None] for one in choices))


losses = st.lists(st.floats(0.001, 100), min_size=2, max_size=4).map(
    lambda values: torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
)


@settings(deadline=None, max_examples=60)
@given(st.lists(losses, min_size=1, max_size=3), st.data())
def test_no_choice_of_the_size_or_smaller_is_better_by_more_than_a_direction(curves, data):
    choices = []
    for curve in curves:
        each = data.draw(st.integers(3, 9))
        choices.append(Choice(curve, data.draw(st.integers(each, each * len(curve))), each))
    least = sum(min(one.dense, one.each) for one in choices)
    budget = data.draw(st.integers(least, sum(one.dense for one in choices)))
    got = allocate(choices, budget)
    assert size_of(choices, got) <= budget
    inside = [r for r in every(choices) if size_of(choices, r) <= budget]
    best = min(loss_of(choices, r) for r in inside)
    largest = max(float(one.losses.sum()) for one in choices)  # of one weight: it may turn dense
    assert loss_of(choices, got) <= best + largest


def test_where_all_ranks_cost_the_same_the_largest_losses_stay():
    curves = [torch.tensor([9.0, 5.0, 1.0]), torch.tensor([8.0, 7.0, 0.5])]
    choices = [Choice(curve, 1000, 10) for curve in curves]
    assert allocate(choices, 40) == [2, 2]
    assert allocate(choices, 30) == [1, 2]
    assert allocate(choices, 50) == [3, 2]


def test_a_weight_stays_dense_where_that_is_worth_its_price():
    cheap, dear = torch.tensor([1.0, 1e-6, 1e-6]), torch.tensor([9.0, 9.0, 9.0])
    choices = [Choice(cheap, 30, 12), Choice(dear, 30, 12)]
    assert allocate(choices, 42) == [1, None]


def test_what_is_left_over_turns_a_weight_dense_where_it_fits():
    curves = [torch.tensor([9.0, 8.0, 1e-3]), torch.tensor([9.0, 8.0, 7.0, 6.0])]
    choices = [Choice(curves[0], 25, 10), Choice(curves[1], 1000, 100)]
    assert allocate(choices, 424) == [2, 4]
    assert allocate(choices, 425) == [None, 4]
    assert allocate(choices, 399) == [None, 3]


def test_what_is_left_over_is_spent_to_the_last_entry():
    alike = Choice(torch.tensor([9.0, 5.0, 1.0]), 1000, 10)
    assert sorted(allocate([alike, alike], 30)) == [1, 2]
    assert allocate([alike, alike], 29) == [1, 1]


def test_what_is_left_over_goes_where_an_entry_saves_most():
    """All three other ranks of the first would not fit, and two of them save more than one that
    alone saves more."""
    many, dear = torch.tensor([50.0] * 4), torch.tensor([100.0, 60.0])
    assert allocate([Choice(many, 1000, 10), Choice(dear, 1000, 20)], 55) == [3, 1]


def test_a_weight_whose_least_rank_is_as_large_stays_dense():
    """At prices that round the two sizes differently, too."""
    for each in (7, 11, 21, 55):
        alike = Choice(torch.ones(5, dtype=torch.float64), each, each)
        other = Choice(torch.ones(2, dtype=torch.float64), 7, 3)
        for budget in range(each + 3, 3 * each + 6):
            assert allocate([alike, other], budget)[0] is None
