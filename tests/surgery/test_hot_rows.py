import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import comera
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.surgery.rows import append_rows_
from tests.processes import in_two_processes, said

ROWS, WIDTH, HOT = 30, 12, 5


def make(hot_rank=None, **more) -> TTEmbedding:
    torch.manual_seed(0)
    return TTEmbedding(ROWS, WIDTH, rank=3, order=2, hot_rows=HOT, hot_rank=hot_rank, **more)


def train(table, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        indices = torch.randint(ROWS, (40,), generator=torch.Generator().manual_seed(step))
        table(indices).square().sum().backward()
        optimizer.step()


def counts_of(*hot) -> torch.Tensor:
    """Counts of which the named indices are the largest."""
    counts = torch.ones(ROWS, dtype=torch.int64)
    counts[list(hot)] = 9
    return counts


@pytest.mark.parametrize("hot_rank", [None, 3])
def test_rows_that_enter_keep_their_values_and_the_others_stay(hot_rank):
    table = make(hot_rank)
    before = table.weight.detach().clone()
    assert comera.update_hot_rows_(table, counts_of(1, 3, 17, 29)) == 2
    after = table.weight.detach()
    left = [k for k in (0, 2, 4) if table.row_order[k] >= HOT]
    assert len(left) == 2
    same = [k for k in range(ROWS) if k not in (17, 29, *left)]
    assert torch.equal(after[same], before[same])
    if hot_rank is None:
        torch.testing.assert_close(after[[17, 29]], before[[17, 29]])
    else:  # as near as rows in the span of the basis can be
        basis = table.hot.basis.detach()
        best = before[[17, 29]] @ torch.linalg.pinv(basis) @ basis
        torch.testing.assert_close(after[[17, 29]], best)
    assert sorted(table.row_order.tolist()) == list(range(ROWS))
    assert set(table.row_order[[1, 3, 17, 29]].tolist()) < set(range(HOT))
    torch.testing.assert_close(table(torch.arange(ROWS)), table.weight)


def test_gradients_of_rows_that_moved_are_dropped():
    table = make()
    table(torch.arange(ROWS)).sum().backward()
    before = table.hot.grad.clone()
    comera.update_hot_rows_(table, counts_of(1, 3, 17, 29))
    entered = table.row_order[[17, 29]].long()
    assert not table.hot.grad[entered].any()
    others = [k for k in range(HOT) if k not in entered.tolist()]
    assert torch.equal(table.hot.grad[others], before[others])
    assert before.all()


def test_nothing_moves_where_the_hot_rows_are_the_right_ones():
    table = make()
    assert comera.update_hot_rows_(table, counts_of(0, 4)) == 0
    assert comera.update_hot_rows_(table, torch.zeros(ROWS)) == 0
    assert table.row_order is None
    assert "row_order" not in table.state_dict()


def test_moving_out_and_in_again_finds_the_old_places():
    table = make()
    comera.update_hot_rows_(table, counts_of(0, 1, 2, 3, 20))
    assert comera.update_hot_rows_(table, counts_of(0, 1, 2, 3, 4)) == 1
    assert torch.equal(table.row_order, torch.arange(ROWS, dtype=torch.int32))


@pytest.mark.parametrize("hot_rank", [None, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, comera.CAME])
def test_state_of_new_rows_is_zero_and_of_others_kept(kind, hot_rank):
    table = make(hot_rank)
    optimizer = kind(table.parameters(), lr=1e-2)
    train(table, optimizer)
    hot = table.hot if hot_rank is None else table.hot.cores[0].squeeze(0)
    param = table.hot if hot_rank is None else table.hot.cores[0]
    key = "exp_avg" if kind is torch.optim.AdamW else "exp_avg_update"
    before = optimizer.state[param][key].view(hot.shape).clone()
    comera.update_hot_rows_(table, counts_of(0, 1, 2, 3, 20), optimizer)
    after = optimizer.state[param][key].view(hot.shape)
    assert torch.equal(after[:4], before[:4])
    assert before[4].any()
    assert not after[4].any()
    train(table, optimizer)  # goes on
    assert after[4].any()


@pytest.mark.parametrize("hot_rank", [None, 3])
def test_an_average_of_new_rows_is_the_rows(hot_rank):
    table = make(hot_rank)
    optimizer = torch.optim.ASGD(table.parameters(), lr=1e-2, t0=0)
    train(table, optimizer)
    param = table.hot if hot_rank is None else table.hot.cores[0]
    dim = 0 if hot_rank is None else 1
    before = optimizer.state[param]["ax"].clone()
    comera.update_hot_rows_(table, counts_of(0, 1, 2, 3, 20), optimizer)
    after = optimizer.state[param]["ax"]
    assert torch.equal(after.narrow(dim, 0, 4), before.narrow(dim, 0, 4))
    assert torch.equal(after.narrow(dim, 4, 1), param.narrow(dim, 4, 1))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, comera.CAME])
