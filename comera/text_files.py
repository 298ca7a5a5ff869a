"""Files that are read as text. Nothing here imports torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming_what_is_no_text(path: str | Path) -> Iterator[None]:
    """Say which file is no text in UTF-8, where reading it fails for that.

    Raises:
        ValueError: In place of ``UnicodeDecodeError``, which names no file.
    """
    try:
        yield
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise ValueError(
            f"{path} must be text in UTF-8: the byte {byte:#04x} in it is none"
        ) from None
