import math

import pytest
import torch

from comera.checkpoint import codec
from comera.checkpoint.codec import Quality
from comera.checkpoint.skeleton import DTYPES
from comera.checkpoint.streams import DamagedError, StreamReader, Streams

WHOLE = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def reader_of(streams):
    streams.finish()
    return StreamReader(streams.done)


def changed(weight, base=None, second=None, **quality):
    """The record, where entries are kept, and what is read: the same as the writer said."""
    streams = Streams()
    quality = Quality(**{"bits": 4, "key_bits": 4, "rate": 0.05, "alpha": 0, **quality})
    record, kept, now = codec.write_change(streams, "model.w", weight, base, second, quality)
    if record.codec == "exact":
        return record, kept, codec.read_exact(reader_of(streams), record, None)
    places, again = codec.read_change(reader_of(streams), record, base)
    assert torch.equal(again, now)
    assert torch.equal(places, kept)
    assert again.dtype == weight.dtype
    return record, kept, again


def moments(first, second=None, kept=None, **quality):
    """The record, and the moments that are read."""
    streams, given = Streams(), {"m": first} if second is None else {"m": first, "v": second}
    weight = None if kept is None else "model.w"
    record = codec.write_moments(streams, given, weight, kept, Quality(**{"bits": 4, **quality}))
    return record, *codec.read_moments(reader_of(streams), record, kept).values()


def random_tensor(dtype, shape):
    count = math.prod(shape)
    if str(dtype).removeprefix("torch.") in WHOLE:
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    if dtype.is_complex:
        return torch.randn(count, dtype=torch.complex128).to(dtype).reshape(shape)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)  # NaNs among them
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_of_every_dtype(name):
    dtype = DTYPES[name]
    for shape in [(), (0,), (1,), (7, 3), (2, 0, 4)]:
        tensor, base = (random_tensor(dtype, shape) for _ in range(2))
        for before in (None, base):
            streams = Streams()
            record = codec.write_exact(streams, "model.w", tensor, before)
            again = codec.read_exact(reader_of(streams), record, before)
            assert again.dtype == dtype
            assert again.shape == tensor.shape
            assert torch.equal(bits(again), bits(tensor))


def test_a_small_change_takes_fewer_bytes_than_the_whole():
    base = torch.randn(100_000)
    tensor = base * (1 + 1e-5 * torch.randn(100_000))
    sizes = []
    for before in (None, base):
        streams = Streams()
        codec.write_exact(streams, "model.w", tensor, before)
        streams.finish()
        sizes.append(sum(map(len, streams.done.values())))
    assert sizes[1] < 0.5 * sizes[0]


def test_a_change_without_its_base_is_refused():
    streams, tensor = Streams(), torch.randn(40, 40)
    exact = codec.write_exact(streams, "model.w", tensor, tensor)
    change, *_ = codec.write_change(streams, "model.w", tensor, 0.9 * tensor, None, Quality())
    reader = reader_of(streams)
    for read, record in ((codec.read_exact, exact), (codec.read_change, change)):
        with pytest.raises(DamagedError, match="nothing before it"):
            read(reader, record, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.03])
@pytest.mark.parametrize("first", [True, False], ids=["key-frame", "change"])
def test_a_weight_is_read_as_the_writer_said(dtype, rate, first):
    base = None if first else torch.randn(50, 60).to(dtype)
    weight = (torch.randn(50, 60) * 0.1 + (0 if first else base.float())).to(dtype)
    _, kept, again = changed(weight, base, rate=rate, alpha=0.0 if rate else 1.0)
    change = weight.float() - (0 if first else base.float())
    error = (again.float() - weight.float()).norm() / change.norm()
    assert error < (0.15 if first else 0.8)
    if not first:
        untouched = torch.ones(3000, dtype=torch.bool).index_fill(0, kept, False)
        assert torch.equal(again.reshape(-1)[untouched], base.reshape(-1)[untouched])