def test_state_is_the_same_with_updates_in_backward(kind):
    tables = [make(3), make(3)]
    plain, inner = (kind(comera.param_groups(table, 1e-2)) for table in tables)
    for table, optimizer in zip(tables, (plain, comera.OptimizerInBackward(inner)), strict=True):
        train(table, optimizer)
        comera.update_hot_rows_(table, counts_of(0, 1, 2, 3, 20), optimizer)
    want, got = plain.state[tables[0].hot.cores[0]], inner.state[tables[1].hot.cores[0]]
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key])


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda groups: torch.optim.AdamW(groups, 1e-3),
        lambda groups: torch.optim.Adafactor(groups, 1e-3),
        lambda groups: comera.CAME(groups, 1e-3, bias_correction=True),
        lambda groups: comera.MuonAdamW(groups, 1e-3),
        lambda groups: torch.optim.RMSprop(groups, 1e-3, momentum=0.9),
    ],
    ids=["adamw", "adafactor", "came", "muon", "rmsprop"],
)
def test_the_first_step_of_new_rows_is_no_larger_than_those_of_the_others(make_optimizer):
    table = make()
    optimizer = make_optimizer(comera.param_groups(table, 1e-3))
    train(table, optimizer, 60)
    comera.update_hot_rows_(table, counts_of(0, 1, 2, 3, 20), optimizer)
    before = table.hot.detach().clone()
    optimizer.zero_grad()
    table(torch.arange(ROWS)).square().sum().backward()
    optimizer.step()
    steps = (table.hot.detach() - before).square().mean(1).sqrt()
    assert 0 < steps[4] < 2 * steps[:4].max()


def test_a_file_of_moved_rows_loads_into_a_new_table_and_back():
    moved, fresh = make(), make()
    plain = copy.deepcopy(fresh.state_dict())
    comera.update_hot_rows_(moved, counts_of(11, 12, 13))
    fresh.load_state_dict(moved.state_dict())
    assert torch.equal(fresh.weight, moved.weight)
    fresh.load_state_dict(plain)
    assert fresh.row_order is None
    twin = copy.deepcopy(moved)
    assert torch.equal(twin.weight, moved.weight)
    assert torch.equal(moved.to_dense().weight, moved.weight)


def test_padding_bags_and_compilation_know_of_moved_rows():
    torch.manual_seed(0)
    bag = TTEmbeddingBag(ROWS, WIDTH, rank=3, order=2, hot_rows=HOT, mode="sum", padding_idx=2)
    comera.update_hot_rows_(bag, counts_of(17, 18, 2))
    x = torch.tensor([[2, 17, 0], [18, 29, 4]])
    want = torch.nn.functional.embedding_bag(x, bag.weight, mode="sum", padding_idx=2)
    torch.testing.assert_close(bag(x), want)
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want)
    with pytest.raises(IndexError, match="index 30 at "):
        bag(torch.tensor([[ROWS]]))


def _other_counts(rank):
    table = make()
    before = copy.deepcopy(table.state_dict())
    wrapped = DistributedDataParallel(table)
    problem = said(lambda: comera.update_hot_rows_(table, counts_of(10 + rank)))
    unchanged = all(torch.equal(table.state_dict()[key], was) for key, was in before.items())
    moved = comera.update_hot_rows_(wrapped.module, counts_of(10, 20))
    return problem, unchanged, moved, table.row_order


@pytest.mark.slow
def test_processes_keep_the_same_rows_hot(tmp_path):
    mine, theirs = in_two_processes(_other_counts, tmp_path)
    assert "would keep different rows hot, 2 in all: give each of them the counts of" in mine[0]
    assert mine[:3] == theirs[:3] == (mine[0], True, 2)
    assert torch.equal(mine[3], theirs[3])


@pytest.mark.parametrize("hot_rank", [None, 3])
@pytest.mark.parametrize("trained", [True, False])
def test_appended_rows_are_trained_if_the_table_is(hot_rank, trained):
    torch.manual_seed(0)
    hot = {} if hot_rank is None else {"hot_rows": HOT, "hot_rank": hot_rank}
    table = TTEmbedding(ROWS, WIDTH, rank=3, order=2, **hot).requires_grad_(trained)
    append_rows_(table, torch.randn(4, WIDTH))
    assert table.num_embeddings == ROWS + 4
    assert {param.requires_grad for param in table.parameters()} == {trained}


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="the table has no hot rows"):
        comera.update_hot_rows_(TTEmbedding(ROWS, WIDTH, rank=3), torch.ones(ROWS))
    with pytest.raises(ValueError, match=r"counts have shape \(3,\); a table of 30 rows"):
        comera.update_hot_rows_(make(), torch.ones(3))


@pytest.mark.parametrize(
    "kind", [{"scatter_rows": False}, {"hot_rows": 3}, {"hot_rows": 3, "hot_rank": 1}]
)
def test_every_index_reads_the_row_at_its_place(kind):
    table = comera.TTEmbedding(37, 6, rank=3, **kind)
    before = table.weight.detach().clone()
    places = torch.randperm(37)
    table.keep_rows_at_(places.int())
    torch.testing.assert_close(table.weight, before[places])
    torch.testing.assert_close(table(torch.arange(37)), before[places])


def test_an_order_replaces_the_scattering():
    table = comera.TTEmbedding(37, 6, rank=3)
    scattered = table.weight.detach().clone()
    table.keep_rows_at_(torch.arange(37).int())
    rows = torch.tensor([i * 23 % 37 for i in range(37)])  # 37 / 1.618 = 22.9
    torch.testing.assert_close(scattered, table.weight[rows])


def test_an_order_is_saved_with_the_table():
    table, other = comera.TTEmbedding(20, 4, rank=2), comera.TTEmbedding(20, 4, rank=2)
    table.keep_rows_at_(torch.randperm(20).int())
    other.load_state_dict(table.state_dict())
    torch.testing.assert_close(other.weight, table.weight)
