from itertools import product

import numpy as np
import pytest

from comera.checkpoint.streams import (
    DamagedError,
    StreamReader,
    Streams,
    from_gaps,
    pack,
    to_gaps,
    unpack,
)


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.1, 0.5, 1])
def test_positions_survive_as_gaps(share):
    for seed in range(20):
        positions = np.flatnonzero(np.random.default_rng(seed).random(3001) < share)
        gaps = to_gaps(positions)
        assert gaps.dtype == np.uint8
        assert np.array_equal(from_gaps(gaps, len(positions), 3001), positions)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 510, 511, 3000])
def test_gaps_around_multiples_of_the_largest_byte_survive(gap):
    positions = np.array([gap - 1, gap, 2 * gap])
    assert np.array_equal(from_gaps(to_gaps(positions), 3, 2 * gap + 1), positions)


def test_gaps_that_do_not_fit_are_found():
    gaps = to_gaps(np.array([0, 600]))
    with pytest.raises(DamagedError, match="2 kept entries where 3 are stated"):
        from_gaps(gaps, 3, 1000)
    with pytest.raises(DamagedError, match="beyond the 600"):
        from_gaps(gaps, 2, 600)
    with pytest.raises(DamagedError, match="beyond"):  # goes on without an end
        from_gaps(np.append(gaps, np.uint8(255)), 2, 1000)


def test_codes_survive_packing():
    for size, count in product(range(1, 256), (0, 1, 2, 7, 8, 9, 50)):
        codes = np.random.default_rng(count).integers(0, size, count).astype(np.uint8)
        packed = pack(codes, size)
        assert np.array_equal(unpack(packed, size, count), codes)
        assert len(packed) <= count
        if size <= 16:
            assert len(packed) <= (count + 1) // 2


def written(**parts):
    streams = Streams()
    for name, chunks in parts.items():
        for chunk in chunks:
            streams.write(name, np.frombuffer(chunk, np.uint8))
    streams.finish()
    return streams


def test_streams_are_read_in_parts_of_any_size():
    streams = written(a=[b"abc", b"defg"], b=[b"x" * 1000])
    assert streams.sizes["b"][0] == 1000
    assert streams.sizes["b"][1] < 50
    reader = StreamReader(streams.done)
    assert reader.read("a", 2).tobytes() == b"ab"
    assert reader.read("b", 1000).tobytes() == b"x" * 1000
    assert reader.read("a", 5).tobytes() == b"cdefg"
    assert len(reader.read("none", 0)) == 0
    reader.check_end()


def test_what_is_missing_left_over_or_not_compressed_is_named():
    streams = written(a=[b"abc"])
    with pytest.raises(DamagedError, match="no stream 'b'"):
        StreamReader(streams.done).read("b", 1)
    with pytest.raises(DamagedError, match="'a' ends 7 bytes early"):
        StreamReader(streams.done).read("a", 10)
    with pytest.raises(DamagedError, match="'a' goes on after its end"):
        StreamReader(streams.done).check_end()
    with pytest.raises(DamagedError, match="'a' is not readable"):
        StreamReader({"a": b"not zstd at all"}).read("a", 1)