def test_small_changes_are_kept_coarsely_but_nearer_to_the_weight():
    base = torch.randn(200, 200)
    of_change, of_weight = [], []
    for size in (0.5, 0.1, 0.02):
        weight = base + size * torch.randn(200, 200)
        error = float((changed(weight, base)[2] - weight).norm())
        of_change.append(error / float((weight - base).norm()))
        of_weight.append(error / float(weight.norm()))
    assert of_change == sorted(of_change)
    assert of_weight == sorted(of_weight, reverse=True)
    assert of_change[0] < 0.4


@pytest.mark.parametrize("weight", [torch.ones(20, 20), torch.zeros(20, 20)], ids=["one", "zero"])
def test_weights_that_are_all_alike_are_read_as_written(weight):
    for base in (torch.zeros(20, 20), weight, torch.randn(20, 20)):
        _, _, again = changed(weight, base)
        assert float((again - weight).norm()) <= float((base - weight).norm())


def test_without_a_price_the_papers_rule_decides():
    base = torch.randn(64, 64)
    weight = base + 0.3 * torch.randn(64, 64)
    second = torch.rand(64, 64) * 1e-9
    change = (weight - base).reshape(-1)
    for alpha in (5e-5, 1e-5):
        record, kept, _ = changed(weight, base, second, rate=0, alpha=alpha)
        medians = min(2.5, alpha / second.mean().sqrt())
        want = change.abs() > change.abs().median() * medians
        assert torch.equal(kept, want.nonzero().squeeze(1))
        assert record.books == (15,)
    without, with_ = (codec.changed_weights(change, v, 1e-9).sum() for v in (None, second))
    assert without < with_


def error_of(again, weight):
    return float((again - weight).norm() / weight.norm())


@pytest.mark.parametrize("seed", range(3))
def test_a_weight_far_from_its_base_is_coded_without_it(seed):
    torch.manual_seed(seed)
    base, other = torch.randn(2, 100, 100)
    for weight in (other, -base, 0.1 * base, 4 * base, base + 2 * other):
        record, _, again = changed(weight, base, key_bits=6)
        assert record.places == "all"
        assert error_of(again, weight) < 0.03


def test_a_base_is_used_up_to_half_of_the_squares_of_the_weight():
    base = torch.randn(100, 100)
    for size, alone in ((0.1, False), (0.6, False), (0.8, False), (1.2, True)):
        weight = base + size * torch.randn(100, 100)  # squares of 1 + size**2
        record, _, again = changed(weight, base, key_bits=6, rate=0.055)
        assert (record.places == "all") == alone
        assert error_of(again, weight) < (0.03 if alone else 0.2 * size**0.6)


def test_a_weight_that_would_be_read_more_than_a_quarter_off_is_coded_without_its_base():
    base = torch.randn(100, 100)
    weight = base + 0.3 * torch.randn(100, 100)
    for rate, off, alone in ((0.2, 0.24, False), (0.5, 0.02, True)):  # 0.26 off with a base
        record, _, again = changed(weight, base, bits=1, key_bits=6, rate=rate)
        assert (record.places == "all") == alone
        assert error_of(again, weight) == pytest.approx(off, abs=0.01)


def test_a_base_that_is_not_finite_is_not_used():
    base, weight = torch.randn(2, 30, 30)
    for wrong in (torch.nan, torch.inf):
        spoilt = base.clone().index_fill_(0, torch.tensor(3), wrong)
        record, _, again = changed(weight, spoilt, key_bits=6)
        assert record.places == "all"
        assert error_of(again, weight) < 0.03


@pytest.mark.parametrize("rows", [1, 5, 30, 60, 100])
def test_what_became_zero_is_read_as_zero(rows):
    base = torch.randn(100, 100)
    weight = base.clone()
    weight[:rows] = 0
    _, _, again = changed(weight, base, key_bits=6, rate=0.055)
    assert bool((again[:rows] == 0).all())
    assert error_of(again, weight) < 0.03 if rows < 100 else bool((again == 0).all())
    record, _, still = changed(weight + 0.01 * (weight != 0), again, key_bits=6, rate=0.055)
    assert record.places != "all" or rows == 100
    assert bool((still[:rows] == 0).all())


