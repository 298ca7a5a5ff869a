"""Tables as tensor trains: their factors, whole or in slices, rows, bags and gradients."""

import copy
import math

import pytest
import tensorly
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import comera
from comera.ops.context import static_shapes
from comera.ops.cores import rank_gate
from comera.ops.table import distinct_rows
from comera.ops.table import tt_embedding as module
from comera.ops.table.distinct_rows import Lookup, every_row, make_slots, sorted_rows, sum_by
from comera.ops.table.lookup import lookup, lookup_backward
from comera.ops.table.tt_embedding import (
    Request,
    contract_tables,
    read_factors,
    tt_embedding,
    ttm_to_dense,
)
from comera.shapes import TTMShape
from tests.kernels import emulation

SHAPES = {
    "2 cores": TTMShape((4, 3), (2, 3), (5,)),
    "3 cores": TTMShape((3, 2, 4), (2, 1, 3), (4, 3)),
    "4 cores": TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3)),
    "6 cores": TTMShape((2, 2, 2, 3, 2, 2), (1, 2, 2, 1, 2, 2), (3, 4, 5, 4, 3)),
    "rank one": TTMShape((4, 3), (2, 3), (1,)),
}
PADDED = {"3 cores": (23, 5), "4 cores": (24, 7)}
"""True rows and widths of the tables whose modes multiply to more."""

HOT = {
    "cold": {},
    "hot": {"hot": 3},
    "hot rank": {"hot": 3, "hot_rank": 2},
}
"""Keywords of a table without rows before its train, with dense ones, with ones of low rank."""

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def contract_table(cores, gates=(), threshold=0.0):
    return contract_tables([(cores, gates, threshold)])[0]


class Problem:
    """A random table, and the results of every way to read it."""

    def __init__(self, name, gated=False, hot=0, hot_rank=None, dtype=torch.float64):
        self.shape = SHAPES[name]
        cold, self.width = PADDED.get(name, (self.shape.num_rows, self.shape.num_cols))
        self.rows = cold + hot
        wide = torch.promote_types(dtype, torch.float32)
        self.cores = [torch.randn(s, dtype=dtype) for s in self.shape.core_shapes]
        self.gates = [0.5 + torch.rand(r, dtype=wide) for r in self.shape.ranks] if gated else []
        for gate in self.gates:
            gate[1:2] = 0.001  # pruned, wherever there is a second rank
        self.hot = torch.randn(hot, hot_rank or self.width, dtype=dtype) if hot else None
        self.basis = torch.randn(hot_rank, self.width, dtype=dtype) if hot_rank else None
        given = (*self.cores, *self.gates, self.hot, self.basis)
        self.params = [t for t in given if t is not None]
        for param in self.params:
            param.requires_grad_()

    def request(self, indices):
        others = self.gates, 0.01, self.hot, self.basis
        return Request(indices, self.cores, self.rows, self.width, *others)

    def ours(self, indices):
        return tt_embedding(self.request(indices))

    def gated_cores(self):
        pairs = zip(self.cores, self.gates, strict=False)
        gated = [rank_gate(core, gate, 0.01) for core, gate in pairs]
        return gated + self.cores[len(gated) :]

    def reference(self, indices):
        return self.read(ttm_to_dense(self.gated_cores()), indices)

    def tensorly(self, indices):
        with tensorly.backend_context("pytorch"):
            table = tensorly.tt_matrix_to_matrix(self.gated_cores())
        return self.read(table, indices)

    def read(self, table, indices):
        table = table[:, : self.width]
        if self.hot is not None:
            hot = self.hot if self.basis is None else self.hot.matmul(self.basis)
            table = torch.cat([hot, table])
        return torch.nn.functional.embedding(indices, table)

    def grads(self, y):
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
        return torch.autograd.grad((y * weights).sum(), self.params)


def assert_all_agree(problem, indices):
    got = problem.ours(indices)
    assert got.shape == (*indices.shape, problem.width)
    for want in (problem.reference(indices), problem.tensorly(indices)):
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(
            problem.grads(problem.ours(indices)), problem.grads(want), **CLOSE
        )


@pytest.fixture
def few_slices(monkeypatch):
    """However small a table is, only slices that are read are contracted."""
    monkeypatch.setattr(module, "_DEARER", 0)
    monkeypatch.setattr(module, "_WORTH_IT", 0)


@pytest.fixture(params=["whole factors", "slices"])
def factors(request):
    """Both forms of the factors, whichever a batch takes."""
    if request.param == "slices":
        request.getfixturevalue("few_slices")


@pytest.mark.usefixtures("factors")
@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_and_its_gradients(name, gated, hot):
    problem = Problem(name, gated, **HOT[hot])
    for indices in (torch.arange(problem.rows), torch.tensor([[7], [1], [7]])):
        assert_all_agree(problem, indices)


@pytest.mark.usefixtures("factors")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (7,), (2, 9), (0,), (2, 0, 3), (40,)], ids=str)
def test_shapes_and_types_of_the_indices(shape, dtype):
    problem = Problem("4 cores", gated=True, hot=2, hot_rank=1)
    assert_all_agree(problem, torch.randint(problem.rows, shape, dtype=dtype))


