import pytest
import torch

from comera.ops.dropout import _dropout_add, dropout_add, keep_mask


def test_a_share_p_is_dropped_and_the_mean_kept():
    """Each mask is drawn at 25 or 26 in 256; both occur, and on average it is 0.1."""
    shares = []
    for _ in range(300):
        y = dropout_add(torch.ones(100, 100), None, 0.1, True)
        assert y.unique().numel() == 2
        assert abs(float(y.double().mean()) - 1) < 0.02
        shares.append(float((y == 0).double().mean()))
    assert abs(sum(shares) / len(shares) - 0.1) < 0.001
    drawn = {float(keep_mask((8,), 0.1)[1]) for _ in range(100)}
    assert drawn == {float(torch.tensor(256 / kept)) for kept in (230, 231)}


def test_neighbours_are_independent():
    """One random number serves four elements: their masks must not go together."""
    keep, _ = keep_mask((400_000,), 0.5)
    quads = keep.double().view(-1, 8) - 0.5
    correlation = quads.T @ quads / quads.shape[0] / 0.25
    assert float((correlation - torch.eye(8)).abs().max()) < 0.02


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_go_where_the_values_went(residual):
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    other = torch.randn(7, 9, dtype=torch.float64, requires_grad=True) if residual else None
    y = dropout_add(x, other, 0.4, True)
    part = y if other is None else y - other
    scale = torch.where(part.detach().abs() > 1e-12, part.detach() / x.detach(), 0)
    torch.testing.assert_close(scale.unique()[-1].item(), 1 / 0.6, rtol=5e-3, atol=0)
    y.backward(torch.full_like(y, 2.0))
    torch.testing.assert_close(x.grad, 2 * scale)
    assert other is None or torch.equal(other.grad, torch.full_like(other, 2.0))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_sizes_that_are_not_multiples_of_eight(count):
    assert dropout_add(torch.ones(count), None, 0.5, True).shape == (count,)


def test_the_ends():
    x, residual = torch.randn(5), torch.randn(5)
    assert dropout_add(x, None, 0.0, True) is x
    assert dropout_add(x, None, 0.5, False) is x
    assert torch.equal(dropout_add(x, residual, 0.5, False), x + residual)
    assert torch.equal(dropout_add(x, residual, 1.0, True), residual)


def test_the_same_seed_gives_the_same_mask():
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append(keep_mask((100,), 0.3)[0])
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], keep_mask((100,), 0.3)[0])


@pytest.mark.parametrize("residual", [False, True])
def test_registered_soundly(residual):
    x = torch.randn(5, 6, requires_grad=True)
    other = torch.randn(5, 6, requires_grad=True) if residual else None
    # A random result cannot be compared between two runs.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_dropout_add.custom_op, (x, other, 0.3), test_utils=checks)
