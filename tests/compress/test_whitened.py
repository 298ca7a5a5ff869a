import pytest
import torch

from comera.compress.layer_moments import Moments
from comera.compress.whitened import whitened_svd


def moments(inputs, outputs, rows=200):
    x = torch.randn(rows, inputs, dtype=torch.float64) @ torch.randn(inputs, inputs).double()
    g = torch.randn(rows, outputs, dtype=torch.float64) @ torch.randn(outputs, outputs).double()
    return Moments(x.T @ x / rows, g.T @ g / rows, rows)


def rise(error, of):
    """The loss to second order, as the docstring of the module has it."""
    return float(torch.trace(of.grads_OO @ error @ of.inputs_II @ error.T) / 2)


@pytest.mark.parametrize("size", [(6, 9), (9, 6), (5, 5)])
def test_what_is_left_out_is_what_the_loss_rises_by(size):
    weight, of = torch.randn(size, dtype=torch.float64), moments(size[1], size[0])
    found = whitened_svd(weight, of, damping=0, grad_damping=0)
    for rank in range(min(size) + 1):
        left, right = found.factors(rank)
        want = float(found.losses_K[rank:].sum())
        assert rise(weight - left @ right, of) == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_no_other_matrix_of_the_rank_is_better():
    weight, of = torch.randn(6, 8, dtype=torch.float64), moments(8, 6)
    left, right = whitened_svd(weight, of, damping=0, grad_damping=0).factors(3)
    best = rise(weight - left @ right, of)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(20):
            other = (left + scale * torch.randn_like(left)) @ (
                right + scale * torch.randn_like(right)
            )
            assert rise(weight - other, of) >= best


def test_without_moments_it_is_a_plain_svd():
    weight = torch.randn(7, 4)
    found = whitened_svd(weight, None)
    torch.testing.assert_close(found.losses_K.sqrt(), torch.linalg.svdvals(weight.double()))


def test_moments_of_too_few_rows_and_of_none_give_finite_factors():
    weight, few = torch.randn(20, 30), moments(30, 20, rows=3)
    nothing = Moments(torch.zeros(30, 30), torch.zeros(20, 20), 5)
    for of in (few, nothing):
        found = whitened_svd(weight, of)
        left, right = found.factors(20)
        assert (left @ right).isfinite().all()
        torch.testing.assert_close((left @ right).float(), weight, rtol=1e-3, atol=1e-3)


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        whitened_svd(torch.full((2, 2), torch.nan), None)