@pytest.mark.parametrize("indices", [[5] * 9, [1, 1, 0, 1], [22, 3, 22, 3, 0]], ids=str)
def test_repeated_indices_add_their_gradients(indices):
    assert_all_agree(Problem("3 cores", gated=True, hot=2, hot_rank=1), torch.tensor(indices))


@pytest.mark.parametrize("hot_rank", [None, 2], ids=["dense", "rank 2"])
@pytest.mark.parametrize("indices", [[0, 1, 2], [3, 9, 14]], ids=["only hot", "only cold"])
def test_hot_rows_stand_before_the_train(indices, hot_rank):
    problem = Problem("2 cores", hot=3, hot_rank=hot_rank)
    assert_all_agree(problem, torch.tensor(indices))


def test_indices_that_are_not_contiguous():
    problem = Problem("3 cores")
    assert_all_agree(problem, torch.randint(problem.rows, (4, 6)).T[::2])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_finite_differences(gated):
    problem = Problem("3 cores", gated, hot=2, hot_rank=1)
    indices = torch.tensor([0, 1, 4, 4, 17, 24])

    def run(*params):
        cores, gates = params[: len(problem.cores)], params[len(problem.cores) : -2]
        others = gates, 0.01, params[-2], params[-1]
        return tt_embedding(Request(indices, cores, problem.rows, problem.width, *others))

    assert torch.autograd.gradcheck(run, problem.params, fast_mode=True)


@pytest.mark.usefixtures("factors")
@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize(
    ("indices", "wrong"),
    [
        ([0, -1], r"-1 at 1"),
        ([[9], [99]], r"99 at \(1, 0\)"),
        ([0, 10**12], r"1000000000000 at 1"),
        ([99, -7], r"99 at 0"),
        (99, "99"),
    ],
)
def test_an_index_out_of_range_is_named(indices, wrong, hot):
    problem = Problem("3 cores", **HOT[hot])
    with pytest.raises(IndexError, match=rf"index {wrong} is out of range .* {problem.rows} rows"):
        problem.ours(torch.tensor(indices))


