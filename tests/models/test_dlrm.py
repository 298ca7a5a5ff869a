"""DLRM, its metrics, and small tables, which are what their papers say."""

import math

import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import nn
from torch.nn import functional as F

import comera
from comera.models.dlrm import (
    DLRM,
    HashedTable,
    QuotientRemainderTable,
    SharedArrayTable,
    area_under_curve,
    click_metrics,
    replace_tables_,
)
from comera.nn.module import tensor_trains

SIZES = {"user": 40, "item": 30, "genre": 5}


def model(num_continuous=3) -> DLRM:
    torch.manual_seed(0)
    return DLRM(SIZES, num_continuous, 8, bottom=(16,), top=(12,))


@pytest.mark.parametrize("num_continuous", [0, 3])
def test_products_are_those_of_the_paper(num_continuous):
    """Every pair of parts multiplied one by one."""
    dlrm = model(num_continuous)
    continuous = torch.randn(6, num_continuous) if num_continuous else None
    fields = torch.stack([torch.randint(size, (6,)) for size in SIZES.values()], 1)
    for row in range(6):
        parts = [dlrm.tables[name].weight[fields[row, k]] for k, name in enumerate(SIZES)]
        below = []
        if num_continuous:
            below = [dlrm.bottom(continuous[row])]
            parts = below + parts
        products = [
            parts[i].dot(parts[j]) for i in range(len(parts)) for j in range(i + 1, len(parts))
        ]
        want = dlrm.top(torch.cat([*below, torch.stack(products)]))
        torch.testing.assert_close(dlrm(continuous, fields)[row], want[0])


def test_bags_of_one_entry_are_the_same():
    dlrm = model()
    continuous = torch.randn(4, 3)
    fields = torch.stack([torch.randint(size, (4,)) for size in SIZES.values()], 1)
    bags = [(fields[:, k].contiguous(), torch.arange(4)) for k in range(3)]
    torch.testing.assert_close(dlrm(continuous, bags), dlrm(continuous, fields))


def test_tables_and_wide_layers_become_tensor_trains_and_learn():
    dlrm = model()
    config = comera.TTConfig(
        rank=3, embedding_rank=3, order=2, min_size=200, hot_pattern={r"tables\.user": [10, 2]}
    )
    comera.tensorize_(dlrm, config)
    assert set(tensor_trains(dlrm)) >= {"tables.user", "tables.item"}
    assert type(dlrm.tables["genre"]) is torch.nn.EmbeddingBag
    assert (dlrm.tables["user"].hot_rows, dlrm.tables["user"].hot_rank) == (10, 2)
    assert dlrm.tables["item"].hot_rows == 0
    optimizer = torch.optim.AdamW(comera.param_groups(dlrm, 1e-2))
    fields = torch.stack([torch.randint(size, (32,)) for size in SIZES.values()], 1)
    continuous, labels = torch.randn(32, 3), (torch.arange(32) % 2).float()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(dlrm(continuous, fields), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_hot_rows_that_are_no_pair_are_named():
    with pytest.raises(ValueError, match=r"hot_pattern\['user'\]=\[3\] must be two numbers"):
        comera.TTConfig(hot_pattern={"user": [3]})
    with pytest.raises(ValueError, match=r"hot_pattern\['user'\]=\[None, 3\] must be two numbers"):
        comera.TTConfig(hot_pattern={"user": [None, 3]})
    with pytest.raises(ValueError, match="hot_pattern 'nobody' matches none of the targeted"):
        comera.tensorize_(model(), comera.TTConfig(rank=2, hot_pattern={"nobody": [3, None]}))


def test_layers_that_are_all_small_are_named():
    with pytest.raises(ValueError, match=r"matches no layer .* and has min_size=10000 entries"):
        comera.tensorize_(model(), comera.TTConfig(rank=2, min_size=10_000))


def test_made_without_memory_it_starts_as_a_converted_one_does():
    config = comera.TTConfig(rank=8, embedding_rank=8, order=2, target_modules=r"tables.*|top.0")
    sizes = {"user": 4000, "item": 900}
    with torch.device("meta"):
        lean = comera.tensorize_(DLRM(sizes, 3, 32, top=(64,)), config)
    lean.to_empty(device="cpu").reset_parameters("orthogonal")
    other = comera.tensorize_(DLRM(sizes, 3, 32, top=(64,)), config)
    wanted = dict(other.named_modules())
    assert tensor_trains(lean)
    for name, module in tensor_trains(lean).items():
        ours, theirs = (
            float(m.weight.detach().square().mean().sqrt()) for m in (module, wanted[name])
        )
        assert ours == pytest.approx(theirs, rel=0.1)
    assert all(param.isfinite().all() for param in lean.parameters())
    assert lean.top[0].bias.abs().max() > 0


def test_any_column_can_name_a_table():
    dlrm = DLRM({"type": 4, "keys": 3, "a.b": 5, "": 2}, 0, 8)
    assert list(dlrm.tables) == ["type_", "keys_", "a_b", "_"]
    assert dlrm(None, torch.zeros(2, 4, dtype=torch.int64)).shape == (2,)


def test_inputs_that_do_not_fit_are_named():
    dlrm, fields = model(), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="takes 3 continuous features, got None"):
        dlrm(None, fields)
    with pytest.raises(ValueError, match=r"takes 3 continuous features, got \(2, 4\)"):
        dlrm(torch.zeros(2, 4), fields)
    with pytest.raises(ValueError, match=r"\(bags, 3\), got \(2, 2\)"):
        dlrm(torch.zeros(2, 3), fields[:, :2])
    with pytest.raises(ValueError, match="num_continuous=0 and one table leave nothing"):
        DLRM([10], 0, 8)
    with pytest.raises(ValueError, match=r"has \['a\.b', 'a_b'\], one name as modules"):
        DLRM({"a.b": 10, "c": 3, "a_b": 20}, 3, 8)
    with pytest.raises(ValueError, match="at least one table"):
        DLRM({}, 3)
    with pytest.raises(ValueError, match=r"embedding_dim=\[0\] must be at least 1"):
        DLRM(SIZES, 3, 0)
    with pytest.raises(ValueError, match=r"top=\[8, 0\] must be at least 1"):
        DLRM(SIZES, 3, 8, top=(8, 0))


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_curve_equals_scipys_statistic(ties):
    torch.manual_seed(0)
    scores = torch.randint(10, (300,)).double() if ties else torch.randn(300).double()
    labels = (torch.rand(300) < 0.3).double()
    u = mannwhitneyu(scores[labels > 0], scores[labels == 0]).statistic
    want = u / (labels.sum() * (1 - labels).sum())
    assert area_under_curve(scores, labels) == pytest.approx(float(want))


