"""Finite floats of any size are saved in bounded time, and read to the stated error."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comera.checkpoint.chain import CheckpointChain
from comera.checkpoint.codebook import Codebook, learn

WITH_BASE, ALONE = 0.25, 4 / 64
"""Root mean squares of errors beside the weight's, as ``codec.write_change`` states them."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = ("normal", "equal", "zero", "outlier", "two sizes", "few", "sparse", "ramp")


def tensor_of(kind, shape, seed):
    """Float64 values of about one."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "outlier":
        normal[0, 0] = 1e12
    if kind == "two sizes":
        normal[::2] *= 1e-12
    return {
        "equal": torch.full_like(normal, 0.7),
        "zero": torch.zeros_like(normal),
        "few": normal.sign(),
        "sparse": normal * (normal > 2),
        "ramp": torch.linspace(-1, 1, normal.numel(), dtype=torch.float64).reshape(shape),
    }.get(kind, normal)


def finite(values, dtype):
    """Rounded to a dtype, without what it cannot hold."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def relative_error(got, want):
    got, want = got.double(), want.double()
    largest = float(want.abs().max())
    if not largest:
        return float(got.abs().max())
    return float((got / largest - want / largest).norm() / (want / largest).norm())


def read_after_each(*weights, **arguments):
    """What a chain reads of a weight after each of its values was saved."""
    with tempfile.TemporaryDirectory() as folder:
        with CheckpointChain(folder, background=False, **arguments) as chain:
            for step, weight in enumerate(weights):
                chain.save(step, {"weight": weight})
        chain = CheckpointChain(folder)
        return [chain.load(step).model["weight"] for step in chain.steps()]


def assert_read(*weights, **arguments):
    read = read_after_each(*weights, **arguments)
    for k, (got, want) in enumerate(zip(read, weights, strict=True)):
        assert got.dtype == want.dtype
        assert bool(got.isfinite().all())
        assert relative_error(got, want) <= (WITH_BASE if k else ALONE)


kinds, powers = st.sampled_from(KINDS), st.integers(-46, 38)


@pytest.mark.slow
@settings(max_examples=60, deadline=10_000)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(16, 16), (40, 70), (3, 100)]),
    parts=st.lists(st.tuples(kinds, powers, st.sampled_from([0.0, 1.0])), min_size=2, max_size=4),
    rate=st.sampled_from([0.055, 0.0, 1e-6, 3.0]),
    seed=st.integers(0, 9),
)
def test_weights_of_any_size_are_read_to_the_stated_error(dtype, shape, parts, rate, seed):
    """One after the other, each beside a share of the one before or without."""
    weights, before = [], torch.zeros(shape, dtype=torch.float64)
    for k, (kind, power, share) in enumerate(parts):
        weights.append(
            finite(tensor_of(kind, shape, seed + k) * 10.0**power + share * before, dtype)
        )
        before = weights[-1].double()
    assert_read(*weights, rate=rate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(3e19, 3.1e19), (1, 1e-20), (1e-20, 1), (1, 1e30), (1e30, 1), (1, 1e-25), (1e30, 1e-30),
     (1e-30, 1e30), (3e38, -3e38), (1e-40, 1.5e-40), (1, 1 + 1e-6, 1 + 2e-6)],
    ids=str,
)  # fmt: skip
def test_weights_that_jump_or_shrink_are_read_to_the_stated_error(dtype, sizes):
    weight = tensor_of("normal", (64, 64), 0).clamp(-1, 1)
    assert_read(*(finite(weight * size, dtype) for size in sizes))
    assert_read(*(finite(tensor_of("normal", (64, 64), k) * 0.25 * size, dtype)
                  for k, size in enumerate(sizes)))  # fmt: skip


@pytest.mark.parametrize("power", [-320, -200, -45, 39, 200, 307])
def test_what_float32_cannot_hold_is_read_exactly(power):
    weights = [tensor_of("ramp", (30, 30), 0) * 10.0**power * k for k in (1, 2)]
    for got, want in zip(read_after_each(*weights), weights, strict=True):
        assert torch.equal(got, want)


def test_moments_of_any_size_stay_finite_and_of_their_sign():
    shape = (64, 64)
    model = {"weight": tensor_of("normal", shape, 0).float()}
    for first_power, second_power in ((30, 37), (-30, -44), (19, 38), (-22, -38), (38, -45)):
        first = finite(tensor_of("outlier", shape, 1) * 10.0**first_power, torch.float32)
        second = finite(tensor_of("normal", shape, 2).square() * 10.0**second_power, torch.float32)
        states = {
            "state": {0: {"exp_avg": first, "exp_avg_sq": second}},
            "param_groups": [{"params": [0]}],
        }
        with tempfile.TemporaryDirectory() as folder:
            with CheckpointChain(folder, background=False) as chain:
                for step in (1, 2):
                    chain.save(step, model, states)
            read = CheckpointChain(folder).load().optimizer["state"][0]
        assert bool(read["exp_avg"].isfinite().all())
        assert bool(read["exp_avg_sq"].isfinite().all())
        assert bool((read["exp_avg_sq"] >= 0).all())
        total = read["exp_avg_sq"].double().sum() / second.double().sum()
        assert float(total) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("outlier", [30, 1e3, -1e3, 1e10, -1e30, 1e38])
def test_one_value_far_out_does_not_take_the_places_of_the_others(outlier):
    values = torch.randn(4096)
    values[7] = outlier
    book = learn(values, 63)
    read = book.values[book.codes(values).long()]
    rest = torch.arange(4096) != 7
    assert relative_error(read[rest], values[rest]) < 0.04
    assert float(read[7]) == pytest.approx(outlier)


def test_columns_that_repeat_with_the_step_of_the_sample_are_learned_too():
    values = torch.zeros(1 << 17, 16)
    values[:, 3] = torch.randn(1 << 17)
    book = learn(values.reshape(-1), 63)
    assert (
        relative_error(book.values[book.codes(values.reshape(-1)).long()], values.reshape(-1)) < 0.1
    )


@pytest.mark.parametrize("rate", [1e-300, 1e-12, 1e-3, 1.0, 1e300])
def test_any_price_on_bits_ends(rate):
    values = torch.randn(2000)
    book = learn(values, 15, rate, zeros=0)
    assert isinstance(book, Codebook)
    assert bool(book.values.isfinite().all())
    if rate < 1e-2:
        assert relative_error(book.values[book.codes(values).long()], values) < 0.15
