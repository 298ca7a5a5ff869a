import pytest
import tensorly
import torch
from tensorly.decomposition import tensor_train

import comera
from comera.nn import decompose
from comera.nn.decompose import balance, decompose_matrix, decompose_table, tt_svd
from comera.ops.linear.tt_linear import tt_to_dense
from comera.ops.table.tt_embedding import ttm_to_dense
from comera.shapes import TTMShape, TTShape

pytestmark = pytest.mark.usefixtures("tensorly_on_numpy")


def decaying(*sizes, dtype=torch.float64):
    """A tensor whose unfoldings have falling singular values, as trained weights do."""
    grid = torch.meshgrid(*(torch.arange(n, dtype=dtype) for n in sizes), indexing="ij")
    return 1 / (1 + sum(grid)) + 0.01 * torch.randn(*sizes, dtype=dtype)


def whole(cores):
    return torch.from_numpy(tensorly.tt_to_tensor([core.numpy() for core in cores]))


def error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 3, 2), (5, 9, 4), (6, 30, 8)], ids=str)
def test_as_near_as_tensorly(ranks):
    tensor = decaying(6, 5, 7, 8)
    cores = tt_svd(tensor, ranks)
    theirs = tensorly.tt_to_tensor(tensor_train(tensor.numpy(), [1, *ranks, 1]))
    want = error(torch.from_numpy(theirs), tensor)
    assert error(whole(cores), tensor) <= 1.05 * want + 1e-12
    assert tuple(core.shape[-1] for core in cores[:-1]) == ranks


@pytest.mark.parametrize("tolerance", [0.9, 0.3, 0.02, 1e-6])
def test_tolerance_is_met_with_no_more_ranks_than_needed(tolerance):
    tensor = decaying(6, 5, 7, 8)
    cores = tt_svd(tensor, tolerance=tolerance)
    assert error(whole(cores), tensor) <= tolerance
    ranks = [core.shape[-1] for core in cores[:-1]]
    if max(ranks) > 1:  # half the ranks would not do
        fewer = tt_svd(tensor, tuple(max(1, rank // 2) for rank in ranks))
        assert error(whole(fewer), tensor) > tolerance / len(ranks)


def test_tolerance_of_zero_keeps_everything():
    tensor = decaying(4, 3, 5)
    torch.testing.assert_close(whole(tt_svd(tensor, tolerance=0.0)), tensor)
    zero = tt_svd(torch.zeros(4, 3, 5), tolerance=0.1)
    assert [core.shape for core in zero] == [(1, 4, 1), (1, 3, 1), (1, 5, 1)]
    assert whole(zero).eq(0).all()


def test_ranks_beyond_the_tensor_are_cut():
    tensor = decaying(4, 3, 5)
    cores = tt_svd(tensor, (100, 100))
    assert [core.shape for core in cores] == [(1, 4, 4), (4, 3, 5), (5, 5, 1)]
    torch.testing.assert_close(whole(cores), tensor)


def test_the_randomised_path_is_close_to_the_exact_one(monkeypatch):
    tensor = decaying(200, 300)
    randomised = tt_svd(tensor, (8,))
    monkeypatch.setattr(decompose, "_RANDOMISED_BELOW", 0.0)
    exact = tt_svd(tensor, (8,))
    assert not torch.equal(randomised[0], exact[0])
    assert error(whole(randomised), tensor) <= 1.01 * error(whole(exact), tensor)


def test_the_randomised_path_is_repeatable_and_draws_nothing():
    tensor = decaying(200, 300)
    before = torch.get_rng_state()
    first = tt_svd(tensor, (8,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, tt_svd(tensor, (8,)), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_at_least_float32(dtype):
    cores = tt_svd(decaying(6, 5, 4).to(dtype), (4, 4))
    assert {core.dtype for core in cores} == {torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    tensor = torch.ones(3, 4)
    tensor[1, 2] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        tt_svd(tensor, (2,))


def test_balancing_spreads_the_norm_and_keeps_the_product():
    cores = tt_svd(decaying(6, 5, 7, 8), (5, 9, 4))
    even = balance(cores)
    torch.testing.assert_close(whole(even), whole(cores))
    norms = [float(core.norm()) for core in cores], [float(core.norm()) for core in even]
    assert max(norms[1]) / min(norms[1]) < max(norms[0]) / min(norms[0])


def test_balancing_leaves_ranks_of_zeros_alone():
    cores = [torch.randn(1, 4, 3), torch.randn(3, 5, 1)]
    cores[0][..., 1] = 0
    even = balance(cores)
    assert all(torch.isfinite(core).all() for core in even)
    torch.testing.assert_close(whole(even), whole(cores))


@pytest.mark.parametrize("size", [(12, 20), (11, 19)], ids=["exact", "padded"])
def test_a_matrix_comes_back(size):
    weight = torch.randn(*size, dtype=torch.float64)
    shape = TTShape((4, 5), (3, 4), (1, 1, 1)).with_rank(99)
    got = tt_to_dense(decompose_matrix(weight, shape), shape.split)
    torch.testing.assert_close(got[: size[0], : size[1]], weight)
    assert torch.allclose(got[size[0] :], torch.zeros(()).double(), atol=1e-12)
    by_tolerance = tt_to_dense(decompose_matrix(weight, shape, 1e-9), shape.split)
    torch.testing.assert_close(by_tolerance, got)


@pytest.mark.parametrize("size", [(24, 12), (23, 11)], ids=["exact", "padded"])
def test_a_table_comes_back(size):
    table = torch.randn(*size, dtype=torch.float64)
    shape = TTMShape((2, 3, 4), (2, 3, 2), (1, 1)).with_rank(99)
    got = ttm_to_dense(decompose_table(table, shape))
    torch.testing.assert_close(got[: size[0], : size[1]], table)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, 3.0])
def test_a_tolerance_that_is_no_relative_error_is_repeated(tolerance):
    with pytest.raises(ValueError, match=rf"tolerance={tolerance} must be in \[0, 1\)"):
        decompose_matrix(torch.ones(4, 4), TTShape((4,), (4,), (2,)), tolerance)
    with pytest.raises(ValueError, match=f"tolerance={tolerance}"):
        decompose_table(torch.ones(4, 4), TTMShape((2, 2), (2, 2), (2,)), tolerance)


@pytest.mark.parametrize("size", [1e-30, 1e19, 1e37])
@pytest.mark.parametrize("kind", [comera.TTLinear, comera.BTTLinear, comera.TTEmbedding])
def test_weights_whose_squares_no_float32_holds(kind, size):
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(0)) * size
    sizes = (12, 20) if kind is comera.TTEmbedding else (20, 12)
    layer = kind(*sizes, rank=2)
    assert layer.set_weight_(weight, tolerance=0.0) < 1e-5
    norms = [float(core.detach().double().norm()) for core in layer.cores]
    assert max(norms) < 100 * min(norms)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: comera.TTLinear(n, n, rank=2, order=1),
        lambda n: comera.BTTLinear(n, n, rank=1),
    ],
)
def test_no_tolerance_finds_the_rank_of_a_wide_weight(make):
    draw = torch.Generator().manual_seed(0)
    for rank in (1, 5):
        one, other = torch.randn(512, rank, generator=draw), torch.randn(rank, 512, generator=draw)
        layer = make(512)
        assert layer.set_weight_(one @ other, tolerance=0.0) < 1e-6
        assert layer.ranks == (rank,)
