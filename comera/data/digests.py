"""What data hold, as digests of their content, whatever their names and times say.

Prepared data are cached by these, and a run notes those that it was begun with.
"""

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from comera.files import cache_folder, replacing

LARGE = 1 << 26
"""Bytes from which a file that was hashed before is not read again for its digest alone."""

_BLOCK = 1 << 20
_SETTLED_SECONDS = 2.0
"""A file that changed later than that could change again without its times telling."""


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, decompressed where its name ends in .gz or .xz.

    Of a file of ``LARGE`` bytes or more the digest is remembered in the cache folder, until its
    size, its place on the disk or a time of change is another. Among those times is that of its
    inode, which cannot be set back as the time of modification can.

    Raises:
        ValueError: If the file cannot be decompressed, or changes meanwhile.
    """
    before = signature(path)
    large = path.stat().st_size >= LARGE
    memory = cache_folder() / "digests" / short_digest(before)
    if large and memory.is_file():
        return memory.read_text(encoding="ascii")
    settled = time.time() - path.stat().st_ctime > _SETTLED_SECONDS
    running = hashlib.sha256()
    for block in read_blocks(path):
        running.update(block)
    check_unchanged(path, before)
    if large and settled:
        # In a cache that may only be read it is hashed again the next time.
        with contextlib.suppress(PermissionError), replacing(memory) as temporary:
            temporary.write_text(running.hexdigest(), encoding="ascii")
    return running.hexdigest()


def array_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of named arrays: of their names, types, shapes and values."""
    running = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        running.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        running.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return running.hexdigest()


def short_digest(content: Any) -> str:
    """Return a name for plain values, 32 hexadecimal digits: equal values have one name."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def signature(path: Path) -> list[Any]:
    """Return path, place on the disk, size and times of a file: what changes when it does."""
    facts = path.stat()
    times = [facts.st_mtime_ns, facts.st_ctime_ns]
    return [os.fspath(path.resolve()), facts.st_dev, facts.st_ino, facts.st_size, *times]


def check_unchanged(path: Path, before: list[Any]) -> None:
    """Raise ``ValueError`` if a file is no longer the one of an earlier :func:`signature`."""
    if signature(path) != before:
        raise changed_meanwhile(path)


def changed_meanwhile(what: object) -> ValueError:
    """Return the error for data that changed between two looks at them."""
    return ValueError(
        f"{what} changed while it was read: run the same command again once nothing writes to it"
    )


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces, decompressed where its name ends in .gz or .xz.

    Raises:
        ValueError: If it cannot be decompressed.
    """
    try:
        with _open(path) as file:
            while block := file.read(_BLOCK):
                yield block
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as problem:
        raise ValueError(f"{path} cannot be decompressed: {problem}") from None


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return cast(BinaryIO, lzma.open(path, "rb")) if path.suffix == ".xz" else path.open("rb")