def test_known_predictions_have_the_known_figures():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    share = click_metrics(torch.full((4,), math.log(1 / 3)), labels)
    assert share["nce"] == pytest.approx(1)  # always the share of clicks
    assert share["auc"] == 0.5
    assert share["accuracy"] == 0.75
    sure = click_metrics(torch.tensor([9.0, -9.0, -9.0, -9.0]), labels)
    assert sure["auc"] == sure["accuracy"] == 1
    assert sure["nce"] < 0.01
    assert math.isnan(click_metrics(torch.randn(3), torch.ones(3))["auc"])


ROWS = {"user": 1000, "item": 300, "age": 7}
WIDTH = 16
KINDS = [
    {"kind": "hashed"},
    {"kind": "hashed", "own": 0.5},
    {"kind": "hashed", "rank": 4, "own": 0.8},
    {"kind": "quotient_remainder"},
    {"kind": "shared_array", "block": 8},
]


def tables_of(params=4000, **settings):
    tables = nn.ModuleDict({n: nn.EmbeddingBag(s, WIDTH, mode="sum") for n, s in ROWS.items()})
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
        bags = torch.randint(ROWS[name], (5, 3))
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
        rows = table(torch.arange(ROWS[name]).unsqueeze(1)).unflatten(1, (2, 8))
        same = (rows.flatten(0, 1)[:50, None] == pieces[None]).all(2)
        assert same.any(1).all()
        found.append(same.int().argmax(1))
    assert not torch.equal(found[0][:14], found[2])  # each table has a hash of its own
    starts = torch.cat([f.float() for f in found])
    assert starts.std() > len(array) / 6  # all over the array


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_click_predictor_learns_with_them(settings):
    torch.manual_seed(0)
    model = DLRM(ROWS, 0, WIDTH, top=[32])
    replace_tables_(model.tables, params=4000, **settings)
    fields = torch.stack([torch.randint(size, (512,)) for size in ROWS.values()], 1)
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
    again = DLRM(ROWS, 0, WIDTH, top=[32])
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
    for width, block in ((8, 8), (24, 8), (10, 2), (64, 16)):
        tables = DLRM({"user": 50, "city": 30}, 0, width, [4], [4]).tables
        replace_tables_(tables, "shared_array", 100)
        assert tables["user"].block == block
        assert tables["user"](torch.tensor([[3]])).shape == (1, width)
