import pytest
import torch

from comera.ops.linear.factored_attention import head_factors


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


@pytest.mark.slow
def test_registered_soundly():
    halves = random(2, 6), random(3, 6), random(4, 6), random(6, 5)
    torch.library.opcheck(head_factors.custom_op, (*halves, 2))
