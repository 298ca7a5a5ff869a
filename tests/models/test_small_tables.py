"""Small tables of other kinds are what their papers say, at no more than the parameters given."""

import math

import pytest
import torch
from torch import nn

from comera.models.dlrm import (
    DLRM,
    HashedTable,
    QuotientRemainderTable,
    SharedArrayTable,
    replace_tables_,
)

SIZES = {"user": 1000, "item": 300, "age": 7}
WIDTH = 16
KINDS = [
    {"kind": "hashed"},
    {"kind": "hashed", "own": 0.5},
    {"kind": "hashed", "rank": 4, "own": 0.8},
    {"kind": "quotient_remainder"},
    {"kind": "shared_array", "block": 8},
]


def tables_of(params=4000, **settings):
    tables = nn.ModuleDict({n: nn.EmbeddingBag(s, WIDTH, mode="sum") for n, s in SIZES.items()})
    return replace_tables_(tables, params=params, **settings)


def count(module):
    return sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("params", [2000, 4000, 5000])
def test_all_tables_together_have_the_parameters_given(settings, params):
    assert 0.8 * params < count(tables_of(params, **settings)) <= params


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_bags_are_sums_of_rows_in_either_form(settings):
    for name, table in tables_of(**settings).items():
        bags = torch.randint(SIZES[name], (5, 3))
        alone = torch.stack([table(bags[:, k : k + 1]) for k in range(3)]).sum(0)
        torch.testing.assert_close(table(bags), alone)
        offsets = torch.arange(0, 15, 3)
        torch.testing.assert_close(table(bags.flatten(), offsets), alone)
        assert alone.shape == (5, WIDTH)


def test_hashed_rows_are_shared_by_the_remainder_but_for_those_of_the_first():
    table = HashedTable(100, 4, kept=10, own=3)
    rows = table(torch.arange(100).unsqueeze(1))
    for k in range(100):
        kept = k if k < 3 else 3 + (k - 3) % 7
        torch.testing.assert_close(rows[k], table.table.weight[kept])


def test_hashed_rows_of_a_rank_lie_in_that_many_dimensions():
    rows = HashedTable(100, 16, kept=30, rank=4)(torch.arange(100).unsqueeze(1)).detach()
    assert int(torch.linalg.matrix_rank(rows)) == 4
    assert float(rows.std()) == pytest.approx(1 / math.sqrt(300), rel=0.15)  # as uniform dense ones


def test_a_quotient_and_a_remainder_are_a_row():
    table = QuotientRemainderTable(100, 4, divisor=9)
    nn.init.normal_(table.quotients.weight)
    rows = table(torch.arange(100).unsqueeze(1))
    for k in range(100):
        product = table.quotients.weight[k // 9] * table.remainders.weight[k % 9]
        torch.testing.assert_close(rows[k], product)
    assert torch.unique(rows, dim=0).shape[0] == 100


def test_blocks_of_rows_are_pieces_of_one_array():
    tables = tables_of(kind="shared_array", block=8)
    assert [type(table) for table in tables.values()] == [SharedArrayTable] * 3
    assert [name for name, _ in tables.named_parameters()] == ["user.array.weight"]
    array = tables["user"].array.weight
    pieces = array.detach().unfold(0, 8, 1)
    found = []
    for name, table in tables.items():
        rows = table(torch.arange(SIZES[name]).unsqueeze(1)).unflatten(1, (2, 8))
        same = (rows.flatten(0, 1)[:50, None] == pieces[None]).all(2)
        assert same.any(1).all()
        found.append(same.int().argmax(1))
    assert not torch.equal(found[0][:14], found[2])  # each table has a hash of its own
    starts = torch.cat([f.float() for f in found])
    assert starts.std() > len(array) / 6  # all over the array


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_click_predictor_learns_with_them(settings):
    torch.manual_seed(0)
    model = DLRM(SIZES, 0, WIDTH, top=[32])
    replace_tables_(model.tables, params=4000, **settings)
    fields = torch.stack([torch.randint(size, (512,)) for size in SIZES.values()], 1)
    labels = (fields[:, 0] % 2).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = nn.functional.binary_cross_entropy_with_logits(model(None, fields), labels)
        loss.backward()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    again = DLRM(SIZES, 0, WIDTH, top=[32])
    replace_tables_(again.tables, params=4000, **settings)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(None, fields), model(None, fields))


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_too_few_parameters_are_refused(settings):
    with pytest.raises(ValueError, match="params=5 "):
        tables_of(5, **settings)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_they_are_planned_without_memory(settings):
    with torch.device("meta"):
        planned = tables_of(**settings)
    shapes = {name: param.shape for name, param in tables_of(**settings).named_parameters()}
    assert {name: param.shape for name, param in planned.named_parameters()} == shapes


def test_a_block_divides_the_width():
    with pytest.raises(ValueError, match="block=5 must divide the width of the tables, 16"):
        tables_of(kind="shared_array", block=5)
