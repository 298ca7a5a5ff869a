"""Rows of a table and bags of them, read by a block of threads or by a warp each."""

import itertools
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import comera
from comera.ops.context import static_shapes
from comera.ops.dispatch import preferring, recorded
from comera.ops.kernels import choose, contract_kernel, launch, lookup_kernel
from comera.ops.kernels.launch import KernelError
from comera.ops.table.distinct_rows import Lookup
from comera.ops.table.lookup import LOOKUP, LOOKUP_BACKWARD
from comera.ops.table.lookup import lookup as lookup_op
from tests.kernels import emulation
from tests.kernels.numbers import assert_near, displaced, distance, taken_by
from tests.kernels.thorough import some

DTYPES = [torch.float32, torch.bfloat16]

SHAPES = {  # V P R W Q, and numbers cut off the width
    "ones": (3, 1, 1, 2, 1, 0),
    "odd": (5, 3, 7, 4, 5, 2),
    "no bond": (3, 2, 0, 2, 3, 0),
    "the paper's, fewer rows": (6, 16, 32, 5, 48, 0),
    "beyond one depth": (4, 9, 37, 3, 8, 3),
    "beyond one block of tiles": (2, 67, 3, 2, 70, 1),
}
WARPS = {  # as above; rows in 16 bits, each read by a warp
    "the paper's, by warps": (6, 16, 32, 5, 48, 0),
    "little": (5, 3, 8, 4, 8, 0),
    "a width that is cut": (4, 5, 24, 3, 16, 24),
    "beyond one tile": (3, 35, 72, 2, 40, 8),
    "widest": (2, 7, 128, 2, 24, 0),
}
NARROW = [torch.bfloat16, torch.float16]
HOT = {"cold": (0, None), "hot": (3, None), "hot rank": (3, 2)}
"""How many rows come first, and of which rank."""


