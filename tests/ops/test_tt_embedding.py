import pytest
import tensorly
import torch

from comera.ops.cores import rank_gate_reference
from comera.ops.table.distinct_rows import Lookup
from comera.ops.table.lookup import lookup, lookup_backward
from comera.ops.table.tt_embedding import (
    Request,
    contract_table,
    tt_embedding,
    tt_embedding_reference,
    ttm_to_dense,
)
from comera.shapes import TTMShape

SHAPES = {
    "2 cores": TTMShape((4, 3), (2, 3), (5,)),
    "3 cores": TTMShape((3, 2, 4), (2, 1, 3), (4, 3)),
    "4 cores": TTMShape((2, 3, 2, 2), (2, 2, 1, 2), (4, 5, 3)),
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
        gated = [rank_gate_reference(core, gate, 0.01) for core, gate in pairs]
        return gated + self.cores[len(gated) :]

    def reference(self, indices):
        return tt_embedding_reference(indices, self.gated_cores(), self.width, self.hot, self.basis)

    def tensorly(self, indices):
        with tensorly.backend_context("pytorch"):
            table = tensorly.tt_matrix_to_matrix(self.gated_cores())[:, : self.width]
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


@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_and_its_gradients(name, gated, hot):
    problem = Problem(name, gated, **HOT[hot])
    assert_all_agree(problem, torch.arange(problem.rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (7,), (2, 9), (0,), (2, 0, 3)], ids=str)
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
    given = Lookup(indices, *halves, *others, problem.rows, problem.width).arguments()
    torch.library.opcheck(lookup.custom_op, (*given, False))
    tensors = [tensor.detach() for tensor in given[0]]
    out, *sorted_keys = lookup(tensors, *given[1:], False)
    grad = torch.randn_like(out)
    saved = (grad, *sorted_keys, tensors, given[1], problem.rows, bags)
    torch.library.opcheck(lookup_backward, saved)
