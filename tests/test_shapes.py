import math
import re
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from comera.shapes import DEFAULT_RANK, BTTShape, TTMShape, TTShape, balanced_modes, only_one

widths = st.integers(1, 40_000)
modes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


def core_entries(shape):
    return sum(math.prod(size) for size in shape.core_shapes)


def says(*parts):
    """A pattern for a message that holds all the parts in this order."""
    return ".*".join(re.escape(str(part)) for part in parts)


@pytest.mark.parametrize(
    ("width", "order", "want"),
    [
        (768, 3, (8, 8, 12)),
        (3072, 3, (12, 16, 16)),
        (1024, 4, (4, 4, 8, 8)),
        (30522, 4, (12, 13, 14, 14)),
        (7, 1, (7,)),
        (1, 3, (1, 1, 1)),
        (64, 2, (8, 8)),
    ],
)
def test_balanced_modes_are_the_known_ones(width, order, want):
    assert balanced_modes(width, order) == want


@given(widths, st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_balanced_modes_cover_the_width_with_little_waste(width, order):
    got = balanced_modes(width, order)
    assert len(got) == order
    assert list(got) == sorted(got)
    assert math.prod(got) >= width
    assert all(n == 1 or math.prod(got) // n * (n - 1) < width for n in got)


@pytest.mark.parametrize("width", [1, 2, 12, 60, 97, 100, 256])
def test_an_exact_factorisation_is_the_most_balanced_one(width):
    got = balanced_modes(width, 2)
    if math.prod(got) == width:
        pairs = [(a, width // a) for a in range(1, width + 1) if width % a == 0]
        assert sum(got) == min(map(sum, pairs))


@given(widths, widths, st.integers(1, 5), st.integers(1, 70))
@settings(deadline=None, derandomize=True)
def test_every_linear_layer_gets_a_shape(in_features, out_features, order, rank):
    shape = TTShape.fit(in_features, out_features, order=order, rank=rank)
    assert shape.in_width >= in_features
    assert shape.out_width >= out_features
    assert max(len(shape.in_modes), len(shape.out_modes)) <= order
    assert max(shape.ranks) <= rank
    assert shape.num_params == core_entries(shape)


@given(widths, widths, st.integers(2, 5), st.integers(1, 70))
@settings(deadline=None, derandomize=True)
def test_every_table_gets_a_shape(rows, columns, order, rank):
    shape = TTMShape.fit(rows, columns, order=order, rank=rank)
    assert shape.num_rows >= rows
    assert shape.num_cols >= columns
    assert 2 <= len(shape.row_modes) <= order
    assert max(shape.ranks) <= rank
    assert shape.num_params == core_entries(shape)


def test_a_vocabulary_is_rounded_up():
    assert TTMShape.fit(30522, 768).num_rows >= 30522
    paper = TTMShape.fit(30522, 768, shape=((16, 20, 10, 10), (4, 4, 8, 6)), rank=30)
    assert paper.num_rows == 32000
    assert paper.num_params == 16 * 4 * 30 + 20 * 4 * 900 + 10 * 8 * 900 + 10 * 6 * 30


def test_the_right_half_of_a_table_has_few_slices_and_wide_ones():
    shape = TTMShape.fit(10_000_000, 64)
    assert shape.row_modes == (99, 91, 26, 43)
    assert shape.col_modes == (4, 1, 4, 4)
    assert TTMShape.fit(30522, 97).num_cols == 100  # a prime width is rounded up


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("more", [1, 5])
def test_a_wasteful_rounding_is_refused(position, more):
    rows = [16, 20, 10, 10]
    rows[position] += more
    total = math.prod(rows)
    with pytest.raises(ValueError, match=says(" x ".join(map(str, rows)), total, "30522")):
        TTMShape.fit(30522, 768, shape=(rows, (4, 4, 8, 6)))


def test_sizes_of_a_known_layer():
    shape = TTShape.fit(768, 768, shape=((12, 8, 8), (8, 8, 12)), rank=30)
    assert shape.ranks == (12, 30, 30, 30, 12)
    assert shape.core_shapes == (
        (1, 12, 12), (12, 8, 30), (30, 8, 30), (30, 8, 30), (30, 8, 12), (12, 12, 1),
    )  # fmt: skip
    assert shape.num_params == 144 + 2880 + 7200 + 7200 + 2880 + 144
    assert shape.num_dense == 768 * 768
    assert shape.split == 3


@pytest.mark.parametrize(
    ("kind", "ranks"), [(TTShape, (4, 4, 4)), (TTMShape, (4,)), (BTTShape, (4,))]
)
def test_lists_become_tuples(kind, ranks):
    """Shapes are keys of caches, and lists have no hash."""
    made, wanted = kind([8, 8], [8, 8], list(ranks)), kind((8, 8), (8, 8), ranks)
    assert made == wanted
    assert hash(made) == hash(wanted)
    assert made.sides == ((8, 8), (8, 8))


def test_a_shape_without_ranks_has_the_default_one():
    assert max(TTShape.fit(768, 768).ranks) == DEFAULT_RANK
    given_ranks = TTShape((8, 8), (8, 8), (2, 3, 2))
    assert TTShape.fit(64, 64, shape=given_ranks) is given_ranks
    assert TTShape.fit(64, 64, shape=given_ranks, rank=5).ranks == (5, 5, 5)


@given(modes, modes, st.data())
@settings(deadline=None, derandomize=True)
def test_bonds_are_cut_to_what_can_be_filled(ins, outs, data):
    shape = TTShape(ins, outs, (1,) * (len(ins) + len(outs) - 1))
    wanted = data.draw(
        st.lists(st.integers(1, 60), min_size=len(shape.ranks), max_size=len(shape.ranks))
    )
    got = shape.with_rank(wanted)
    assert all(
        1 <= r <= min(w, m) for r, w, m in zip(got.ranks, wanted, got.max_ranks, strict=True)
    )
    for left, size, right in got.core_shapes:  # no bond is wider than the rest of its core
        assert left <= size * right
        assert right <= size * left
    assert got.with_rank(wanted) == got
    assert shape.with_rank(10**9).ranks == shape.max_ranks


@given(widths, widths, st.sampled_from([TTShape, TTMShape]), st.floats(1.01, 400))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_compression_takes_the_largest_rank_that_fits(one, other, kind, compression):
    shape = kind.fit(one, other, rank=1)
    budget = one * other / compression  # padding is no entry of the dense matrix
    assume(shape.num_params <= budget)
    got = shape.with_compression(compression, one * other)
    assert kind.fit(one, other, compression=compression) == got
    assert got.num_params <= budget
    larger = shape.with_rank(max(got.ranks) + 1)
    assert larger.ranks == got.ranks or larger.num_params > budget


@given(st.integers(2, 400), st.integers(2, 400))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_an_impossible_compression_names_the_largest_possible_one(one, other):
    shape = TTShape.fit(one, other, rank=1)
    possible = shape.num_dense / shape.num_params
    with pytest.raises(ValueError, match=says(f"compression={possible * 1.01 + 1}", "rank 1 over")):
        shape.with_compression(possible * 1.01 + 1)


@pytest.mark.parametrize("shape", [TTShape((2, 3), (4,), (0, 0)), TTMShape((2, 3), (4, 5), (0,))])
def test_a_vanished_layer_has_no_parameters(shape):
    assert shape.num_params == core_entries(shape) == 0
    assert shape.num_dense > 0


def test_size_at_other_ranks_is_that_of_the_cores():
    shape = TTShape((4, 3), (5,), (3, 2))
    for ranks in product((1, 2, 3), (1, 2, 5)):
        assert shape.size_at(ranks) == core_entries(TTShape((4, 3), (5,), ranks))
    assert shape.size_at((3, 0)) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TTShape.fit(768, 768, shape=((12, 8), (8, 8, 12))), ("12 x 8", 96, "=768", "do")),
        (lambda: TTShape.fit(768, 768, shape=((12, 8, 9), (768,))), ("12 x 8 x 9", 864, "=768")),
        (lambda: TTShape.fit(60, 8, shape=((7, 10), (8,))), ("7 x 10", 70, "=60")),
        (lambda: TTShape.fit(768, 10, shape=((768,), (3, 3))), ("3 x 3", 9, "out_features=10")),
        (lambda: TTShape.fit(8, 8, shape=((8,), (8,), (8,))), ("shape=((8,), (8,), (8,))", "pair")),
        (lambda: TTShape.fit(8, 8, shape=((4, 2.5), (8,))), ("shape=((4, 2.5), (8,))", "pair")),
        (lambda: TTShape.fit(8, 8, shape=8), ("shape=8", "in_modes, out_modes")),
        (lambda: TTShape.fit(8, 8, shape=(("a",), (8,))), ("shape=(('a',), (8,))",)),
        (lambda: TTShape.fit(8, 8, shape=((), (8,))), ("at least one mode",)),
        (lambda: TTShape.fit(8, 8, shape=((8, 0), (8,))), ("at least 1", "8x0")),
        (lambda: TTShape.fit(64, 64, rank=0), ("rank=0",)),
        (lambda: TTShape.fit(64, 64, rank=-3), ("rank=-3",)),
        (lambda: TTShape.fit(64, 64, rank=[4, 0, 4], order=2), ("rank=[4, 0, 4]", "at least 1")),
        (lambda: TTShape.fit(64, 64, rank=[4, 4], order=2), ("rank=[4, 4]", "2 bonds", "4 cores")),
        (lambda: TTShape.fit(64, 64, rank=4, compression=9), ("rank=4 and compression=9",)),
        (lambda: TTShape.fit(64, 64, compression=1), ("compression=1",)),
        (lambda: TTShape.fit(64, 64, compression=-2.5), ("compression=-2.5",)),
        (lambda: TTShape.fit(64, 64, compression=5000), ("compression=5000", 4096)),
        (lambda: TTShape.fit(64, 64, order=0), ("order=0",)),
        (lambda: TTShape.fit(64, 64, order=2.5), ("order=2.5", "whole number")),
        (lambda: TTShape.fit(64.0, 64), ("in_features=64.0", "whole number")),
        (lambda: TTShape.fit(64, 64, rank=True), ("rank=True", "an int or a list of ints")),
        (lambda: TTShape.fit(64, 64, compression="10"), ("compression='10'", "above 1")),
        (lambda: TTShape.fit(0, 64), ("in_features=0 must be at least 1",)),
        (lambda: TTShape.fit(0, 64, shape=((1,), (64,))), ("in_features=0",)),
        (lambda: TTShape((2, 2), (3,), (2,)), ("3 cores (2x2 | 3)", "2 bonds", (2,))),
        (lambda: TTShape((2, 2), (3,), (2, 0)), ((2, 0),)),
        (lambda: TTShape((2, 2), (3,), (-1, -1)), ((-1, -1),)),
        (lambda: TTMShape((2, 2), (3,), (2,)), ("as many", (2, 2), (3,))),
        (lambda: TTMShape((4,), (3,), ()), ("at least two", (4,), (3,))),
        (lambda: TTMShape.fit(60, 24, order=1), ("order=1", "at least 2")),
        (lambda: TTMShape.fit(60, 24, order=0), ("order=0", "at least 2")),
        (lambda: TTMShape.fit(60, 24, shape=((5, 5), (4, 6))), ("5 x 5", 25, "num_embeddings=60")),
        (lambda: TTMShape.fit(60, 24, shape=((6, 10), (4, 5))), ("4 x 5", 20, "embedding_dim=24")),
        (lambda: balanced_modes(0, 3), ("width of 0", "3 modes")),
        (lambda: balanced_modes(5, 0), ("width of 5", "0 modes")),
        (lambda: only_one(a=1, b=None, c=2), ("a=1 and c=2",)),
    ],
)
def test_errors_repeat_what_was_given(call, message):
    with pytest.raises(ValueError, match=says(*message)):
        call()