def test_zeros_by_chance_do_not_cost_the_base():
    base = torch.randn(100, 100)
    weight = base + 0.05 * torch.randn(100, 100)
    weight.view(-1)[:30] = 0
    assert changed(weight, base)[0].places != "all"


def test_what_a_codebook_cannot_stand_for_is_written_exactly(monkeypatch):
    wrong = codec.learn(torch.zeros(1), 1)
    monkeypatch.setattr(codec, "learn", lambda *args, **kwargs: wrong)
    weight = torch.randn(30, 30)
    record, kept, again = changed(weight, key_bits=6)
    assert record.codec == "exact"
    assert torch.equal(again, weight)
    assert len(kept) == 900


@pytest.mark.parametrize("shape", [(96, 80), (40, 8, 24), (4096,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_are_left_out_in_pairs(shape, dtype):
    size = math.prod(shape)
    scale = torch.rand(shape[0]).square().reshape(-1, *[1] * (len(shape) - 1)) + 1e-3
    first = (torch.randn(shape) * scale).to(dtype)
    second = (torch.rand(shape) * scale.square()).to(dtype)
    kept = torch.randperm(size)[: size // 3].sort().values
    record, m, v = moments(first, second, kept, rate=0.02, beta=1.0)
    assert m.dtype == v.dtype == dtype
    flat, mean = first.float().reshape(-1), float(first.float().abs().mean())
    want = torch.zeros(size, dtype=torch.bool)
    want[kept] = flat[kept].abs() > mean
    m, v = m.float().reshape(-1), v.float().reshape(-1)
    assert record.kept == int(want.sum())
    assert bool((m[~want] == 0).all())
    assert float((m[want] - flat[want]).norm() / flat[want].norm()) < 0.2
    assert bool((v[want] > 0).all())
    # what was left out is read with the right sum, and no step becomes longer by much
    true = second.float().reshape(-1)
    assert float(v[~want].sum() / true[~want].sum()) == pytest.approx(1, abs=0.1)
    longest = (flat[want].abs() / true[want].sqrt()).max()
    assert float((m[want].abs() / v[want].sqrt()).max()) < 3 * float(longest)


def test_rows_that_were_never_touched_keep_second_moments_of_zero():
    second = torch.rand(200, 100)
    second[::2] = 0
    _, _, v = moments(torch.randn(200, 100) * second.sqrt(), second, rate=0.1, beta=2.0)
    assert bool((v[::2] == 0).all())
    assert bool((v[1::2] > 0).all())


def test_tiny_second_moments_are_not_read_as_zero():
    """A step is divided by their root."""
    second = torch.rand(200, 100)
    second[::2] = 1e-30
    _, _, v = moments(torch.randn(200, 100), second, rate=0.1, beta=2.0)
    assert bool((v > 0).all())
    assert float(v[::2].median()) < 1e-10


def test_first_moments_can_be_written_alone():
    first = torch.randn(64, 64)
    _, m = moments(first, bits=3, rate=0.0, beta=2.0)
    large = first.abs() > 2 * first.abs().mean()
    assert torch.equal(m != 0, large)
    assert len(m[large].unique()) <= 7


def test_kept_second_moments_are_squares_of_their_roots():
    """Eight sizes of gradients, each in the codebook: what is read is what was written."""
    roots = 2.0 ** torch.arange(1, 9).repeat(64, 8)
    record, m, v = moments(roots, roots.square(), rate=0.0, beta=0.0)
    assert record.kept == roots.numel()
    torch.testing.assert_close(m, roots)
    torch.testing.assert_close(v, roots.square())


@pytest.mark.parametrize("rate", [0.0, 0.055])
def test_kept_second_moments_are_near_to_what_they_were(rate):
    second = (torch.randn(64, 64) * 1e-3).square() + 1e-7
    _, m, v = moments(torch.randn(64, 64) * second.sqrt(), second, rate=rate, beta=1.0)
    kept = m != 0
    assert float((v[kept] - second[kept]).norm() / second[kept].norm()) < 0.3
    assert float(v[kept].sum() / second[kept].sum()) == pytest.approx(1, abs=0.1)
