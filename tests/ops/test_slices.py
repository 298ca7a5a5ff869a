import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import comera
from comera.ops.context import static_shapes
from comera.ops.kernels import choose
from comera.ops.table import distinct_rows
from comera.ops.table import tt_embedding as module
from comera.ops.table.tt_embedding import Request, read_factors, tt_embedding
from tests.ops.test_tt_embedding import CLOSE, HOT, SHAPES, Problem, assert_all_agree

ORDERS = {
    "6 cores": comera.TTMShape((2, 2, 2, 3, 2, 2), (1, 2, 2, 1, 2, 2), (3, 4, 5, 4, 3)),
    **SHAPES,
}


@pytest.fixture
def few_slices(monkeypatch):
    """However small a table is, only slices that are read are joined."""
    monkeypatch.setattr(module, "_DEARER", 0)
    monkeypatch.setattr(module, "_WORTH_IT", 0)


def read(problem, indices):
    return read_factors(
        [Request(indices, problem.cores, problem.rows, problem.width, problem.gates, 0.01)]
    )[0]


@pytest.mark.usefixtures("few_slices")
@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ORDERS)
def test_rows_and_gradients(name, gated, hot, monkeypatch):
    monkeypatch.setitem(SHAPES, name, ORDERS[name])
    problem = Problem(name, gated, **HOT[hot])
    for indices in (torch.arange(problem.rows), torch.tensor([[7], [1], [7]])):
        assert_all_agree(problem, indices)


@pytest.mark.usefixtures("few_slices")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (40,)], ids=str)
def test_shapes_and_types_of_the_indices(shape, dtype):
    problem = Problem("4 cores", gated=True, hot=2, hot_rank=1)
    assert_all_agree(problem, torch.randint(problem.rows, shape, dtype=dtype))


@pytest.mark.usefixtures("few_slices")
def test_weighted_bags():
    problem = Problem("4 cores", gated=True, hot=3, hot_rank=2)
    indices, offsets = torch.tensor([1, 20, 20, 26, 3, 3, 11]), torch.tensor([0, 2, 2, 5])
    weights = torch.randn(7, dtype=torch.float64, requires_grad=True)
    problem.params.append(weights)
    train = problem.request(indices)
    got = tt_embedding(train._replace(weights_N=weights, offsets_B=offsets))
    rows = problem.reference(indices) * weights[:, None]
    bags = [rows[a:b].sum(0) for a, b in [(0, 2), (2, 2), (2, 5), (5, 7)]]
    want = torch.stack(bags)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(problem.grads(got), problem.grads(want), **CLOSE)


@pytest.mark.usefixtures("few_slices")
def test_no_more_slices_than_are_read():
    problem = Problem("4 cores")
    assert problem.shape.row_modes == (2, 3, 2, 2)
    factors = read(problem, torch.tensor([5, 23, 5, 21]))  # 4 + 1, 20 + 3, 20 + 1
    assert factors.left_VPR.shape[0] == 2
    assert factors.right_WRQ.shape[0] == 2


@pytest.mark.usefixtures("few_slices")
@pytest.mark.parametrize("wrong", [24, -1, 10**12])
def test_an_index_out_of_range_is_named(wrong):
    with pytest.raises(IndexError, match=rf"index {wrong} at 1 is out of range .* 24 rows"):
        read(Problem("4 cores"), torch.tensor([0, wrong]))


@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
def test_one_half_in_part_and_the_other_as_a_whole(side, monkeypatch):
    problem = Problem("4 cores", gated=True, hot=2)
    cores = problem.cores[2 * side : 2 * side + 2]
    shapes = {tuple(core.shape) for core in cores}

    def is_whole(_, half):
        return {tuple(core.shape) for core in half} != shapes

    monkeypatch.setattr(module, "is_whole", is_whole)
    assert_all_agree(problem, torch.tensor([0, 4, 9, 9, 25]))


