import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comera.checkpoint.streams import (
    DamagedError,
    StreamReader,
    Streams,
    from_gaps,
    pack,
    to_gaps,
    unpack,
)


@given(st.sets(st.integers(0, 3000)))
def test_positions_survive_as_gaps(places):
    positions = np.array(sorted(places), np.int64)
    gaps = to_gaps(positions)
    assert gaps.dtype == np.uint8
    assert np.array_equal(from_gaps(gaps, len(positions), 3001), positions)


def test_gaps_that_do_not_fit_are_found():
    gaps = to_gaps(np.array([0, 600]))
    with pytest.raises(DamagedError, match="2 kept entries where 3 are stated"):
        from_gaps(gaps, 3, 1000)
    with pytest.raises(DamagedError, match="beyond the 600"):
        from_gaps(gaps, 2, 600)
    with pytest.raises(DamagedError, match="beyond"):  # goes on without an end
        from_gaps(np.append(gaps, np.uint8(255)), 2, 1000)


@given(
    st.integers(1, 255).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k - 1))))
)
def test_codes_survive_packing(size_and_codes):
    size, codes = size_and_codes
    codes = np.array(codes, np.uint8)
    packed = pack(codes, size)
    assert np.array_equal(unpack(packed, size, len(codes)), codes)
    assert len(packed) <= len(codes)
    if size <= 16:
        assert len(packed) <= (len(codes) + 1) // 2


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
