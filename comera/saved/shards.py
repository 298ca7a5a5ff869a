"""Read folders of weights, and write files of weights, one tensor at a time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from comera.extras import listed
from comera.params import bytes_of

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors (https://github.com/huggingface/safetensors, its format)."""


class Shards:
    """The tensors of a folder, read one at a time; ``file_of`` has the file of each tensor.

    The folder holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files in it,
    as Hugging Face lays them out. Raises ``FileNotFoundError`` if there is neither, or if a file of
    the index is missing, and ``ValueError`` if the index or a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        index, whole = self.folder / INDEX, self.folder / WEIGHTS
        if index.is_file():
            try:
                found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                self.file_of = {str(name): str(file) for name, file in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{index} is damaged: it has no weight_map of tensors to files"
                ) from None
        elif whole.is_file():
            with opened(whole) as file:
                self.file_of = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            there = "holds neither" if self.folder.is_dir() else "is no folder with"
            raise FileNotFoundError(f"{self.folder} {there} {INDEX} nor {WEIGHTS}")
        self.files = set(self.file_of.values())
        if missing := [name for name in sorted(self.files) if not (self.folder / name).is_file()]:
            raise FileNotFoundError(
                f"{self.folder}: {INDEX} names {listed(missing)}, which "
                f"{'is' if len(missing) == 1 else 'are'} not there: fetch all shards"
            )

    def read(self, name: str) -> Tensor:
        return read_tensor(self.folder / self.file_of[name], name)


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor into its own memory; ``ValueError`` if it is missing or the file damaged."""
    with opened(path) as file:
        try:
            return file.get_tensor(name).clone()  # a tensor mapped from a file ends with it
        except (SafetensorError, RuntimeError) as problem:
            raise ValueError(f"{path} is damaged or of another model: {problem}") from problem


def opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file of safetensors, with one tensor at a time in memory.

    Equal tensors give equal bytes. ``tensors`` have the dtypes and shapes by name, possibly on the
    ``meta`` device; ``read`` returns the tensor of a name on the CPU. Raises ``ValueError`` if
    safetensors lacks a dtype, and ``OSError`` if the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that all are aligned
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors does not hold")
        begin, end = end, end + tensor.nbytes
        dtype, shape = _DTYPES[tensor.dtype], [*tensor.shape]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            file.write(bytes_of(read(name)).data)
