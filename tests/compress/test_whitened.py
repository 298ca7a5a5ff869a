import pytest
import torch

from comera.compress.layer_moments import LayerMoments
from comera.compress.whitened import whitened_svd


def moments(inputs, outputs, rows=200):
    x = torch.randn(rows, inputs, dtype=torch.float64) @ torch.randn(inputs, inputs).double()
    g = torch.randn(rows, outputs, dtype=torch.float64) @ torch.randn(outputs, outputs).double()
    return LayerMoments(x.T @ x / rows, g.T @ g / rows, rows)


def rise(error, of):
    """The loss to second order, as the docstring of the module has it."""
    return float(torch.trace(of.grads_OO @ error @ of.inputs_II @ error.T) / 2)


def slow_svd(weight, of, damping, grad_damping):
    """All singular vectors between symmetric roots of both moments, in float64."""

    def roots(moments, share):
        wide = moments.double()
        wide = wide + share * wide.diagonal().mean() * torch.eye(len(wide), dtype=wide.dtype)
        values, vectors = torch.linalg.eigh(wide)
        return (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T

    inputs, undo_inputs = roots(of.inputs_II, damping)
    grads, undo_grads = roots(of.grads_OO, grad_damping)
    u, s, v = torch.linalg.svd(grads @ weight.double() @ inputs, full_matrices=False)
    return undo_grads @ (u * s), v @ undo_inputs, s.square() / 2


@pytest.mark.parametrize("size", [(24, 60), (60, 24), (30, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_truncated_svd_between_roots_of_both_moments(size, dtype):
    weight, of = torch.randn(size, dtype=dtype), moments(size[1], size[0])
    left_OK, right_KI, losses_K = slow_svd(weight, of, 1e-4, 1e-3)
    found = whitened_svd(weight, of)
    torch.testing.assert_close(found.losses_K, losses_K, rtol=1e-9, atol=1e-9)
    for rank in (1, 7, 20, min(size)):
        left, right = found.factors(rank)
        assert (left.dtype, left.shape, right.shape) == (dtype, (size[0], rank), (rank, size[1]))
        torch.testing.assert_close(left.norm(dim=0), right.norm(dim=1))
        want = left_OK[:, :rank] @ right_KI[:rank]
        close = 1e-4 if dtype == torch.float32 else 1e-8
        torch.testing.assert_close(left @ right, want.to(dtype), rtol=close, atol=close)
        assert found.loss(rank) == pytest.approx(float(losses_K[rank:].sum()), rel=1e-9)


def test_the_decomposition_is_no_larger_than_the_moments_that_it_replaces():
    for size in ((24, 60), (60, 24), (30, 30)):
        of = moments(size[1], size[0])
        of = LayerMoments(of.inputs_II.float(), of.grads_OO.float(), of.rows)
        found = whitened_svd(torch.randn(size), of)
        kept = found.span_KK.nbytes + found.dual_KK.nbytes
        assert kept <= of.inputs_II.nbytes + of.grads_OO.nbytes


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
    nothing = LayerMoments(torch.zeros(30, 30), torch.zeros(20, 20), 5)
    for of in (few, nothing):
        found = whitened_svd(weight, of)
        left, right = found.factors(20)
        assert (left @ right).isfinite().all()
        assert found.losses_K.diff().le(0).all()
        torch.testing.assert_close((left @ right).float(), weight, rtol=1e-3, atol=1e-3)


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        whitened_svd(torch.full((2, 2), torch.nan), None)


def test_moments_that_are_not_finite_are_refused():
    of = moments(2, 2)
    of.grads_OO[0, 0] = torch.inf
    with pytest.raises(ValueError, match="moments with NaN or infinite entries"):
        whitened_svd(torch.randn(2, 2), of)


def test_moments_without_a_root_get_one():
    """Rounding can make the smallest eigenvalue of a matrix of moments negative."""
    inputs = torch.diag(torch.tensor([1.0, 1.0, -1e-6]))
    found = whitened_svd(torch.randn(5, 3), LayerMoments(inputs, torch.eye(5), 9), 0, 0)
    left, right = found.factors(3)
    assert (left @ right).isfinite().all()


@pytest.mark.parametrize("rows", [90, 12])
def test_a_table_is_weighed_by_how_often_its_rows_are_read(rows):
    reads = torch.randint(0, rows, (4000,)) ** 2 // rows  # the first ones more often
    counts = torch.bincount(reads, minlength=rows)
    of = moments(3, 20)
    shares = LayerMoments(counts / 4000, of.grads_OO, 4000)
    table = torch.randn(rows, 20)
    found = whitened_svd(table.T, shares, damping=0)
    expected = whitened_svd(
        table.T, LayerMoments((counts / 4000).double().diag(), of.grads_OO, 4000), damping=0
    )
    torch.testing.assert_close(found.losses_K, expected.losses_K, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("counts", "unseen"),  # four of a hundred reads were of new rows; or seven of ten; or all
    [([50, 40, 6, 1, 1, 1, 1, 0, 0], 0.04), ([2, 1] + [1] * 6 + [0] * 2, 0.5), ([1, 1, 0, 0], 0.5)],
)
def test_rows_never_read_count_as_much_as_those_read_once_and_no_more_than_the_others(
    counts, unseen
):
    counts = torch.tensor(counts)
    reads = int(counts.sum())
    shares = LayerMoments(counts / reads, torch.eye(4), reads)
    lost = (counts == 0) / (counts == 0).sum()
    expected = (1 - unseen) * counts / reads + unseen * lost
    table = torch.randn(len(counts), 4)
    found = whitened_svd(table.T, shares, damping=0)
    same = whitened_svd(table.T, LayerMoments(expected.diag(), torch.eye(4), reads), damping=0)
    torch.testing.assert_close(found.losses_K, same.losses_K)
