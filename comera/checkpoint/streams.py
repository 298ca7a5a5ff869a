"""Write and read zstd-compressed streams of bytes, each for one kind of values.

Memory holds at most one uncompressed tensor; reading takes no more memory than it asks for.
"""

import math

import numpy as np
import zstandard
from numpy.typing import NDArray

_LEVEL = 1
"""Level of zstd: codes have no repetitions, and a search for some is slow and makes them longer."""
_LARGEST_WINDOW = 1 << 27

Bytes = NDArray[np.uint8]


class DamagedError(ValueError):
    """Raised if a file is not as it was written."""


class Streams:
    """Compressed streams by name, written in any order."""

    def __init__(self) -> None:
        self._open: dict[str, zstandard.ZstdCompressionObj] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._taken: dict[str, int] = {}
        self.done: dict[str, bytes] = {}

    def write(self, name: str, values: Bytes) -> None:
        if name not in self._open:
            self._open[name] = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
            self._parts[name], self._taken[name] = [], 0
        self._parts[name].append(self._open[name].compress(values.data))
        self._taken[name] += len(values)

    def finish(self) -> None:
        """End all streams and put them in ``done``; nothing can be written afterwards."""
        for name, stream in self._open.items():
            self._parts[name].append(stream.flush())
        self.done = {name: b"".join(parts) for name, parts in self._parts.items()}

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Bytes of every finished stream before and after compression, by name."""
        return {name: (self._taken[name], len(blob)) for name, blob in self.done.items()}


class StreamReader:
    """Reads what :class:`Streams` wrote, each stream in the order in which it was written."""

    def __init__(self, streams: dict[str, bytes]) -> None:
        self._open = {
            name: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(blob)
            for name, blob in streams.items()
        }

    def read(self, name: str, count: int) -> Bytes:
        """Read the next bytes of a stream; ``DamagedError`` if it is missing, short or not zstd."""
        if count == 0:
            return np.empty(0, np.uint8)
        if name not in self._open:
            raise DamagedError(f"there is no stream {name!r}")
        # Grown as it is read, so that a false count takes no memory.
        parts, missing = [], count
        while missing:
            part = self._some(name, min(missing, 1 << 26))
            if not part:
                raise DamagedError(f"stream {name!r} ends {missing} bytes early")
            parts.append(part)
            missing -= len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def check_end(self) -> None:
        """Raise :class:`DamagedError` if any stream has bytes left to read."""
        for name in self._open:
            if self._some(name, 1):
                raise DamagedError(f"stream {name!r} goes on after its end")

    def _some(self, name: str, count: int) -> bytes:
        try:
            return self._open[name].read(count)
        except zstandard.ZstdError as problem:
            raise DamagedError(f"stream {name!r} is not readable: {problem}") from problem


def to_gaps(positions_k: NDArray[np.int64]) -> Bytes:
    """Encode ascending positions as distances, a byte each; 255 means that more bytes follow."""
    gaps = np.diff(positions_k, prepend=-1) - 1
    if not len(gaps) or gaps.max() < 255:
        return gaps.astype(np.uint8)
    more, last = np.divmod(gaps, 255)
    ends = np.cumsum(more + 1) - 1
    out = np.full(ends[-1] + 1, 255, np.uint8)
    out[ends] = last
    return out


def from_gaps(gaps: Bytes, count: int, below: int) -> NDArray[np.int64]:
    """Decode :func:`to_gaps`; ``DamagedError`` unless ``count`` positions are below ``below``."""
    ends = np.flatnonzero(gaps != 255)
    if len(ends) != count:
        raise DamagedError(f"there are {len(ends)} kept entries where {count} are stated")
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
    if count and (ends[-1] != len(gaps) - 1 or positions[-1] >= below):
        raise DamagedError(f"a kept entry lies beyond the {below} of its tensor")
    return positions


def codes_to_a_byte(size: int) -> int:
    """Return how many codes from 0 to ``size - 1`` fit into a byte."""
    return max(1, int(math.log(256) / math.log(max(2, size)) + 1e-9))


def pack(codes_n: Bytes, size: int) -> Bytes:
    """Pack several codes below ``size`` into each byte, as zstd spends at least a bit on a byte."""
    each = codes_to_a_byte(size)
    digits = np.zeros((-(-len(codes_n) // each), each), np.uint8)
    digits.reshape(-1)[: len(codes_n)] = codes_n
    packed = digits[:, 0].copy()
    for k in range(1, each):
        packed *= max(2, size)
        packed += digits[:, k]
    return packed


def unpack(packed: Bytes, size: int, count: int) -> Bytes:
    """Return the ``count`` codes that :func:`pack` put into bytes."""
    each = codes_to_a_byte(size)
    digits = np.empty((len(packed), each), np.uint8)
    rest = packed
    for k in range(each - 1, -1, -1):
        rest, digits[:, k] = np.divmod(rest, np.uint8(max(2, size))) if k else (rest, rest)
    return digits.reshape(-1)[:count]
