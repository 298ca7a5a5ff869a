"""Save a model as a folder: tensors in ``model.safetensors``, description in ``comera.json``.

The header of the tensor file repeats the description; ``comera.json`` is for other readers.
Folders of weights, also of other programs, are read and written one tensor at a time.
"""

import json
import logging
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from comera.extras import listed, needed_by
from comera.files import local_folder, replacing, write_text
from comera.nn.forms import experts_apart
from comera.nn.module import check_unsharded, dtype_name
from comera.nn.targets import TTConfig
from comera.params import Undisturbed, bytes_of, checksum
from comera.saved.description import check_description, describe, fill_, rebuild_
from comera.serving.freeze import refuse_training_

log = logging.getLogger("comera")

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

DESCRIPTION = "comera.json"
_KEY, _CHECKSUM = "comera", "comera_crc32"
"""Keys of the description, and of its checksum, in the header of the weights."""


def save_model(model: nn.Module, folder: str | Path, *, config: TTConfig | None = None) -> Path:
    """Save a model, compressed or not, for :func:`load_model`.

    The files hold no code. An interrupted save leaves the earlier files.

    Args:
        model: The model. Its state dict is saved, and kinds, modes, ranks, ties and hot rows of its
            tensor-train layers. Of a DistributedDataParallel or compiled model, the model inside is
            saved.
        folder: The folder, made if it does not exist; other files in it stay.
        config: How the model was compressed, kept in ``comera.json`` for people.

    Returns:
        The folder.

    Raises:
        ValueError: If the files cannot hold a layer or a part of the state: anything but a tensor,
            or a tensor that is sharded or on the ``meta`` device; or if ``folder`` is a URL.
        RuntimeError: If another thread trains the model meanwhile; earlier files stay.
        OSError: If the disk is full; the message has the path and a remedy.

    Example::

        comera.save_model(model, "small")
        again = comera.load_model("small", MyTransformer)
    """
    inside: Any = model
    while isinstance(inside, nn.Module):
        model = inside
        replicated = isinstance(model, nn.parallel.DistributedDataParallel)
        inside = model.module if replicated else getattr(model, "_orig_mod", None)
    check_unsharded(model, "save_model", written=True)
    return save_state(model, model.state_dict(), folder, config)


def save_state(
    model: nn.Module, state: Mapping[str, Any], folder: str | Path, config: TTConfig | None = None
) -> Path:
    """Save a model as :func:`save_model` does, but with the given, gathered, state dict."""
    folder = local_folder(folder)
    described = describe(model, config)
    watched = Undisturbed(state)
    tensors = {name: value for name, value in state.items() if name not in described["tied"]}
    for name, value in tensors.items():
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{name} is a {type(value).__qualname__}, and only plain tensors can be saved: "
                "save before weights are quantized or sharded; extra state has to be a tensor"
            )
        if value.is_meta or value.layout != torch.strided:
            where = "on the meta device" if value.is_meta else "sparse"
            raise ValueError(f"{name} is {where}: it cannot be saved")
    write_folder(
        folder, described, tensors, lambda name: tensors[name].detach().to("cpu"), watched.check
    )
    return folder


