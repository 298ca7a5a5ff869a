"""Rows of a table read by a warp each, and their gradients."""

import re

import pytest
import torch

import comera
from comera.ops.dispatch import preferring
from comera.ops.kernels import choose, launch, lookup_kernel, nvrtc
from comera.ops.kernels.nvrtc import KernelError
from comera.ops.table.distinct_rows import Lookup
from comera.ops.table.lookup import lookup
from tests.kernels.numbers import assert_near, displaced, distance
from tests.kernels.thorough import some

DTYPES = [torch.bfloat16, torch.float16]

SHAPES = {  # V P R W Q, and numbers cut off the width
    "the paper's, fewer rows": (6, 16, 32, 5, 48, 0),
    "little": (5, 3, 8, 4, 8, 0),
    "a width that is cut": (4, 5, 24, 3, 16, 24),
    "beyond one tile": (3, 35, 72, 2, 40, 8),
    "widest": (2, 7, 128, 2, 24, 0),
}


class Table:
    """Factors, entries, and a gradient to go back with."""

    def __init__(self, name, dtype, entries=200, device="cpu", seed=0):
        made = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=made).to(dtype).to(device)

        V, P, R, W, Q, cut = SHAPES[name]
        self.rows, self.width = V * W - 1, P * Q - cut  # the train has a row that is padding
        self.left, self.turned = random(V, P, R), random(W, Q, R)
        indices = torch.randint(self.rows, (entries,), generator=made)
        indices[: entries // 3] = 1  # a row that occurs often, over several pieces
        indices[indices // W == V - 2] = 0  # a slice that nobody reads
        self.indices = indices[torch.randperm(entries, generator=made)].to(device)
        self.grad = random(entries, self.width)

    def run(self):
        given = self.lookup()
        assert lookup_kernel.warps_refuse(given) is None
        out, _, _ = lookup(*given.arguments(), False)
        return [out, *torch.autograd.grad(out, [self.left, self.turned], self.grad)]

    def lookup(self):
        left, right = self.left.requires_grad_(), self.turned.requires_grad_().mT
        return Lookup(self.indices, left, right, *(None,) * 4, self.rows, self.width)

    def want(self):
        """In float64, from the dense table."""
        wide = [t.detach().cpu().double().requires_grad_() for t in (self.left, self.turned)]
        table = torch.einsum("vpr,wqr->vwpq", *wide).flatten(0, 1).flatten(1)
        rows = table[self.indices.cpu(), : self.width]
        return [rows, *torch.autograd.grad(rows, wide, self.grad.cpu().double())]


@pytest.fixture
def started(monkeypatch):
    names, launch = [], lookup_kernel.launch
    monkeypatch.setattr(lookup_kernel, "launch", lambda *a: names.append(a[1]) or launch(*a))
    return names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(s, marks=pytest.mark.slow) if s == "beyond one tile" else s for s in SHAPES],
)
def test_kernels_equal_the_reference_in_any_order_of_threads(name, dtype, thread_order, started):
    table = Table(name, dtype)
    assert_near(table.run(), table.want(), dtype)
    assert len(started) == 4


def test_tensors_may_begin_anywhere(emulated):
    table = Table("little", torch.bfloat16)
    table.left, table.turned, table.grad = map(displaced, (table.left, table.turned, table.grad))
    assert_near(table.run(), table.want(), torch.bfloat16)


@pytest.mark.parametrize("entries", [0, 1, 31, 32, 33, 128, 129])
def test_any_number_of_entries(entries, emulated):
    table = Table("little", torch.bfloat16, entries)
    assert_near(table.run(), table.want(), torch.bfloat16)


@pytest.mark.slow
def test_a_row_read_by_tens_of_thousands_has_a_gradient_as_near(emulated):
    table = Table("little", torch.bfloat16, 20_000)
    assert_near(table.run(), table.want(), torch.bfloat16)


def test_gradients_are_the_same_in_each_order_of_threads(emulated, monkeypatch):
    table, found = Table("the paper's, fewer rows", torch.bfloat16), []
    for order in (launch.ASCENDING, launch.DESCENDING, 7):
        monkeypatch.setattr(launch, "thread_order", order)
        found.append(table.run())
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_goes_back_from_rows_that_warps_have_read(dtype, emulated, started):
    """As from a captured pass to one that is not, where torch is faster."""
    table = Table("little", dtype)
    with preferring("lookup", "kernel"):
        out, _, _ = lookup(*table.lookup().arguments(), False)
    with preferring("lookup", "torch"):
        grads = torch.autograd.grad(out, [table.left, table.turned], table.grad)
    assert len(started) == 1
    assert_near([out, *grads], table.want(), dtype, factor=2)


def test_deterministic_algorithms_need_no_other_way(emulated, started):
    table = Table("little", torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        table.run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name.rsplit("_", 1)[0] for name in started] == [
        "ttm_warps_rows", "ttm_warps", "ttm_warps_back_shares", "ttm_warps_back_sums",
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_the_reference_on_a_card(name, dtype):
    table = Table(name, dtype, 5000, "cuda", torch.seed())
    found = table.run()
    assert_near([t.cpu() for t in found], table.want(), dtype, factor=2)
    assert all(map(torch.equal, found, table.run()))


def test_a_layer_of_16_bits_reads_so(emulated, started, monkeypatch):
    """Whatever its rank: the bond is padded."""
    layer = comera.TTEmbedding(100, 64, rank=5, dtype=torch.bfloat16)
    indices = torch.tensor([[0, 3, 3], [5, 1, 99]], dtype=torch.int32)
    out = layer(indices)
    out.float().square().sum().backward()
    grads = [param.grad.clone() for param in layer.parameters()]
    assert len(started) == 4
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    layer.zero_grad()
    want = layer(indices)
    want.float().square().sum().backward()
    assert_near([out], [want], torch.bfloat16, factor=4)
    assert_near(grads, [param.grad for param in layer.parameters()], torch.bfloat16, factor=8)


def test_what_does_not_fit_goes_another_way(emulated):
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


def test_an_index_out_of_range_stops_the_kernel(emulated):
    table = Table("little", torch.bfloat16)
    wrong = table.lookup()._replace(indices_N=torch.tensor([0, table.rows]))
    with pytest.raises(KernelError, match="index out of range"):
        lookup_kernel.read_by_warps(wrong)


BUGS = {
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
@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_caught(bug, plant, monkeypatch):
    pattern, instead = BUGS[bug]
    mutant, count = re.subn(pattern, instead, nvrtc.text("ttm_warps"), count=1)
    assert count == 1
    plant(mutant, "")
    tables = [Table(name, torch.bfloat16, 100) for name in ("a width that is cut", "little")]
    off = []
    for order in (launch.ASCENDING, launch.DESCENDING, 7):
        monkeypatch.setattr(launch, "thread_order", order)
        for table in tables:
            pairs = zip(table.run(), table.want(), strict=True)
            off += [distance(one, other) for one, other in pairs]
    assert not all(far <= 4e-3 for far in off)  # NaN is caught too
