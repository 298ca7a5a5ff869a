"""Feed-forwards, plain and gated, by kernels that never store their hidden activations."""

import re

import pytest
import torch
from torch.nn import functional as F

from comera.ops.kernels import choose, feed_forward_kernel, launch
from comera.ops.linear.feed_forward import _gated_hidden, factorized_feed_forward
from comera.ops.linear.tt_linear import Factors
from tests.kernels import emulation
from tests.kernels.numbers import ROUNDED, assert_near, displaced, distance
from tests.kernels.thorough import some

CASES = {  # rows, widths in, between and out, both ranks
    "a few rows": (5, 128, 128, 128, 8, 8),
    "several blocks": (40, 128, 256, 384, 32, 32),
    "ranks apart": (17, 256, 128, 128, 24, 16),
    "a wide bond": (17, 256, 128, 128, 40, 32),
    "wide bonds": (40, 128, 256, 384, 48, 48),
}
GATED = {  # rows, hidden width, ranks of gate, up and down
    "gated, a few rows": (5, 128, 8, 8, 8),
    "gated, several blocks": (40, 256, 32, 32, 32),
    "gated, ranks apart": (17, 128, 24, 8, 16),
    "gated, the first stage last": (20, 512, 32, 16, 32),
}
ACTIVATIONS = feed_forward_kernel.ACTIVATIONS
dtypes = pytest.mark.parametrize("dtype", ROUNDED, ids=list(ROUNDED.values()))
pytestmark = pytest.mark.usefixtures("tf32")