class Table:
    """Halves with hot rows, entries in bags, and a gradient to go back with."""

    def __init__(self, name, hot="cold", bags=False, weighted=False, dtype=torch.float32,
                 device="cpu", entries=40, seed=0):  # fmt: skip
        made = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=made).to(dtype).to(device)

        V, P, R, W, Q, cut = (SHAPES | WARPS)[name]
        self.by_warps = name in WARPS
        self.width, (num_hot, rank) = P * Q - cut, HOT[hot]
        self.rows = num_hot + V * W - 1  # the train has a row that is padding
        self.left, self.right = random(V, P, R), random(W, R, Q)
        if self.by_warps:
            self.right = self.right.mT.contiguous().mT
        self.hot = random(num_hot, rank or self.width) if num_hot else None
        self.basis = random(rank, self.width) if rank else None
        indices = torch.randint(self.rows, (entries,), generator=made)
        indices[: entries // 3] = self.rows - 1  # a row that occurs often, over several blocks
        if self.by_warps:
            indices[: entries // 3] = 1
            indices[indices // W == V - 2] = 0  # a slice that nobody reads
        self.indices = indices[torch.randperm(entries, generator=made)].to(device)
        self.offsets = torch.tensor([0, 0, 5, 6, 30], device=device) if bags else None
        self.weights = random(entries) if weighted else None
        self.grad = random(5 if bags else entries, self.width)

    @property
    def params(self):
        given = (self.left, self.right, self.hot, self.basis, self.weights)
        return [t for t in given if t is not None]

    def run(self):
        for param in self.params:
            param.requires_grad_()
        given = self.lookup()
        refuses = lookup_kernel.warps_refuse if self.by_warps else lookup_kernel.refuses
        assert refuses(given) is None
        out, _, _ = lookup_op(*given, False)
        return [out, *torch.autograd.grad(out, self.params, self.grad)]

    def lookup(self, **others):
        given = Lookup(
            self.indices, self.left, self.right, self.hot, self.basis, self.weights, self.offsets,
            self.rows, self.width,
        )  # fmt: skip
        return given._replace(**others)

    def want(self):
        """In float64, from the dense table."""
        wide = [p.detach().cpu().double().requires_grad_() for p in self.params]
        rest = iter(wide)
        left, right = next(rest), next(rest)
        table = torch.einsum("vpr,wrq->vwpq", left, right).flatten(0, 1).flatten(1)
        table = table[:, : self.width]
        if self.hot is not None:
            hot = next(rest)
            table = torch.cat([hot @ next(rest) if self.basis is not None else hot, table])
        rows = table[self.indices.cpu()]
        if self.weights is not None:
            rows = rows * next(rest)[:, None]
        if self.offsets is not None:
            ends = [*self.offsets.tolist(), rows.shape[0]]
            rows = torch.stack([rows[a:b].sum(0) for a, b in itertools.pairwise(ends)])
        grads = torch.autograd.grad(
            rows, wide, self.grad.cpu().double(), allow_unused=True, materialize_grads=True
        )
        return [rows, *grads]


@pytest.fixture
def started(monkeypatch):
    """Names of the kernels that are launched."""
    names = []
    for module in (lookup_kernel, contract_kernel):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda *a, launch=launch: names.append(a[1]) or launch(*a)
        )
    return names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bags", ["rows", "bags", "weighted bags"])
@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_the_reference(name, hot, bags, dtype, emulated):
    table = Table(name, hot, bags != "rows", bags == "weighted bags", dtype)
    factor = 4 if hot == "hot rank" else 2  # through a product of its own
    assert_near(table.run(), table.want(), dtype, factor)


def test_kernels_take_a_right_half_as_torch_makes_it(emulated):
    """With its bond innermost in memory; gradients lie like it."""
    table = Table("odd", "hot", bags=True, weighted=True)
    table.right = table.right.mT.contiguous().mT
    found = table.run()
    assert_near(found, table.want(), torch.float32, factor=2)
    assert found[2].stride() == table.right.stride()


@pytest.mark.parametrize("hot", HOT)
def test_kernels_take_halves_that_lie_otherwise(hot, emulated):
    """Turned, or from where no several numbers can be read at once."""
    for lie in (lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, displaced):
        table = Table("odd", hot, bags=True, weighted=True)
        for name in ("left", "right", "hot", "basis", "weights", "grad"):
            tensor = getattr(table, name)
            setattr(table, name, None if tensor is None else lie(tensor))
        assert_near(table.run(), table.want(), torch.float32, factor=2)


def test_warps_take_tensors_that_begin_anywhere(emulated):
    table = Table("little", dtype=torch.bfloat16, entries=200)
    table.left, table.grad = displaced(table.left), displaced(table.grad)
    table.right = displaced(table.right.mT).mT
    assert_near(table.run(), table.want(), torch.bfloat16)


@pytest.mark.parametrize("name", ["odd", "the paper's, fewer rows", "beyond one depth"])
def test_kernels_equal_the_reference_in_any_order_of_threads(name, thread_order):
    table = Table(name, "hot", True, True)
    assert_near(table.run(), table.want(), torch.float32, factor=2)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    "name",
    [pytest.param(s, marks=pytest.mark.slow) if s == "beyond one tile" else s for s in WARPS],
)
def test_warps_equal_the_reference_in_any_order_of_threads(name, dtype, thread_order, started):
    table = Table(name, dtype=dtype, entries=200)
    assert_near(table.run(), table.want(), dtype)
    assert len(started) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hot", "weighted"), [("cold", False), ("hot", True), ("hot rank", False), ("hot rank", True)]
)
@pytest.mark.parametrize("name", SHAPES)
def test_a_bag_of_thousands_is_as_near_as_a_small_one(name, hot, weighted, emulated):
    """4,970 entries, a third of them one row; on a card they may be four times as far off."""
    table = Table(name, hot, True, weighted, entries=5000, seed=1)
    assert_near(table.run(), table.want(), torch.float32, factor=2)


@pytest.mark.parametrize(
    ("name", "bags", "dtype", "entries", "factor"),
    [
        ("odd", True, torch.float32, 100_000, 2),
        pytest.param("little", False, torch.bfloat16, 20_000, 1, marks=pytest.mark.slow),
    ],
)
def test_a_row_read_by_tens_of_thousands_has_a_gradient_as_near(
    name, bags, dtype, entries, factor, emulated
):
    table = Table(name, "hot" if bags else "cold", bags, dtype=dtype, entries=entries, seed=1)
    assert_near(table.run(), table.want(), dtype, factor)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("first", [0, 1, 31, 32, 33])
