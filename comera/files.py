"""Write files whole or not at all, and explain errors of disks and texts. Imports no torch."""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, have the quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
"""Advice, by the error number of a full disk."""


@contextlib.contextmanager
def naming_a_full_disk(
    path: str | Path, otherwise: str = "choose another folder"
) -> Iterator[None]:
    """Add the path and a remedy to the error of a full disk, an exhausted quota or a size limit.

    Raises ``OSError`` with the same ``errno`` and the path as ``filename`` in place of what Python,
    safetensors or NumPy raised; other exceptions pass. ``otherwise`` is a second remedy to name.
    """
    try:
        yield
    except Exception as problem:
        number = problem.errno if isinstance(problem, OSError) else None
        if number is None:
            if found := re.search(r"\(os error (\d+)\)", str(problem)):  # safetensors
                number = int(found[1])
            elif re.search(r"\d+ requested and \d+ written", str(problem)):
                number = errno.ENOSPC  # NumPy does not name the reason
        if number not in _REMEDIES:
            raise
        advice = f"{os.strerror(number)}; {_REMEDIES[number]}, or {otherwise}"
        raise OSError(number, advice, str(path)) from problem


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Return a path, ``~`` expanded; raise ``ValueError`` for a URL, which names no folder here."""
    folder = Path(path).expanduser()
    if re.match(r"[A-Za-z][\w+.-]+:/", str(folder)):  # Path makes one stroke of two
        raise ValueError(
            f"{os.fspath(path)} is a URL, and what is written goes to folders of this machine: "
            "name one, and copy it from there"
        )
    return folder


def flush(path: str | Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path: on success it is flushed and renamed to ``path``, else removed."""
    path = Path(path)
    with naming_a_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)  # else its name may be lost with the power
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a file of text in UTF-8, which appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path:
    """Return the folder for cached data: ``$COMERA_CACHE``, or one in the user's cache folder."""
    if chosen := os.environ.get("COMERA_CACHE"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path  # not to be loaded with the layers

    return user_cache_path("comera", appauthor=False)


@contextlib.contextmanager
def naming_what_is_no_text(path: str | Path) -> Iterator[None]:
    """Raise ValueError with the path instead of ``UnicodeDecodeError``, which has no path."""
    try:
        yield
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise ValueError(
            f"{path} must be text in UTF-8: the byte {byte:#04x} in it is none"
        ) from None
