"""A gated feed-forward by kernels that never store what is of the hidden width."""

import re

import pytest
import torch
from torch.nn import functional as F

from comera.ops.kernels import choose, feed_forward_kernel, launch, nvrtc
from comera.ops.linear.feed_forward import _gated_hidden
from tests.kernels.numbers import ROUNDED, assert_near, displaced, distance
from tests.kernels.thorough import some

CASES = {  # rows, hidden width, ranks of gate, up and down
    "a few rows": (5, 128, 8, 8, 8),
    "several blocks": (40, 256, 32, 32, 32),
    "ranks apart": (17, 128, 24, 8, 16),
    "the first stage last": (20, 512, 32, 16, 32),
}


dtypes = pytest.mark.parametrize("dtype", ROUNDED, ids=list(ROUNDED.values()))
pytestmark = pytest.mark.usefixtures("tf32")


class Hidden:
    """The arguments of the operator, and a gradient to go back with."""

    def __init__(self, name, dtype=torch.bfloat16, device="cpu", seed=0, rows=None):
        made = torch.Generator().manual_seed(seed)
        M, H, rank_g, rank_u, rank_2 = CASES[name]
        M, self.rounded = rows or M, ROUNDED[dtype]

        def random(*shape, scale=1.0):
            numbers = scale * torch.randn(shape, generator=made)
            return numbers.to(device, dtype)

        self.leaves = [
            random(M, rank_g), random(M, rank_u), random(rank_g, H, scale=rank_g**-0.5),
            random(rank_u, H, scale=rank_u**-0.5), random(H, rank_2, scale=H**-0.5),
        ]  # fmt: skip
        self.grad = random(M, rank_2)
        for leaf in self.leaves:
            leaf.requires_grad_()

    def run(self):
        assert feed_forward_kernel.gated_refuses(self.leaves) is None
        t2 = _gated_hidden(self.leaves)
        return [t2, *torch.autograd.grad(t2, self.leaves, self.grad)]

    def want(self):
        """In float64, everything stored."""
        wide = [leaf.detach().cpu().double().requires_grad_() for leaf in self.leaves]
        t_gate, t_up, gate, up, left2 = wide
        t2 = (F.silu(t_gate @ gate) * (t_up @ up)) @ left2
        return [t2, *torch.autograd.grad(t2, wide, self.grad.cpu().double())]


@pytest.fixture
def started(monkeypatch):
    names, launch = [], feed_forward_kernel.launch
    monkeypatch.setattr(feed_forward_kernel, "launch", lambda *a: names.append(a[1]) or launch(*a))
    return names


@pytest.mark.parametrize("name", list(CASES)[:3])
@dtypes
def test_kernels_equal_the_reference(name, dtype, emulated, started):
    hidden = Hidden(name, dtype)
    assert_near(hidden.run(), hidden.want(), hidden.rounded, factor=2)
    rounded, high = ("_tf32", 32) if dtype == torch.float32 else ("", 16)
    assert started == [
        f"feed_forward_gated{rounded}_{high}", f"feed_forward_gated{rounded}_back_rows_{high}",
        f"feed_forward_gated{rounded}_back_hidden", f"feed_forward_gated{rounded}_back_sums",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "high"), [(torch.bfloat16, 16), (torch.bfloat16, 64), (torch.float32, 32)]
)
@pytest.mark.usefixtures("thread_order")
def test_kernels_equal_the_reference_in_any_order_of_threads(dtype, high, monkeypatch):
    monkeypatch.setattr(feed_forward_kernel, "block_rows", lambda x: high)
    hidden = Hidden("several blocks", dtype, rows=70)
    assert_near(hidden.run(), hidden.want(), hidden.rounded, factor=2)


@dtypes
def test_tensors_may_begin_anywhere(dtype, emulated):
    hidden = Hidden("a few rows", dtype)
    hidden.leaves, hidden.grad = [displaced(leaf) for leaf in hidden.leaves], displaced(hidden.grad)
    assert_near(hidden.run(), hidden.want(), hidden.rounded, factor=2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 1000, 4096, 9000])
@dtypes
def test_kernels_equal_the_reference_on_a_card(rows, dtype):
    hidden = Hidden("several blocks", dtype, "cuda", torch.seed(), rows)
    found = hidden.run()
    assert_near([t.cpu() for t in found], hidden.want(), hidden.rounded, factor=2)
    assert all(map(torch.equal, found, hidden.run()))


def test_what_does_not_fit_is_computed_by_torch(emulated):
    t_gate, t_up, gate, up, left2 = Hidden("a few rows").leaves
    refuses = lambda *given: feed_forward_kernel.gated_refuses(given)  # noqa: E731
    assert refuses(t_gate.float(), t_up, gate, up, left2) == choose.UNLIKE
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert refuses(*(t.float() for t in (t_gate, t_up, gate, up, left2))) == choose.EXACT
    wide = torch.empty(5, 40).bfloat16()
    assert "40 wide" in refuses(t_gate, wide, gate, up, left2)
    assert "width of 96" in refuses(t_gate, t_up, gate[:, :96], up[:, :96], left2[:96])
    assert "empty" in refuses(t_gate[:0], t_up[:0], gate, up, left2)


BUGS = {
    "no barrier before a gated stage is filled": (r"__syncthreads\(\);  // the gated stage", "//"),
    "no barrier before parts replace stages": (r"__syncthreads\(\);  // the gated stages", "//"),
    "slopes of hidden columns forgotten": (r"(float at.*\n(.*\n){7}.*) \* slope;", r"\1;"),
    "shares of one gradient for all": (r"\(part \* 3 \+ of\)", "(part * 3)"),
}  # fmt: skip
OF_TF32 = {
    "factors read before they are there": (r"__syncthreads\(\);  // the factors of this", "//"),
    "rows come before factors are read": (r"__syncthreads\(\);  // nobody reads the factors", "//"),
}
PLANTED = [(bug, torch.bfloat16) for bug in BUGS] + [(bug, torch.float32) for bug in OF_TF32]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "dtype"), some(PLANTED))
def test_planted_bugs_are_caught(bug, dtype, plant, monkeypatch):
    hidden = Hidden("the first stage last", dtype, rows=80)
    (pattern, instead), text = (
        (BUGS | OF_TF32)[bug],
        nvrtc.text(feed_forward_kernel.gated_file(hidden.grad)),
    )
    mutant, count = re.subn(pattern, instead, text, count=1)
    assert count == 1
    plant(mutant, "")
    off = []
    for order in (launch.ASCENDING, launch.DESCENDING, 7):
        monkeypatch.setattr(launch, "thread_order", order)
        pairs = zip(hidden.run(), hidden.want(), strict=True)
        off += [distance(one, other) for one, other in pairs]
    assert not all(far <= 8e-3 for far in off)  # NaN is caught too