def test_bags_may_begin_and_end_anywhere_in_their_pieces(width, first, thread_order):
    """Each with an empty one before it, and the last with what is left."""
    table = Table("odd", "hot", True, True, entries=333)
    inner = torch.arange(first, 333, width).repeat_interleave(2)
    table.offsets = torch.cat([torch.zeros(1 if first else 0, dtype=torch.long), inner])
    table.grad = torch.randn(len(table.offsets), table.width)
    got, want = table.run(), table.want()
    assert_near(got, want, torch.float32, factor=2)
    again = table.run()
    assert torch.equal(got[0], again[0])


def test_another_default_dtype_changes_no_sum(emulated):
    table = Table("odd", "hot", True, True, entries=3333)
    want = table.run()
    torch.set_default_dtype(torch.float16)
    try:
        got = table.run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, got, want))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bags", ["rows", "bags", "weighted bags"])
@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_the_reference_on_a_card(name, hot, bags, dtype):
    table = Table(
        name, hot, bags != "rows", bags == "weighted bags", dtype, "cuda", 5000, torch.seed()
    )
    # A bag of 4,970 entries; thousands of gradients are added to one slice.
    assert_near([t.cpu() for t in table.run()], table.want(), dtype, factor=8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", WARPS)
def test_warps_equal_the_reference_on_a_card(name, dtype):
    table = Table(name, dtype=dtype, device="cuda", entries=5000, seed=torch.seed())
    found = table.run()
    assert_near([t.cpu() for t in found], table.want(), dtype, factor=2)
    assert all(map(torch.equal, found, table.run()))


@pytest.mark.gpu
def test_a_look_up_can_be_captured_and_read_again():
    layer = comera.TTEmbedding(1000, 64, rank=8, device="cuda")
    indices = torch.randint(1000, (256,), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(indices).square().sum().backward()
            layer.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        rows = layer(indices)
        rows.square().sum().backward()
    for seed in range(2):
        torch.manual_seed(seed)
        indices.copy_(torch.randint(1000, (256,), device="cuda"))
        graph.replay()
        assert_near([rows], [layer.weight[indices]], torch.float32, factor=4)


@pytest.mark.gpu
def test_sums_over_bags_are_the_same_each_time_on_a_card():
    table = Table("the paper's, fewer rows", "hot", True, True, device="cuda", entries=5000)
    first = table.run()[0]
    assert all(torch.equal(first, table.run()[0]) for _ in range(5))


@pytest.mark.parametrize("entries", [0, 1, 31, 32, 33, 128, 129])
def test_any_number_of_entries_of_warps(entries, emulated):
    table = Table("little", dtype=torch.bfloat16, entries=entries)
    assert_near(table.run(), table.want(), torch.bfloat16)


def test_gradients_of_warps_are_the_same_in_each_order_of_threads(emulated, monkeypatch):
    table, found = Table("the paper's, by warps", dtype=torch.bfloat16, entries=200), []
    for order in (emulation.ASCENDING, emulation.DESCENDING, 7):
        monkeypatch.setattr(emulation, "thread_order", order)
        found.append(table.run())
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("bags", [False, True], ids=["rows", "bags"])
def test_no_entries(bags, emulated):
    table = Table("odd", "hot", bags, entries=0)
    if bags:
        table.offsets = torch.tensor([0, 0, 0, 0, 0])
    out, *grads = table.run()
    assert out.shape == table.grad.shape
    assert not out.any()
    assert not any(grad.any() for grad in grads)


def test_sizes_are_known_before_the_indices_are(emulated):
    """Under a mode that has no numbers; on a card the same makes a capture possible."""
    table = Table("odd", "hot rank", True, True)
    for param in table.params:
        param.requires_grad_()
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = table.lookup(indices_N=torch.empty(40, dtype=torch.long))
        out, *_ = lookup_op(*given, False)
        grads = torch.autograd.grad(out, table.params, torch.empty_like(out))
    assert [grad.shape for grad in grads] == [param.shape for param in table.params]


def test_more_rows_than_a_whole_number_of_32_bits_counts(emulated):
    V = W = 50_000
    left, right = torch.randn(V, 1, 1), torch.randn(W, 1, 1)
    halves = [half.requires_grad_() for half in (left, right)]
    indices = torch.tensor([V * W - 1, 0, 1 << 31, V * W - 1])
    given = Lookup(indices, left, right, None, None, None, None, V * W, 1)
    out, _, _ = lookup_op(*given, False)
    v, w = indices // W, indices % W
    torch.testing.assert_close(out, (left[v] * right[w]).view(-1, 1))
    grads = torch.autograd.grad(out.sum(), halves)
    want = torch.autograd.grad((left[v] * right[w]).sum(), halves)
    torch.testing.assert_close(grads, want)


def test_deterministic_algorithms_sum_gradients_through_torch(emulated):
    table = Table("odd", "hot", True, True)
    want = table.want()
    torch.use_deterministic_algorithms(True)
    try:
        assert lookup_kernel.refuses(table.lookup()) is None
        assert "deterministic" in lookup_kernel.refuses_backward(table.lookup())
        got = table.run()
        again = table.run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_near(got, want, torch.float32, factor=2)
    assert all(map(torch.equal, got, again))


def test_deterministic_algorithms_need_no_other_way_of_warps(emulated, started):
    table = Table("little", dtype=torch.bfloat16, entries=200)
    torch.use_deterministic_algorithms(True)
    try:
        table.run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name.rsplit("_", 1)[0] for name in started] == [
        "ttm_warps_rows", "ttm_warps", "ttm_warps_back_shares", "ttm_warps_back_sums",
    ]  # fmt: skip


def test_halves_too_large_for_a_block_are_refused(emulated):
    def refuses(left, right):
        return lookup_kernel.refuses(Table("odd").lookup(left_VPR=left, right_WRQ=right))

    left, right = torch.empty(2, 128, 128), torch.empty(2, 128, 128)
    assert refuses(left, right) is not None
    assert refuses(left.double(), right.double()) is not None
    table = Table("odd")
    assert refuses(table.left, table.right) is None
    assert refuses(table.left, table.right.bfloat16()) is not None


def test_what_warps_do_not_take(emulated):
    left, right = torch.empty(2, 4, 16).bfloat16(), torch.empty(2, 16, 8).bfloat16()

    def given(left, right, width, hot=None):
        return Lookup(torch.zeros(1).long(), left, right, hot, None, None, None, 4, width)

    def refuses(*table):
        return lookup_kernel.warps_refuse(given(*table))

    assert refuses(left, right, 32) is None
    assert "16 bits" in refuses(left.float(), right.float(), 32)
    assert "16 bits" in refuses(left, right.half(), 32)
    assert "hot rows or bags" in refuses(left, right, 32, torch.empty(2, 32))
    assert "multiples of 8" in refuses(left, right, 30)
    assert "multiples of 8" in refuses(left[..., :12], right[:, :12], 32)
    assert "0 wide" in refuses(left[..., :0], right[:, :0], 32)
    many = torch.empty(1 << 16, 8, 8, device="meta").bfloat16()
    assert "32 bits" in lookup_kernel.warps_unfit(given(many, many.mT, 64))


def test_a_table_starts_two_kernels_forward_and_three_backward(emulated, started):
    layer = comera.TTEmbedding(100, 12, rank=4)
    layer(torch.tensor([3, 99])).sum().backward()
    assert [name for name in started if name != "contract_describe"] == [
        "contract_f32", "ttm_rows_f32", "ttm_back_rows_f32", "contract_back_last_f32",
        "contract_back_first_f32",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "width", "rank", "hot_rows", "dtype"),
    [
        (kind, 12, 4, 4, dtype)
        for kind in (comera.TTEmbedding, comera.TTEmbeddingBag)
        for dtype in DTYPES
    ]
    + [(comera.TTEmbedding, 64, 5, 0, torch.bfloat16)],  # by warps whatever its rank: it is padded
)
def test_layers_read_through_kernels(
    kind, width, rank, hot_rows, dtype, emulated, started, monkeypatch
):
    indices = torch.tensor([[0, 3, 3], [5, 1, 99]], dtype=torch.int32)
    layer = kind(100, width, rank=rank, hot_rows=hot_rows, dtype=dtype)
    out = layer(indices)
    out.float().square().sum().backward()
    grads = [param.grad.clone() for param in layer.parameters()]
    assert sum(name.startswith("ttm") for name in started) == (2 if hot_rows else 4)
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    layer.zero_grad()
    want = layer(indices)
    want.float().square().sum().backward()
    assert_near([out], [want], dtype, factor=4)
    assert_near(grads, [param.grad for param in layer.parameters()], dtype, factor=8)


