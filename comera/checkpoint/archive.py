"""Store a chain of checkpoints as folders, whole or absent, linked by checksums.

A manifest holds checksums of the tensor file, of itself, and of the manifest that it builds on.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from comera.checkpoint.skeleton import parsed
from comera.checkpoint.streams import DamagedError
from comera.files import flush, naming_a_full_disk

log = logging.getLogger("comera")

VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
_LARGEST_MANIFEST = 1 << 20
_STEP = re.compile(r"step-(\d{9,})")
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of files that are not there; others, as of permissions, may pass and raise."""
_PARTIAL, _DAMAGED = ".partial-", "damaged-"
_INSTEAD = "keep fewer checkpoints (keep_last), or choose another folder; earlier ones are sound"


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint after ``step`` steps, with size and SHA-256 of its file.

    ``previous`` is step and checksum of the checkpoint it builds on, None for a key frame;
    ``raw_bytes`` are the bytes of all tensors in memory, ``streams`` those of each stream before
    and after compression, and ``figures`` measurements that reading does not need.
    """

    step: int
    previous: tuple[int, str] | None
    size: int
    sha256: str
    raw_bytes: int
    streams: dict[str, tuple[int, int]]
    figures: dict[str, Any]

    @property
    def checksum(self) -> str:
        """SHA-256 of the manifest's text without this checksum."""
        return _checksum({"version": VERSION, **asdict(self)})

    def text(self) -> str:
        """Return the content of the manifest's file; equal manifests have equal text."""
        return _text({"version": VERSION, **asdict(self), "checksum": self.checksum})


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(_text(fields).encode()).hexdigest()


class FolderInUseError(RuntimeError):
    """Raised if another process writes to a folder of checkpoints."""


def take(lock: FileLock, folder: Path, advice: str) -> None:
    """Lock a folder, made if missing; raise ``FolderInUseError`` with ``advice`` if it is locked.

    Raises ``NotADirectoryError`` where something else has its name.
    """
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)  # another process may be faster
        except (FileExistsError, NotADirectoryError):
            taken = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
            to = taken.is_symlink() and os.readlink(taken)
            what = f"is a link to {to}, which is not there" if to else "is a file"
            raise NotADirectoryError(f"{taken} {what}: name a folder") from None
        flush(folder.parent)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUseError(f"{folder} is being written to by another process{advice}") from None