class Layers:
    """Both layers' factors, a batch, and a gradient to go back with."""

    def __init__(self, name, activation="gelu", bias=True, dtype=torch.bfloat16, device="cpu",
                 seed=0, rows=None):  # fmt: skip
        made = torch.Generator().manual_seed(seed)
        M, I, H, O, rank1, rank2 = CASES[name]  # noqa: E741

        def random(*shape, scale=1.0):
            numbers = scale * torch.randn(shape, generator=made)
            return numbers.to(device, dtype)

        self.activation, self.bias, self.rounded = activation, bias, ROUNDED[dtype]
        self.x, self.grad = random(rows or M, I), random(rows or M, O)
        self.factors = [
            random(I, rank1, scale=I**-0.5), random(rank1, H, scale=rank1**-0.5),
            random(H, rank2, scale=H**-0.5), random(rank2, O, scale=rank2**-0.5),
        ]  # fmt: skip
        if bias:
            for left in self.factors[::2]:
                left[:, -1] = 0  # as factors are contracted
        self.leaves = [self.x, *self.factors]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def run(self):
        left1, right1, left2, right2 = self.factors
        assert feed_forward_kernel.refuses(self.x, self.factors, self.activation) is None
        pairs = [
            Factors(left, right, self.bias) for left, right in ((left1, right1), (left2, right2))
        ]
        y = factorized_feed_forward(self.x, *pairs, self.activation)
        return self._taken(y, torch.autograd.grad(y, self.leaves, self.grad))

    def want(self):
        """In float64, the hidden activation stored."""
        wide = [leaf.detach().cpu().double().requires_grad_() for leaf in self.leaves]
        x, left1, right1, left2, right2 = wide
        t = self._with_ones(self._rounded(x) @ self._rounded(left1))
        hidden = getattr(F, self.activation)(self._rounded(t) @ self._rounded(right1))
        y = self._with_ones(hidden @ left2) @ right2
        return self._taken(y, torch.autograd.grad(y, wide, self.grad.cpu().double()))

    def _rounded(self, t):
        """Round numbers as they enter a product, but no gradient; ReLU then has the same signs."""
        if self.activation != "relu":
            return t
        narrow = t.detach().float()
        if self.rounded == "tf32":  # to the nearest one of ten bits, ties away from zero
            narrow = ((narrow.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
        else:
            narrow = narrow.bfloat16()
        return t + (narrow.double() - t.detach())

    def _with_ones(self, t):
        return torch.cat([t[:, :-1], torch.ones_like(t[:, -1:])], 1) if self.bias else t

    def _taken(self, y, grads):
        """Drop the gradient of what pads a bond beside a bias: nobody takes it."""
        x, left1, right1, left2, right2 = grads
        end = -1 if self.bias else None
        return [y, x, left1[:, :end], right1, left2[:, :end], right2]


class Hidden:
    """The arguments of the operator of a gated one, and a gradient to go back with."""

    def __init__(self, name, dtype=torch.bfloat16, device="cpu", seed=0, rows=None):
        made = torch.Generator().manual_seed(seed)
        M, H, rank_g, rank_u, rank_2 = GATED[name]
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


def make(name, dtype=torch.bfloat16, device="cpu", seed=0, rows=None):
    kind = Hidden if name in GATED else Layers
    return kind(name, dtype=dtype, device=device, seed=seed, rows=rows)


@pytest.fixture
def started(monkeypatch):
    names, launch = [], feed_forward_kernel.launch
    monkeypatch.setattr(feed_forward_kernel, "launch", lambda *a: names.append(a[:2]) or launch(*a))
    return names


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_equal_the_reference(activation, dtype, bias, emulated, started):
    layers = Layers("a few rows", activation, bias, dtype)
    assert_near(layers.run(), layers.want(), layers.rounded, factor=2)
    rounded, high = ("_tf32", 32) if dtype == torch.float32 else ("", 16)
    names = f"{high}", f"back_rows_{high}", "back_hidden", "back_sums"
    file = f"feed_forward_{activation}{rounded}"
    assert started == [(file, f"feed_forward_{name}") for name in names]


@pytest.mark.parametrize("name", list(GATED)[:3])
@dtypes
def test_kernels_of_gated_ones_equal_the_reference(name, dtype, emulated, started):
    hidden = make(name, dtype)
    assert_near(hidden.run(), hidden.want(), hidden.rounded, factor=2)
    rounded, high = ("_tf32", 32) if dtype == torch.float32 else ("", 16)
    file = f"feed_forward_gated{rounded}"
    names = f"{high}", f"back_rows_{high}", "back_hidden", "back_sums"
    assert started == [(file, f"{file}_{name}") for name in names]


ORDERED = [(name, torch.bfloat16, high) for name in list(CASES)[:3] for high in (16, 32, 64)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "high"),
    [
        *ORDERED, ("several blocks", torch.float32, 32), ("ranks apart", torch.float32, 64),
        ("gated, several blocks", torch.bfloat16, 16),
        ("gated, several blocks", torch.bfloat16, 64),
        ("gated, several blocks", torch.float32, 32),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("thread_order")
def test_kernels_equal_the_reference_in_any_order_of_threads(name, dtype, high, monkeypatch):
    monkeypatch.setattr(feed_forward_kernel, "block_rows", lambda x: high)
    layers = make(name, dtype, rows=70 if name in GATED else None)
    assert_near(layers.run(), layers.want(), layers.rounded, factor=2)


@pytest.mark.parametrize("name", ["a wide bond", "wide bonds"])
@dtypes
def test_wide_bonds_have_kernels_of_their_own(name, dtype, emulated, started):
    layers = Layers(name, "silu", dtype=dtype)
    assert_near(layers.run(), layers.want(), layers.rounded, factor=2)
    assert all(file.endswith("_wide") for file, _ in started)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_one(activation, emulated):
    layers = Layers("a few rows", activation)
    with torch.no_grad():
        layers.x[1, 3] = torch.nan
    found, wanted = layers.run(), layers.want()
    assert found[0][1].isnan().all()
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@dtypes
def test_gradients_are_summed_over_parts_of_the_batch_in_one_order(dtype, emulated, monkeypatch):
    layers, found = Layers("a few rows", dtype=dtype, rows=150), []
    for order in (emulation.ASCENDING, emulation.DESCENDING, 7):
        monkeypatch.setattr(emulation, "thread_order", order)
        found.append(layers.run())
    assert_near(found[0], layers.want(), layers.rounded, factor=2)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@dtypes
def test_tensors_may_begin_anywhere(dtype, emulated):
    layers = Layers("a few rows", dtype=dtype)
    x, *factors = map(displaced, layers.leaves)
    y, t1, t2 = feed_forward_kernel.forward(x, factors, True, "gelu")
    given = map(displaced, (layers.grad, t1, t2))
    grads = feed_forward_kernel.backward(x, factors, *given, "gelu")
    found = layers._taken(y, grads)
    assert_near(found, layers.want(), layers.rounded, factor=2)


@dtypes
def test_tensors_of_gated_ones_may_begin_anywhere(dtype, emulated):
    hidden = make("gated, a few rows", dtype)
    hidden.leaves, hidden.grad = [displaced(leaf) for leaf in hidden.leaves], displaced(hidden.grad)
    assert_near(hidden.run(), hidden.want(), hidden.rounded, factor=2)


def test_numbers_that_tf32_holds_are_multiplied_exactly(emulated):
    layers = Layers("a few rows", dtype=torch.float32)
    with torch.no_grad():
        for leaf in layers.leaves:
            leaf.copy_((leaf * 8).round() / 8)
        _, t1, _ = feed_forward_kernel.forward(layers.x, layers.factors, True, "gelu")
        wanted = layers.x.double() @ layers.factors[0].double()
    torch.testing.assert_close(t1[:, :-1].double(), wanted[:, :-1], rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 1000, 4096, 9000])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "gated"])