@pytest.mark.parametrize(
    ("name", "read"),
    [("odd", lookup_kernel.read), ("little", lookup_kernel.read_by_warps)],
    ids=["block", "warp"],
)
def test_an_index_out_of_range_stops_the_kernel(name, read, emulated):
    table = Table(name, dtype=torch.bfloat16 if name == "little" else torch.float32)
    wrong = table.lookup(indices_N=torch.tensor([0, table.rows]))
    with pytest.raises(KernelError, match="index out of range"):
        read(wrong)


BUGS = {
    "no barrier before slices are read": (
        r"    __syncthreads\(\);\n    if \(!active\) continue;", "    if (!active) continue;",
    ),
    "no barrier before slices are replaced": (r"__syncthreads\(\);  // nobody reads what", "//"),
    "no barrier before a row is replaced": (
        r"__syncthreads\(\);  // nobody reads the row before", "//",
    ),
    "no barrier before a sum is whole": (r"__syncthreads\(\);  // dr is whole", "//"),
    "the last slice forgotten": (r"// dr is whole\n  flush\(\);", "//"),
    "hot rows added twice": (r"for \(int i = first - begin;", "for (int i = 0;"),
    "slices exchanged": (r"cold / table.W \* P", "cold % table.W * P"),
    "the first piece added twice": (r"next - 1, \(end - 1\)", "next - 2, (end - 1)"),
    "the last piece forgotten": (r"\(end - 1\) / PIECE, p0", "(end - 1) / PIECE - 1, p0"),
    "a piece goes on into the next bag": (
        r"first \+ PIECE < bag_end \? first \+ PIECE : bag_end",
        "first + PIECE < entries ? first + PIECE : entries",
    ),
    "bags summed whole beside their pieces": (r"entry < head; \+\+entry", "entry < end; ++entry"),
}  # fmt: skip