class Archive:
    """The checkpoints in a folder. Reading needs no lock; writing locks it for this process."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in ascending order, even of damaged ones."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir()]
        found = [int(name[1]) for name in map(_STEP.fullmatch, names) if name]
        return sorted({step for step in found if self.path(step).name in names})

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def size(self, step: int) -> int:
        return sum(file.stat().st_size for file in self.path(step).iterdir())

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a step; ``DamagedError`` if it is missing or was changed."""
        path = self.path(step) / MANIFEST
        try:
            with path.open("rb") as file:
                raw = file.read(_LARGEST_MANIFEST + 1)
            if len(raw) > _LARGEST_MANIFEST:
                raise ValueError(f"it is longer than {_LARGEST_MANIFEST} bytes")
            fields = parsed(raw)
        except (*_NO_FILE, ValueError, RecursionError) as problem:
            raise DamagedError(f"{path} is not readable: {problem}") from problem
        if isinstance(fields, dict) and fields.get("version", VERSION) != VERSION:
            stated = fields.pop("checksum", None)
            kind = ValueError if _checksum(fields) == stated else DamagedError
            raise kind(
                f"{path} has version {str(fields['version'])[:20]}; this program reads {VERSION}: "
                "update comera"
            )
        match fields:
            case {
                "step": int(number),
                "previous": None | [int(), str()] as previous,
                "size": int(size),
                "sha256": str(sha256),
                "raw_bytes": int(raw_bytes),
                "streams": dict(streams),
                "figures": dict(figures),
            } if previous is None or previous[0] < number:
                link = previous and (previous[0], previous[1])
                manifest = Manifest(number, link, size, sha256, raw_bytes, streams, figures)
            case _:
                raise DamagedError(f"{path} lacks what a manifest has")
        if manifest.text().encode() != raw:
            raise DamagedError(f"{path} does not have the checksum it states")
        if manifest.step != step:
            raise DamagedError(f"{path} is the manifest of step {manifest.step}")
        return manifest

    def streams(self, manifest: Manifest) -> dict[str, bytes]:
        """Read the streams of a checkpoint; ``DamagedError`` if the file has changed."""
        path = self.path(manifest.step) / TENSORS
        try:
            if path.stat().st_size != manifest.size:
                raise DamagedError(
                    f"{path} is {path.stat().st_size} bytes long instead of {manifest.size}"
                )
            raw = path.read_bytes()
        except _NO_FILE as problem:
            raise DamagedError(f"{path} is not readable: {problem}") from problem
        if hashlib.sha256(raw).hexdigest() != manifest.sha256:
            raise DamagedError(f"{path} does not have the checksum its manifest states")
        try:
            return {name: blob.tobytes() for name, blob in load_tensors(raw).items()}
        except (SafetensorError, ValueError, KeyError) as problem:
            raise DamagedError(f"{path} is not a safetensors file: {problem}") from problem

    def check_base(self, manifest: Manifest) -> None:
        """Raise ``DamagedError`` if what a checkpoint builds on, or itself, is gone or another."""
        *_, last = links = self.links(manifest.step)
        if last.checksum != manifest.checksum:
            raise DamagedError(f"{self.path(manifest.step)} is another checkpoint than was written")
        for each in links:
            path = self.path(each.step) / TENSORS
            if not path.is_file() or path.stat().st_size != each.size:
                raise DamagedError(f"{path} is gone or not as long as it was")

    def links(self, step: int) -> list[Manifest]:
        """Return the manifests from key frame to a step; ``DamagedError`` if a link is broken."""
        found = [self.manifest(step)]
        while (previous := found[-1].previous) is not None:
            before = self.manifest(previous[0])
            if before.checksum != previous[1]:
                raise DamagedError(
                    f"{self.path(found[-1].step)} builds on another checkpoint of step "
                    f"{before.step} than the one at {self.path(before.step)}"
                )
            found.append(before)
        return found[::-1]

    def lock(self) -> None:
        """Lock the folder for this process; delete partial checkpoints of interrupted processes."""
        if self._lock.is_locked:
            return
        take(
            self._lock,
            self.folder,
            ", or by another CheckpointChain of this one: close() that one, or choose another "
            "folder",
        )
        for left in self.folder.glob(f"{_PARTIAL}*"):
            try:
                _delete(left)
            except OSError as problem:  # nothing reads it
                log.warning("%s stays, which an interrupted process left: %s", left, problem)

    def unlock(self) -> None:
        self._lock.release()

    def write(
        self,
        step: int,
        previous: tuple[int, str] | None,
        file: bytes,
        raw_bytes: int,
        streams: dict[str, tuple[int, int]],
        figures: dict[str, Any],
    ) -> Manifest:
        """Add a checkpoint, which appears in full or not at all; arguments as of :class:`Manifest`.

        Raises ``OSError`` if it cannot be written; if the disk is full, the message has a remedy.
        """
        sha256 = hashlib.sha256(file).hexdigest()
        manifest = Manifest(step, previous, len(file), sha256, raw_bytes, streams, figures)
        path, partial = self.path(step), self.folder / f"{_PARTIAL}{step:09d}"
        with naming_a_full_disk(path, _INSTEAD):
            try:
                if not self.folder.is_dir():
                    raise FileNotFoundError(
                        f"{self.folder} is gone: it was removed or renamed while checkpoints were "
                        "written to it"
                    )
                shutil.rmtree(partial, ignore_errors=True)  # one that could not be deleted
                partial.mkdir()
                _write_through(partial / TENSORS, file)
                _write_through(partial / MANIFEST, manifest.text().encode())
                flush(partial)
                partial.rename(path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            flush(self.folder)
        return manifest

    def remove(self, steps: list[int]) -> None:
        """Delete checkpoints, the last first, so that none is ever left without its base."""
        for step in sorted(steps, reverse=True):
            leaving = self.folder / f"{_PARTIAL}removed-{step:09d}"
            self.path(step).rename(leaving)
            _delete(leaving)

    def clear(self) -> None:
        """Delete all files of the chain, and the folder if nothing else is in it."""
        self.remove(self.steps())
        for pattern in (f"{_PARTIAL}*", f"{_DAMAGED}step-*"):
            for left in self.folder.glob(pattern):
                _delete(left)
        (self.folder / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that its step is free; return the new path."""
        for again in ("", *(f"-{k}" for k in range(2, 1000))):
            to = self.folder / f"{_DAMAGED}{self.path(step).name}{again}"
            with contextlib.suppress(OSError):  # that name is taken
                return self.path(step).rename(to)
        raise OSError(f"no free name to set {self.path(step)} aside")


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one, which stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def packed(streams: Mapping[str, bytes]) -> bytes:
    return save_tensors({name: np.frombuffer(blob, np.uint8) for name, blob in streams.items()})


def _write_through(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    flush(path)
