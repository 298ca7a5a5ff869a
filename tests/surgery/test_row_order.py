"""Tables that keep their rows in another order."""

import pytest
import torch

import comera


@pytest.mark.parametrize(
    "kind", [{"scatter_rows": False}, {"hot_rows": 3}, {"hot_rows": 3, "hot_rank": 1}]
)
def test_every_index_reads_the_row_at_its_place(kind):
    table = comera.TTEmbedding(37, 6, rank=3, **kind)
    before = table.weight.detach().clone()
    places = torch.randperm(37)
    comera.order_rows_(table, places)
    torch.testing.assert_close(table.weight, before[places])
    torch.testing.assert_close(table(torch.arange(37)), before[places])


def test_an_order_replaces_the_scattering():
    table = comera.TTEmbedding(37, 6, rank=3)
    scattered = table.weight.detach().clone()
    comera.order_rows_(table, torch.arange(37))
    rows = torch.tensor([i * 23 % 37 for i in range(37)])  # 37 / 1.618 = 22.9
    torch.testing.assert_close(scattered, table.weight[rows])


def test_an_order_is_saved_with_the_table():
    table, other = comera.TTEmbedding(20, 4, rank=2), comera.TTEmbedding(20, 4, rank=2)
    comera.order_rows_(table, torch.randperm(20))
    other.load_state_dict(table.state_dict())
    torch.testing.assert_close(other.weight, table.weight)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (torch.arange(9), r"\(9,\).*needs whole numbers of shape \(10,\)"),
        (torch.arange(10.0), "float32"),
        (torch.zeros(10, dtype=torch.long), "every number from 0 to 9 once"),
        (torch.arange(1, 11), "every number from 0 to 9 once"),
    ],
)
def test_what_is_no_permutation_is_refused(places, message):
    with pytest.raises(ValueError, match=message):
        comera.order_rows_(comera.TTEmbedding(10, 4, rank=2), places)