@dtypes
def test_kernels_equal_the_reference_on_a_card(activation, rows, dtype):
    if activation == "gated":
        layers = make("gated, several blocks", dtype, "cuda", torch.seed(), rows)
    else:
        layers = Layers("several blocks", activation, True, dtype, "cuda", torch.seed(), rows)
    found = layers.run()
    (y, *grads), (wanted_y, *wanted) = [t.cpu() for t in found], layers.want()
    assert_near([y], [wanted_y], layers.rounded, factor=2)
    # Sums of float32 beside a tie are rounded to the other neighbour than those of float64, and
    # relu's derivative may change: for one argument in 10^5, the gradient changes by 3e-3.
    flips = activation == "relu" and layers.rounded == "tf32"
    assert_near(grads, wanted, layers.rounded, factor=8 if flips else 2)
    assert all(map(torch.equal, found, layers.run()))


def test_only_the_batch_and_thin_products_are_kept(emulated):
    layers = Layers("several blocks")
    kept = []
    pack = lambda t: kept.append(t) or t  # noqa: E731
    left1, right1, left2, right2 = layers.factors
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        factorized_feed_forward(
            layers.x, Factors(left1, right1, True), Factors(left2, right2, True), "gelu"
        )
    factors = sum(t.numel() for t in layers.factors)
    assert sum(t.numel() for t in kept) == layers.x.numel() + 40 * 64 + factors


def test_what_does_not_fit_is_computed_by_torch(emulated):
    layers = Layers("a few rows")
    x, (left1, right1, left2, right2) = layers.x, layers.factors
    refuses = lambda x, *given: feed_forward_kernel.refuses(x, given[:-1], given[-1])  # noqa: E731
    assert refuses(x, left1, right1, left2, right2, "gelu") is None
    assert refuses(x.float(), left1, right1, left2, right2, "gelu") == choose.UNLIKE
    assert refuses(*(t.half() for t in (x, *layers.factors)), "gelu") == choose.UNLIKE
    wide = [t.float() for t in (x, *layers.factors)]
    assert refuses(*wide, "gelu") is None
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert refuses(*wide, "gelu") == choose.EXACT
    assert "tanh" in refuses(x, left1, right1, left2, right2, "tanh")
    wide = torch.empty(128, 56).bfloat16()
    assert "56 wide" in refuses(x, wide, wide.T, left2, right2, "gelu")
    assert "width of 96" in refuses(x, left1, right1[:, :96], left2[:96], right2, "gelu")
    assert "empty" in refuses(x[:0], left1, right1, left2, right2, "gelu")


def test_what_does_not_fit_of_gated_ones_is_computed_by_torch(emulated):
    t_gate, t_up, gate, up, left2 = make("gated, a few rows").leaves
    refuses = lambda *given: feed_forward_kernel.gated_refuses(given)  # noqa: E731
    assert refuses(t_gate.float(), t_up, gate, up, left2) == choose.UNLIKE
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert refuses(*(t.float() for t in (t_gate, t_up, gate, up, left2))) == choose.EXACT
    wide = torch.empty(5, 40).bfloat16()
    assert "40 wide" in refuses(t_gate, wide, gate, up, left2)
    assert "width of 96" in refuses(t_gate, t_up, gate[:, :96], up[:, :96], left2[:96])
    assert "empty" in refuses(t_gate[:0], t_up[:0], gate, up, left2)