OF_WARPS = {
    "a stage read before it is there": (r"arrived<STAGES - 2>", "arrived<STAGES - 1>"),
    "no barrier before ends are read": (r"__syncthreads\(\);\n  const int b", "const int b"),
    "one slice for all entries": (r"key, e\) % side\.others", "key, 0) % side.others"),
    "a slice cut where a piece ends": (r"bool behind = ", "bool behind = false && "),
    "a slice begun where a piece begins": (r"bool before = ", "bool before = false && "),
    "the next slice added": (r"if \(e \+ 1 < count && next == slice\)", "if (e + 1 < count)"),
    "a share forgotten": (r"first \+ 1; piece <= last", "first + 1; piece < last"),
    "a sum that goes on": (r"sum\[n\]\[i\] = 0\.f;", ""),
    "columns beyond the width": (r" && p \* table\.Q \+ q < table\.D;", ";"),
    "a row too few": (r"at < R && p < P\)", "at < R && p + 1 < P)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", [*some(BUGS), *some(OF_WARPS)])
def test_planted_bugs_are_caught(bug, plant, monkeypatch):
    pattern, instead = (BUGS | OF_WARPS)[bug]
    file = "ttm_lookup" if bug in BUGS else "ttm_warps"
    mutant, count = re.subn(pattern, instead, launch.text(file), count=1)
    assert count == 1
    if bug in BUGS:
        plant(mutant)
        tables = [Table("the paper's, fewer rows", "hot", True, True, entries=1000)]
        tables[0].offsets = torch.tensor([0, 0, 64, 90, 300])  # one ends between two pieces
    else:
        plant(mutant, "")
        names = "a width that is cut", "little"
        tables = [Table(name, dtype=torch.bfloat16, entries=100) for name in names]
    off = []
    for order in (emulation.ASCENDING, emulation.DESCENDING, 7):
        monkeypatch.setattr(emulation, "thread_order", order)
        for table in tables:
            off += [distance(a, b) for a, b in zip(table.run(), table.want(), strict=True)]
    assert not all(far <= (2e-6 if bug in BUGS else 4e-3) for far in off)  # NaN is caught too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("careful", "instead", "entries"),
    [
        (r"(constexpr int PIECE =) 32;", r"\1 1 << 20;", 5000),
        (r"atomicAdd\((.*_grad .*), \(double\)(.*)\);", r"*(\1) = float(*(\1) + \2);", 100_000),
    ],
    ids=["a bag by one block", "gradients in float32"],
)
def test_sums_of_one_row_after_the_other_are_caught(careful, instead, entries, plant):
    mutant, count = re.subn(careful, instead, launch.text("ttm_lookup"))
    assert count in (1, 3)
    plant(mutant)
    table = Table("odd", "hot", True, entries=entries, seed=1)
    off = [distance(a, b) for a, b in zip(table.run(), table.want(), strict=True)]
    assert max(off) > 8e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", ["kernel", "torch"])
