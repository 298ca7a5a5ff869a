import numpy as np
import pytest
import torch

from comera.checkpoint.codebook import Codebook, learn

KINDS = {
    "normal": lambda: torch.randn(1500),
    "heavy tails": lambda: torch.randn(1500).exp() ** 3,
    "two heaps": lambda: torch.cat((torch.randn(700) * 0.01 - 5, torch.randn(800) + 3)),
    "many zeros": lambda: torch.cat((torch.zeros(1000), torch.randn(500))),
    "tiny": lambda: torch.rand(1500) * 1e-12,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def squared_error(book, values):
    return float((book.values[book.codes(values).long()].double() - values).square().sum())


def least_squared_error(values, size):
    """Of any ``size`` values, by dynamic programming over all clusterings of neighbours."""
    x = np.sort(values.double().numpy())
    sums, squares = (np.concatenate(([0], np.cumsum(x**k))) for k in (1, 2))
    start, end = np.ogrid[: len(x) + 1, : len(x) + 1]
    costs = (
        squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / np.maximum(1, end - start)
    )
    costs[start > end] = np.inf
    best = costs[0]
    for _ in range(size - 1):
        best = (best[:, None] + costs).min(0)
    return best[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 15])
def test_within_two_percent_of_the_best_there_is(kind, size):
    values = KINDS[kind]()
    book = learn(values, size)
    assert len(book.values) <= size
    assert squared_error(book, values) <= 1.02 * least_squared_error(values, size) + 1e-30


def test_many_values_are_nearly_as_good():
    values = KINDS["normal"]()
    error = squared_error(learn(values, 63), values)
    assert error <= 1.15 * least_squared_error(values, 63)


@pytest.mark.parametrize("size", [3, 255])
def test_every_value_goes_to_the_nearest(size):
    values = torch.randn(5000)
    book = learn(values, size)
    nearest = (values[:, None] - book.values).abs().min(1).values
    assert torch.allclose((values - book.values[book.codes(values).long()]).abs(), nearest)


def test_few_distinct_values_are_kept_as_they_are():
    values = torch.tensor([3e-38, -1.5, 3e-38, 7.25, -1.5])
    book = learn(values, 3)
    assert book.values.tolist() == pytest.approx([-1.5, 3e-38, 7.25])
    assert torch.equal(book.values[book.codes(values).long()], values)


@pytest.mark.parametrize("zeros", [None, 10])
def test_no_values_need_no_codes(zeros):
    book = learn(torch.zeros(0), 15, 0.2 if zeros else 0.0, zeros)
    assert book.values.tolist() == ([] if zeros is None else [0])
    assert book.codes(torch.zeros(0)).dtype == torch.uint8


def entropy(codes):
    shares = torch.bincount(codes.long()).double() / len(codes)
    return float(-(shares[shares > 0] * shares[shares > 0].log2()).sum())


def test_a_price_on_bits_buys_fewer_bits_for_the_error():
    values = torch.randn(100_000)
    plain = learn(values, 3)
    priced = learn(values, 15, 0.25)
    assert entropy(priced.codes(values)) < entropy(plain.codes(values))
    assert squared_error(priced, values) < squared_error(plain, values)
    bits = [entropy(learn(values, 15, rate).codes(values)) for rate in (0.01, 0.1, 0.3)]
    assert bits == sorted(bits, reverse=True)


@pytest.mark.parametrize("zeros", [None, 0])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("kind", ["normal", "two heaps", "signs", "uniform", "three heaps"])
def test_the_cost_is_no_more_than_that_of_any_plain_codebook(kind, rate, zeros):
    """Error and bits together, beside the best of 1 to 8 values without a price."""
    kinds = {
        **KINDS,
        "signs": lambda: torch.randn(1500).sign() + 0.1 * torch.randn(1500),
        "uniform": lambda: torch.rand(1500) - 0.5,
        "three heaps": lambda: torch.randint(-1, 2, (1500,)) + 0.05 * torch.randn(1500),
    }
    values = kinds[kind]()

    def cost(book):
        bits = rate * float(values.var()) * len(values) * entropy(book.codes(values))
        return squared_error(book, values) + bits

    def plain_book(size):
        centres = learn(values, size).values
        if zeros is not None:
            centres[centres.abs().argmin()] = 0
        return Codebook(centres, (centres[1:] + centres[:-1]) / 2)

    plain = min(cost(plain_book(size)) for size in range(1, 9))
    assert cost(learn(values, 15, rate, zeros)) <= 1.02 * plain


def test_zeros_count_as_much_beside_a_sample_of_many_values():
    """A sample of both, a quarter each, reads the same values as zero."""
    values, cells = torch.randn(1 << 20), []
    for count in (1 << 18, 1 << 20):
        book = learn(values[:count], 15, 0.3, zeros=2 * count)
        zero = int((book.values == 0).nonzero())
        cells.append(book.walls[zero - 1 : zero + 1])
    torch.testing.assert_close(*cells, rtol=0, atol=0.05)


def test_with_zeros_beside_the_values_zero_is_one_of_the_book():
    values = torch.randn(10_000)
    for zeros in (0, 100_000):
        assert 0 in learn(values, 15, 0.2, zeros).values
    # where zeros are common already, more values are worth being one
    few, many = (learn(values, 15, 0.2, zeros) for zeros in (0, 100_000))
    assert len(many.values) <= len(few.values)