@pytest.mark.parametrize("rows", [10**7, 10**9])
def test_large_tables_and_small_batches(rows):
    """What is read costs memory and time, not what is there."""
    table = comera.TTEmbedding(rows, 64, rank=32)
    indices = torch.tensor([0, rows - 1, 12345, rows // 2])
    cores, gates = list(table.cores), list(table.gates)
    [read] = read_factors([Request(indices, cores, rows, 64, gates, table.prune_below)])
    assert read.left_VPR.shape[0] <= 4
    with static_shapes():
        want = table(indices)
    torch.testing.assert_close(table(indices), want)


REASONS = ["many entries", "narrow cores", "static shapes", "no numbers", "kernels"]


@pytest.mark.parametrize("why", REASONS)
def test_both_halves_as_a_whole(why, monkeypatch):
    """Each for one reason alone: without it the left half is joined in part."""
    rows = 10**7
    table = comera.TTEmbedding(rows, 64, rank=32)
    indices = torch.zeros(2, dtype=torch.int64)
    V = math.prod(table.shape.row_modes[:2])

    def left_slices(cores, indices):
        [read] = read_factors([Request(indices, cores, rows, 64)])
        return read.left_VPR.shape[0]

    cores = list(table.cores)
    assert left_slices(cores, indices) == 1
    if why == "many entries":
        assert left_slices(cores, indices.repeat(V // 4)) == V
    elif why == "narrow cores":
        assert left_slices([core.bfloat16() for core in cores], indices) == V
    elif why == "static shapes":
        with static_shapes():
            assert left_slices(cores, indices) == V
    elif why == "no numbers":
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(tensor) for tensor in (*cores, indices)]
            assert left_slices(fake[:-1], fake[-1]) == V
    else:
        monkeypatch.setattr(choose, "mode", lambda: "emulate")
        assert left_slices(cores, indices) == V


def test_a_gate_that_is_not_a_number_is_seen():
    """In a small batch too, which reads slices, and not only in a large one."""
    table = comera.TTEmbedding(10**7, 64, rank=32)
    with torch.no_grad():
        table.gates[1][0] = float("nan")
    for entries in (2, 5000):
        assert table(torch.zeros(entries, dtype=torch.int64)).isnan().any()


def test_narrow_gradients_are_rounded_once(monkeypatch):
    """However many pieces they are summed over."""
    monkeypatch.setattr(distinct_rows, "_PIECE", 300)
    table = comera.TTEmbedding(3000, 16, shape=((3000, 1), (1, 16)), rank=8, dtype=torch.bfloat16)
    with torch.no_grad():
        for core in table.cores:
            core.uniform_()
    wide = copy.deepcopy(table).double()
    for one in (table, wide):
        one(torch.arange(3000)).sum().backward()
    for core, want in zip(table.cores, wide.cores, strict=True):
        torch.testing.assert_close(core.grad.double(), want.grad, rtol=8e-3, atol=0)


@pytest.mark.parametrize("piece", [1, 300])
def test_slices_are_gathered_piece_by_piece(piece, monkeypatch):
    monkeypatch.setattr(distinct_rows, "_PIECE", piece)
    problem = Problem("4 cores", gated=True, hot=2, hot_rank=1)
    assert_all_agree(problem, torch.randint(problem.rows, (60,)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("few", [False, True], ids=["whole factors", "slices"])
@pytest.mark.parametrize("kind", [comera.TTEmbedding, comera.TTEmbeddingBag, "two tables"])
def test_a_batch_is_looked_at_once(kind, few, compiled, monkeypatch):
    if few:
        monkeypatch.setattr(module, "_DEARER", 0)
        monkeypatch.setattr(module, "_WORTH_IT", 0)
    indices, looked = torch.tensor([[3, 99], [3, 0]]), []
    if kind == "two tables":
        bags = {name: comera.TTEmbeddingBag(100, 12, rank=4, mode="sum") for name in "ab"}
        layer, batch = comera.TTEmbeddingBagCollection(bags), {"a": indices, "b": indices}
    else:
        layer, batch = kind(100, 12, rank=4), indices
    run = torch.compile(layer, backend="eager") if compiled else layer
    run(batch)
    original = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: looked.append(1) or original(x))
    run(batch)
    # The two tables of a graph are read as one.
    assert len(looked) == (2 if kind == "two tables" and not compiled else 1)
