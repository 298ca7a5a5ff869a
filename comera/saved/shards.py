"""Folders of weights read tensor by tensor, and files of weights written so."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from comera.extras import listed
from comera.files import replacing

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors (https://github.com/huggingface/safetensors, its format)."""


class Shards:
    """The tensors of a folder, of which one at a time is in memory.

    Args:
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files that
            it names, as Hugging Face lays them out.

    Raises:
        FileNotFoundError: If there is neither, or a file that the index names is missing.
        ValueError: If the index or a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        index, whole = self.folder / INDEX, self.folder / WHOLE
        if index.is_file():
            self.file_of = _weight_map(index)
        elif whole.is_file():
            with _opened(whole) as file:
                self.file_of = dict.fromkeys(file.keys(), WHOLE)
        else:
            there = "holds neither" if self.folder.is_dir() else "is no folder with"
            raise FileNotFoundError(f"{self.folder} {there} {INDEX} nor {WHOLE}")
        missing = [name for name in sorted(self.files) if not (self.folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.folder}: {INDEX} names {listed(missing)}, which "
                f"{'is' if len(missing) == 1 else 'are'} not there: fetch all shards"
            )

    @property
    def files(self) -> set[str]:
        """Names of the files that hold tensors."""
        return set(self.file_of.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor, in memory of its own.

        Raises:
            ValueError: If its file is damaged or does not hold it.
        """
        return read_tensor(self.folder / self.file_of[name], name)


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a file, in memory of its own.

    Raises:
        ValueError: If the file is damaged or does not hold it.
    """
    with _opened(path) as file:
        try:
            return file.get_tensor(name).clone()  # what is mapped from a file ends with it
        except (SafetensorError, RuntimeError) as problem:
            raise ValueError(f"{path} is damaged or of another model: {problem}") from problem


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is damaged: it has no weight_map of tensors to files") from None


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem


def write_by_tensor(
    path: str | Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file of safetensors of which one tensor at a time is in memory.

    Args:
        path: Appears whole or not at all.
        shapes: Dtypes and shapes by name, in the order of the file.
        read: Returns the tensor of a name.
        metadata: For the header.

    Raises:
        OSError: If the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # numbers begin at a multiple of eight
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in shapes:
            file.write(read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)