def test_rows_that_exist_only_as_padding_are_out_of_range():
    problem = Problem("3 cores")
    assert problem.shape.num_rows == problem.rows + 1
    with pytest.raises(IndexError, match="index 23"):
        problem.ours(torch.tensor([problem.rows]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_table_as_it_is(dtype):
    problem = Problem("4 cores", gated=True, dtype=torch.float32)
    indices = torch.arange(problem.rows)
    with torch.autocast("cpu", dtype):
        got = problem.ours(indices)
    assert torch.equal(got, problem.ours(indices))
    assert all(grad.dtype == torch.float32 for grad in problem.grads(got))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_cores_keep_wide_gates(dtype):
    problem = Problem("4 cores", gated=True, hot=2, hot_rank=1, dtype=dtype)
    y = problem.ours(torch.arange(problem.rows))
    y.sum().backward()
    assert y.dtype == dtype
    assert all(param.grad.dtype == param.dtype for param in problem.params)
    assert all(gate.grad.dtype == torch.float32 for gate in problem.gates)


def test_a_vanished_table_is_zero():
    shape = TTMShape((2, 3), (2, 2), (0,))
    cores = [torch.randn(size, requires_grad=True) for size in shape.core_shapes]
    y = tt_embedding(Request(torch.tensor([0, 5, 5]), cores, 6, 4))
    assert torch.equal(y, torch.zeros(3, 4))
    y.sum().backward()
    assert all(core.grad.shape == core.shape for core in cores)


@pytest.mark.usefixtures("tensorly_on_numpy")
@pytest.mark.parametrize("name", SHAPES)
def test_the_dense_table_equals_that_of_tensorly(name):
    problem = Problem(name)
    want = tensorly.tt_matrix_to_matrix([core.detach().numpy() for core in problem.cores])
    got = ttm_to_dense(problem.cores).detach()
    torch.testing.assert_close(got, torch.from_numpy(want.copy()), **CLOSE)


def read(problem, indices):
    return read_factors([problem.request(indices)])[0]


@pytest.mark.usefixtures("factors")
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
        if emulation.find_gxx() is None:
            pytest.skip("no g++, which the emulation of CUDA needs")
        emulation.emulate_kernels(monkeypatch)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hot", "bags", "lies"),
    [
        ("cold", False, "as torch makes it"), ("cold", True, "as kernels make it"),
        ("hot", False, "as kernels make it"), ("hot", True, "as torch makes it"),
        ("hot rank", False, "as torch makes it"), ("hot rank", True, "as kernels make it"),
    ],
)  # fmt: skip
def test_registered_soundly(hot, bags, lies):
    problem = Problem("3 cores", **HOT[hot], dtype=torch.float32)
    offsets = torch.tensor([0, 3, 3]) if bags else None
    weights = torch.randn(5, requires_grad=True) if bags else None
    left, right = contract_table(problem.cores)
    right = right.contiguous() if lies == "as kernels make it" else right
    halves = [half.detach().requires_grad_() for half in (left, right)]
    indices = torch.tensor([0, 1, 7, 7, 22])
    others = problem.hot, problem.basis, weights, offsets
    given = Lookup(indices, *halves, *others, problem.rows, problem.width)
    torch.library.opcheck(lookup.custom_op, (*given, False))
    given = [part.detach() if isinstance(part, torch.Tensor) else part for part in given]
    out, *sorted_keys = lookup(*given, False)
    grad = torch.randn_like(out)
    saved = (grad, *sorted_keys, bags, *given)
    torch.library.opcheck(lookup_backward.custom_op, saved)


FACTORS = {
    **SHAPES,
    "5 cores": TTMShape((2, 3, 2, 2, 3), (1, 2, 2, 2, 1), (2, 4, 5, 3)),
    "no columns": TTMShape((4, 3), (1, 1), (2,)),
    "vanished": TTMShape((2, 3, 2), (2, 2, 2), (0, 0)),
}


def make(name, gated, dtype=torch.float64):
    shape = FACTORS[name]
    cores = [torch.randn(size, dtype=dtype) for size in shape.core_shapes]
    wide = torch.promote_types(dtype, torch.float32)
    gates = [0.5 + torch.rand(rank, dtype=wide) for rank in shape.ranks] if gated else []
    for gate in gates:
        gate[1:2] = 0.001  # pruned, wherever there is a second rank
    return [t.requires_grad_() for t in cores], [t.requires_grad_() for t in gates]


def reference(cores, gates, threshold):
    """One core after the other, rows and columns of each half kept apart all the way."""
    gated = [rank_gate(c, g, threshold) for c, g in zip(cores, gates, strict=False)]
    gated += cores[len(gates) :]
    split = len(cores) // 2
    left = torch.ones(1, 1, 1, dtype=cores[0].dtype)
    for core in gated[:split]:
        left = torch.einsum("vpr,rnms->vnpms", left, core).flatten(2, 3).flatten(0, 1)
    right = torch.ones(1, 1, 1, dtype=cores[0].dtype)
    for core in reversed(gated[split:]):
        right = torch.einsum("rnms,wsq->nwrmq", core, right).flatten(3).flatten(0, 1)
    return left, right


def grads(halves, cores, gates):
    weights = [torch.linspace(-1, 1, h.numel(), dtype=h.dtype).view(h.shape) for h in halves]
    total = sum((half * w).sum() for half, w in zip(halves, weights, strict=True))
    return torch.autograd.grad(total, [*cores, *gates])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", FACTORS)
def test_halves_and_gradients_match_the_reference(name, gated):
    cores, gates = make(name, gated)
    got, want = contract_table(cores, gates, 0.01), reference(cores, gates, 0.01)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        grads(got, cores, gates), grads(want, cores, gates), rtol=1e-10, atol=1e-10
    )


def test_gradients_of_factors_can_be_differentiated_again():
    cores, gates = make("3 cores", True)

    def merge(*tensors):
        return contract_table(tensors[: len(cores)], tensors[len(cores) :], 0.01)

    assert torch.autograd.gradcheck(merge, (*cores, *gates))
    assert torch.autograd.gradgradcheck(merge, (*cores, *gates))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_factors_are_rounded_once(dtype):
    cores, gates = make("4 cores", True, dtype)
    wide = [core.detach().float() for core in cores]
    got = contract_table(cores, gates, 0.01)
    for half, want in zip(got, reference(wide, gates, 0.01), strict=True):
        torch.testing.assert_close(half, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    sum(half.sum() for half in got).backward()
    assert all(core.grad.dtype == dtype for core in cores)
    assert all(gate.grad.dtype == torch.float32 for gate in gates)


@pytest.mark.parametrize("name", FACTORS)
def test_halves_are_new_and_have_their_bonds_innermost(name):
    cores, _ = make(name, False)
    left, right = contract_table(cores)
    assert left.is_contiguous()
    assert right.mT.is_contiguous()
    for half in (left, right):
        assert not half.numel() or all(half.data_ptr() != core.data_ptr() for core in cores)


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


@pytest.mark.parametrize(("count", "group"), [(13, 4), (14, 8), (40, 8), (400, 8)])
def test_groups_are_as_large_as_rows_fill_them_and_no_larger(count, group):
    rows = torch.arange(count)
    slots = make_slots(sorted_rows(rows, 0, 400, 1)[0], 0, 400, 1)
    assert (slots.group, slots.count) == (group, -(-count // group) * group)
    torch.manual_seed(0)
    left, right = torch.randn(400, 2, 3).double(), torch.randn(1, 3, 2).double()
    table = Lookup(rows, left, right, None, None, None, None, 400, 4)
    want = torch.einsum("nar,rb->nab", left[:count], right[0]).flatten(1)
    torch.testing.assert_close(lookup(*table, False)[0], want)


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
    torch.testing.assert_close(every_row(table), lookup(*table, False)[0])


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