def write_folder(
    folder: Path,
    described: dict[str, Any],
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write the files of a model, with one tensor at a time in memory.

    ``described`` is the description; ``tensors`` have dtypes and shapes by name. ``read`` returns
    the tensor of a name on the CPU, twice for each. ``check`` runs before files appear.
    """
    described["tensors"] = {name: _note_of(read(name)) for name in tensors}
    text = json.dumps(described, indent=1)
    # Lists of numbers or strings on one line: no string holds a line break.
    text = re.sub(
        r"\[\n\s+([^][{}]*?)\n\s+\]",
        lambda found: "[" + re.sub(r"\n\s+", " ", found[1]) + "]",
        text,
    )
    with replacing(folder / WEIGHTS) as temporary:
        about = {"format": "pt", _KEY: text, _CHECKSUM: str(zlib.crc32(text.encode()))}
        write_tensors(temporary, tensors, read, about)
        check()
    write_text(folder / DESCRIPTION, f"{text}\n")


def _note_of(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(tensor), "shape": list(tensor.shape), "crc32": checksum(tensor)}


def load_model(
    folder: str | Path,
    model: nn.Module | Callable[[], nn.Module],
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Load a model that :func:`save_model` has saved, bit for bit.

    Shapes, ranks and ties come from the folder. Nothing in it is run or imported.

    Args:
        folder: The folder of the model.
        model: The dense model, made like the saved model before compression, or a function or class
            that makes it. Its numbers do not matter: it may be on ``meta``. It is changed in place.
        device: Device of the result; by default the given model's, or the CPU instead of ``meta``.

    Returns:
        The model; if it was itself a tensor-train layer, that layer. Parameters are trained or
        frozen as when they were saved; training or evaluation mode is that of the given model.

    Raises:
        FileNotFoundError: If there is no such folder, or no model in it.
        ValueError: If a file is damaged, of another program or of a later version, or the given
            model differs from the saved one; the message says where. The model is then unchanged.
        TypeError: If ``model`` is neither a module nor makes one, or ``folder`` is a module.

    Example::

        model = comera.load_model("small", lambda: MyTransformer())
    """
    if isinstance(folder, nn.Module):
        raise TypeError("a model is given where the folder is wanted: load_model(folder, model)")
    folder = Path(folder).expanduser()
    described, tensors = read_folder(folder)
    made = model if isinstance(model, nn.Module) or not callable(model) else model()
    if not isinstance(made, nn.Module):
        origin = described.get("model")
        name = origin.get("class") if isinstance(origin, Mapping) else None
        raise TypeError(
            f"model={model!r} must be the dense model or make it; it was saved from "
            f"{name or 'a model of a class that was not noted'}"
        )
    model = made
    tied, path = described["tied"], folder / WEIGHTS
    if lost := [first for first in tied.values() if first not in tensors]:
        raise ValueError(f"{path} is damaged: {lost[0]!r} is tied and not there")
    tensors |= {name: tensors[first] for name, first in tied.items()}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in tensors:
            raise ValueError(
                f"{name} is on the meta device, and being no part of the state dict it was not "
                "saved: make the model given on a device"
            )
    here = next((param.device for param in model.parameters() if not param.is_meta), "cpu")
    where = torch.device(here if device is None else device)
    with experts_apart(model, described["split_experts"]):
        places = dict(model.named_modules(remove_duplicate=False))
        for part, known in {"frozen": tensors, "served": places}.items():
            if unknown := [name for name in described[part] if name not in known]:
                raise ValueError(f"{path} is damaged: {part} names {listed(unknown)}, not there")
        model = rebuild_(model, described["layers"], tensors)
    fill_(model, tensors, tied, described["frozen"])
    for name in described["served"]:
        refuse_training_(model.get_submodule(name))
    return model.to(where)


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    config: TTConfig | None = None,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload model",
    **options: Any,
) -> str:
    """Save a model and upload the folder to the hub of Hugging Face.

    ``comera.load_model(huggingface_hub.snapshot_download(repo_id), factory)`` loads it.

    Args:
        model: A model for :func:`~comera.save_model`.
        repo_id: ``"user/name"``; the repository is made if it does not exist.
        config: How the model was compressed, kept in ``comera.json`` for people.
        private: Whether a new repository is private; by default the setting of the account.
        token: Token of the account; by default the one that ``hf auth login`` has stored.
        message: Message of the commit.
        options: Options of ``huggingface_hub.HfApi.upload_folder``, such as ``revision``.

    Returns:
        The address of the commit.

    Raises:
        MissingPackageError: If huggingface_hub is not installed.
        ValueError: If the model cannot be saved; nothing is uploaded then.
    """
    with needed_by("push_to_hub()"):
        from huggingface_hub import HfApi
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder), config=config)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=message, **options
        )
    return str(commit)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a model's description and its tensors, after a check of their checksums."""
    path = folder / WEIGHTS
    if not path.is_file():
        there = "is no folder" if not folder.is_dir() else f"holds no {WEIGHTS}"
        raise FileNotFoundError(f"{folder} {there}; comera.save_model(model, folder) writes one")
    try:
        with safe_open(path, "pt") as file:
            described = _description(folder, file.metadata() or {})
            # copied: a tensor mapped from a file ends with it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    noted = described.get("tensors")
    if noted is None:  # weights of another program
        return described, tensors
    if not isinstance(noted, dict) or noted.keys() != tensors.keys():
        raise ValueError(f"{path} is damaged: it does not hold the tensors that it says it does")
    for name, tensor in tensors.items():
        if noted[name] != _note_of(tensor):
            raise ValueError(f"{path} is damaged: {name} is not what was saved")
    return described, tensors


def _description(folder: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Return the description in the header of the tensor file, or else in ``comera.json``."""
    path, beside = folder / WEIGHTS, folder / DESCRIPTION
    if _KEY not in header and not beside.is_file():
        raise ValueError(
            f"{path} says nothing of its layers, and there is no {DESCRIPTION}: "
            "comera.save_model did not write it"
        )
    text = beside.read_text(encoding="utf-8", errors="replace") if beside.is_file() else ""
    path = path if _KEY in header else beside
    counts = header.get(_KEY, text)
    if header.get(_CHECKSUM, crc := str(zlib.crc32(counts.encode()))) != crc:
        raise ValueError(f"{path} is damaged: the description in it is not what was saved")
    try:
        found = json.loads(counts)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    described = check_description(found, str(path))
    if text.strip() != counts.strip():
        log.warning(
            "%s does not repeat the header of %s, which counts: it was edited or removed, or a "
            "save was broken off", beside, WEIGHTS,
        )  # fmt: skip
    return described


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
                if any(Path(file).name != file for file in self.file_of.values()):
                    raise ValueError("files elsewhere")
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{index} is damaged: it has no weight_map of tensors to files beside it"
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
