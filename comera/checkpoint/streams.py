"""Bytes of the same kind, one after the other, each kind compressed as one zstd stream.

Gaps between kept entries, codes and the bytes of floats each have a distribution of their own;
kept apart, an entropy coder comes near to it. Tensors pass through one at a time, so no more
than one is held uncompressed, whichever their sizes, and a reader takes no more than it asked for.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

LEVEL = 1
"""Level of zstd: codes have no repetitions, and a search for some is slow and makes them longer."""
_LARGEST_WINDOW = 1 << 27

Bytes = NDArray[np.uint8]


class DamagedError(ValueError):
    """What was read is not what was written."""


class Streams:
    """Compressed streams by name, written in any order."""

    def __init__(self, level: int = LEVEL) -> None:
        self._level = level
        self._open: dict[str, zstandard.ZstdCompressionObj] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._taken: dict[str, int] = {}
        self.done: dict[str, bytes] = {}

    def write(self, name: str, values: Bytes) -> None:
        """Append to the stream of that name."""
        if name not in self._open:
            self._open[name] = zstandard.ZstdCompressor(level=self._level).compressobj()
            self._parts[name], self._taken[name] = [], 0
        self._parts[name].append(self._open[name].compress(values.data))
        self._taken[name] += len(values)

    def finish(self) -> None:
        """Complete every stream, in ``done``; nothing can be written after."""
        for name, stream in self._open.items():
            self._parts[name].append(stream.flush())
        self.done = {name: b"".join(parts) for name, parts in self._parts.items()}

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of every finished stream, before and after compression."""
        return {name: (self._taken[name], len(blob)) for name, blob in self.done.items()}


class StreamReader:
    """Takes what :class:`Streams` wrote, in the order in which each stream was written."""

    def __init__(self, streams: dict[str, bytes]) -> None:
        self._open = {
            name: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(blob)
            for name, blob in streams.items()
        }

    def read(self, name: str, count: int) -> Bytes:
        """Read the next ``count`` bytes of a stream.

        Raises:
            DamagedError: If the stream is missing, has fewer, or is not zstd's.
        """
        if count == 0:
            return np.empty(0, np.uint8)
        if name not in self._open:
            raise DamagedError(f"there is no stream {name!r}")
        # Grown as it is read: a count that lies does not take memory for what is not there.
        parts, missing = [], count
        while missing:
            part = self._some(name, min(missing, 1 << 26))
            if not part:
                raise DamagedError(f"stream {name!r} ends {missing} bytes early")
            parts.append(part)
            missing -= len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)

    def check_end(self) -> None:
        """Raise :class:`DamagedError` if anything was left unread."""
        for name in self._open:
            if self._some(name, 1):
                raise DamagedError(f"stream {name!r} goes on after its end")

    def _some(self, name: str, count: int) -> bytes:
        try:
            return self._open[name].read(count)
        except zstandard.ZstdError as problem:
            raise DamagedError(f"stream {name!r} is not readable: {problem}") from problem