BUGS = {
    "no barrier before a stage is filled": (r"__syncthreads\(\);  // the stage is there", "//"),
    "no barrier before parts are added": (r"__syncthreads\(\);  // all parts", "//"),
    "no barrier before the tile is read": (r"__syncthreads\(\);  // the tile is there", "//"),
    "no barrier before parts replace stages": (r"__syncthreads\(\);  // the hidden stages", "//"),
    "no barrier before hidden stages are filled": (r"__syncthreads\(\);  // the hidden st", "//"),
    "no barrier before rows are read": (r"__syncthreads\(\);  // the rows are there", "//"),
    "a stage read before it is there": (r"arrived<STAGES - 2>", "arrived<STAGES - 1>"),
    "a wrong sign": (r"p = x < 0\.f \? tail", "p = x > 0.f ? tail"),
    "a row too few": (r"if \(m \+ r < rows\)", "if (m + r + 1 < rows)"),
    "a part forgotten": (r"part < parts; \+\+part", "part + 1 < parts; ++part"),
    "ones in another column": (r"c == rank - 2\) y", "c == rank - 2) x"),
    "slopes forgotten": (r"BACK \? da\[n\]\[e\] \* slope", "BACK ? da[n][e]"),
    "slopes of hidden columns forgotten": (r"da\[n\]\[e\] \*= slope;", ""),
}  # fmt: skip


OF_TF32 = {
    "numbers of other columns": (r"sum\[i % 2 \* 2 \+ i / 2 % 2\]", "sum[i % 2 * 2]"),
    "a factor turned the wrong way": (r"i / 2 % 2 \* 8 \+ i % 2,", "i % 2 * 8 + i / 2 % 2,"),
    "half of a sum": (r"j < OPERAND<T>; j \+= 4", "j < OPERAND<T>; j += 8"),
}
GATED_BUGS = {
    "no barrier before a gated stage is filled": (r"__syncthreads\(\);  // the gated stage", "//"),
    "no barrier before gated parts replace": (r"__syncthreads\(\);  // the gated stages", "//"),
    "slopes of gated columns forgotten": (r"(float at.*\n(.*\n){7}.*) \* slope;", r"\1;"),
    "shares of one gradient for all": (r"\(part \* 3 \+ of\)", "(part * 3)"),
}  # fmt: skip
GATED_OF_TF32 = {
    "factors read before they are there": (r"__syncthreads\(\);  // the factors of this", "//"),
    "rows come before factors are read": (r"__syncthreads\(\);  // nobody reads the factors", "//"),
}
PLANTED = [(bug, torch.bfloat16) for bug in BUGS] + [(bug, torch.float32) for bug in OF_TF32]
GATED_PLANTED = [(bug, torch.bfloat16) for bug in GATED_BUGS]
GATED_PLANTED += [(bug, torch.float32) for bug in GATED_OF_TF32]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "dtype"), [*some(PLANTED), *some(GATED_PLANTED)])
def test_planted_bugs_are_caught(bug, dtype, plant, monkeypatch):
    gated = bug in GATED_BUGS | GATED_OF_TF32
    pattern, instead = (BUGS | OF_TF32 | GATED_BUGS | GATED_OF_TF32)[bug]
    file = f"feed_forward_{'gated' if gated else 'gelu'}{'_tf32' * (dtype == torch.float32)}"
    mutant, count = re.subn(pattern, instead, launch.text(file), count=1)
    assert count == 1
    plant(mutant, "")
    layers = make("gated, the first stage last" if gated else "ranks apart", dtype, rows=80)
    off = []
    for order in (emulation.ASCENDING, emulation.DESCENDING, 7):
        monkeypatch.setattr(emulation, "thread_order", order)
        pairs = zip(layers.run(), layers.want(), strict=True)
        off += [distance(one, other) for one, other in pairs]
    assert not all(far <= 8e-3 for far in off)  # NaN is caught too