@pytest.mark.parametrize("forward", ["kernel", "torch"])
@pytest.mark.parametrize("bags", [False, True], ids=["rows", "bags"])
def test_each_way_back_is_right_after_each_way_forward(bags, forward, backward, dtype, emulated):
    """As times may order them: a step may go forward with static shapes and back without."""
    table = Table("the paper's, fewer rows", "cold", bags, bags, dtype)
    for param in table.params:
        param.requires_grad_()
    with preferring("lookup", forward):
        out, *_ = lookup_op(*table.lookup(), False)
    with preferring("lookup", backward):
        grads = torch.autograd.grad(out, table.params, table.grad)
    assert_near([out, *grads], table.want(), dtype, factor=2)


@pytest.mark.parametrize("dtype", NARROW)
def test_torch_goes_back_from_rows_that_warps_have_read(dtype, emulated, started):
    """As from a captured pass to one that is not, where torch is faster."""
    table = Table("little", dtype=dtype, entries=200)
    for param in table.params:
        param.requires_grad_()
    with preferring("lookup", "kernel"):
        out, *_ = lookup_op(*table.lookup(), False)
    with preferring("lookup", "torch"):
        grads = torch.autograd.grad(out, table.params, table.grad)
    assert len(started) == 1
    assert_near([out, *grads], table.want(), dtype, factor=2)


@pytest.mark.parametrize("name", ["odd", "little"])
def test_rows_are_not_counted_in_a_graph_though_that_is_faster(name, emulated):
    table = Table(name, dtype=torch.bfloat16)
    for param in table.params:
        param.requires_grad_()
    with static_shapes(), preferring("lookup", "torch"):
        assert taken_by(LOOKUP, table.lookup()).startswith("kernel")
        out, *_ = lookup_op(*table.lookup(), False)
        with recorded() as seen:
            grads = torch.autograd.grad(out, table.params, table.grad)
    assert [way for _, way, _ in seen] == ["kernel"]
    assert_near([out, *grads], table.want(), torch.bfloat16, factor=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hot", "bags"), [(False, False), (True, False), (False, True)])
def test_times_of_one_kernel_say_nothing_of_another(hot, bags, dtype):
    """Rows in 16 bits are read by warps, all others by blocks of threads."""
    left, right = torch.empty(4, 8, 32, dtype=dtype), torch.empty(5, 32, 8, dtype=dtype)
    rows = torch.empty(3, 64, dtype=dtype) if hot else None
    offsets = torch.zeros(1, dtype=torch.int64) if bags else None
    given = Lookup(torch.zeros(7).long(), left, right, rows, None, None, offsets, 20, 64)
    found = LOOKUP.case(given)
    assert found == LOOKUP_BACKWARD.case(given, None)
    by_warps = dtype == torch.bfloat16 and not (hot or bags)
    kinds = [] if by_warps else ["a block a row"] + ["hot rows"] * hot + ["bags"] * bags
    assert found[1:] == (dtype, (7, *kinds))
