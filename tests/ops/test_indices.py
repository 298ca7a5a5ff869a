import pytest
import torch

from comera.ops.table.distinct_rows import Lookup, every_row, make_slots, sorted_rows, sum_by
from comera.ops.table.lookup import lookup


@pytest.mark.parametrize("hot", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 60, 400])
def test_every_entry_finds_its_row(count, hot):
    left, right = 9, 4
    rows = torch.randint(hot + left * right, (count,), generator=torch.Generator().manual_seed(1))
    keys, order = sorted_rows(rows, hot, left, right)
    slots = make_slots(keys, hot, left, right)
    right_of_slot = slots.right_T.repeat_interleave(slots.group)
    cold = hot + slots.left_S * right + right_of_slot
    assert torch.equal(torch.cat([slots.hot, cold])[slots.of_entries(order)], rows)
    assert (slots.of_sorted_N.diff() >= 0).all()
    assert (slots.right_T.diff() >= 0).all()
    if count:
        assert slots.of_sorted_N.unique().numel() == rows.unique().numel()


def test_groups_waste_few_slots():
    rows = torch.randint(4000, (3000,), generator=torch.Generator().manual_seed(0))
    slots = make_slots(sorted_rows(rows, 0, 50, 80)[0], 0, 50, 80)
    distinct = rows.unique().numel()
    assert slots.group > 1
    assert slots.count < 1.3 * distinct


def test_sums_by_place():
    values, places = torch.randn(20, 3, dtype=torch.float64), torch.randint(5, (20,))
    want = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, places, values)
    torch.testing.assert_close(sum_by(values, places, 7), want)


@pytest.mark.parametrize("hot", [None, "dense", "ranked"])
def test_the_form_of_static_shapes_is_the_same(hot):
    torch.manual_seed(0)
    left, right = torch.randn(5, 2, 3).double(), torch.randn(4, 3, 2).double()
    given = {None: None, "dense": torch.randn(3, 4), "ranked": torch.randn(3, 2)}[hot]
    basis = torch.randn(2, 4).double() if hot == "ranked" else None
    given = None if given is None else given.double()
    rows = (0 if given is None else 3) + 20
    indices = torch.randint(rows, (30,))
    table = Lookup(indices, left, right, given, basis, None, None, rows, 4)
    torch.testing.assert_close(every_row(table), lookup(*table.arguments(), False)[0])


def test_tables_of_a_milliard_rows():
    """Keys of entries stay within 64 bits."""
    rows = torch.tensor([999_999_999, 0, 999_999_999, 31_622], dtype=torch.int32)
    keys, order = sorted_rows(rows, 0, 31_623, 31_623)
    assert torch.equal(keys % 31_623 * 31_623 + keys // 31_623, rows.long()[order])


@pytest.mark.parametrize("most", [40, 2**40, 2**62])
def test_keys_of_any_size_are_sorted(most):
    rows = torch.randint(most, (1000,), generator=torch.Generator().manual_seed(0))
    keys, order = sorted_rows(rows, 0, most, 1)
    want = rows.sort(stable=True)
    assert torch.equal(keys, want.values)
    assert torch.equal(order, want.indices)
