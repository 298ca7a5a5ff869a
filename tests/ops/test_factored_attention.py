import pytest
import torch

from comera.ops.kernels import choose
from comera.ops.linear.factored_attention import factorized_projections, head_factors


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check(got, want, leaves):
    grads = [torch.randn_like(each) for each in want]
    for one, other in (
        (got, want),
        (torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads)),
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("ranks", [(2, 3, 4, 5), (1, 1, 1, 1)], ids=str)
def test_head_factors(ranks, heads):
    width = 6 * heads
    q, k, v = (random(rank, width) for rank in ranks[:3])
    o = random(width, ranks[3])
    parts = [slice(start, start + 6) for start in range(0, width, 6)]
    scores = torch.cat([q[:, p] @ k[:, p].T for p in parts], 1)
    values = torch.cat([v[:, p] @ o[p] for p in parts])
    check(head_factors(q, k, v, o, heads), (scores, values), [q, k, v, o])


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("ranks", [(3, 2, 5), (1,)], ids=str)
def test_thin_projections(ranks, bias):
    x, right = random(7, 6), random(ranks[0], 8)
    lefts = [random(6, rank) for rank in ranks]
    if bias:
        for left in lefts:
            left.data[:, -1] = 0
    ts = [x @ left for left in lefts]
    if bias:  # whose column of left gets no gradient that anybody takes
        ones = torch.ones(7, 1, dtype=torch.float64)
        ts = [torch.cat([t[:, :-1], ones], 1) for t in ts]
    *got, t = factorized_projections(x, lefts, right, bias)
    torch.testing.assert_close(t, ts[0])
    check(got, [ts[0] @ right, *ts[1:]], [x, right, *([] if bias else lefts)])


def test_a_part_of_which_nothing_is_used():
    x, right, lefts = random(7, 6), random(3, 8), [random(6, 3), random(6, 2)]
    y, t, _ = factorized_projections(x, lefts, right, False)
    for used, want in ((y, x @ lefts[0] @ right), (t, x @ lefts[1])):
        got = torch.autograd.grad(used.sum(), [x, right, *lefts], retain_graph=True)
        want = torch.autograd.grad(
            want.sum(), [x, right, *lefts], allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(got, want)


def test_registered_soundly(monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    halves = random(2, 6), random(3, 6), random(4, 6), random(6, 5)
    torch.library.opcheck(head_factors.custom_op, (*halves, 2))
    lefts = [random(6, 3), random(6, 2)]
    torch.library.opcheck(
        factorized_projections.custom_op, (random(7, 6), lefts, random(3, 8), True)
    )
