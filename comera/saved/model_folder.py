"""A model as a folder: ``model.safetensors`` with its tensors, ``comera.json`` with what it is.

The description is written twice: into the header of the file of tensors, so that no save broken off
half-way leaves one without the other, and as a file of its own, for people and other programs.
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
from safetensors.torch import save_file
from torch import Tensor, nn

from comera.extras import needed_by
from comera.files import replacing
from comera.nn.forms import experts_apart
from comera.nn.module import check_unsharded, dtype_name
from comera.nn.targets import TTConfig
from comera.params import Undisturbed
from comera.saved.description import (
    build_layers,
    check_description,
    check_places,
    check_tensors,
    describe,
    fill_,
    put_in_place_,
)
from comera.serving.freeze import refuse_training_

log = logging.getLogger("comera")

WEIGHTS = "model.safetensors"
DESCRIPTION = "comera.json"
_KEY = "comera"
"""Key of the description in the header of the weights."""


def save_model(model: nn.Module, folder: str | Path, *, config: TTConfig | None = None) -> Path:
    """Save a model, compressed or not, so that :func:`load_model` makes it again.

    Neither file holds code. A save that is broken off leaves what was there before.

    Args:
        model: What is saved of it is its state dict, and of its tensor-train layers their kinds,
            modes, ranks, ties and hot rows. A DistributedDataParallel or compiled model is saved as
            the model inside.
        folder: Is made if need be; other files in it stay.
        config: How the model was compressed, kept in ``comera.json`` for people.

    Returns:
        The folder.

    Raises:
        ValueError: If a layer or a part of the state is nothing that the files can hold: no
            tensor, a sharded one or one on the ``meta`` device.
        RuntimeError: If another thread trains the model meanwhile; what was there before stays.
        OSError: If the disk is full; the message has the path and what to do.

    Example::

        comera.save_model(model, "small")
        again = comera.load_model("small", MyTransformer)
    """
    model = _inside(model)
    check_unsharded(model, "save_model")
    return save_state(model, model.state_dict(), folder, config)


def save_state(
    model: nn.Module, state: Mapping[str, Any], folder: str | Path, config: TTConfig | None = None
) -> Path:
    """Save a model of which processes hold parts, as :func:`save_model` would the whole of it.

    Args:
        model: Its tensor-train layers are whole.
        state: Its whole state dict.
        folder: As :func:`save_model` has it.
        config: The same.
    """
    folder = Path(folder).expanduser()
    described = describe(model, config)
    watched = Undisturbed(state)
    tensors = _plain_state(state, described["tied"])
    described["tensors"] = {name: note_of(tensor) for name, tensor in tensors.items()}
    text = description_text(described)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, {"format": "pt", _KEY: text})
        _sort_header(temporary)
        watched.check()
    with replacing(folder / DESCRIPTION) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
    return folder


def _sort_header(path: Path) -> None:
    """Write the header in one order: that of safetensors changes, and with it the bytes."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # as it is but for escapes
            file.seek(8)
            file.write(text.ljust(size))


def load_model(
    folder: str | Path,
    model: nn.Module | Callable[[], nn.Module],
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Make the model again that :func:`save_model` has saved, equal bit for bit.

    Shapes, ranks and ties come from the folder. Nothing in it is run or imported.

    Args:
        folder: Where the model was saved.
        model: The dense model, made as the saved one was before it was compressed, or what makes it
            when it is called, such as its class. Its numbers do not matter: it may be on the
            ``meta`` device. It is changed in place.
        device: Where the model is to be; that of the model given if None, the CPU if that is on
            ``meta``.

    Returns:
        The model; if it was itself a tensor-train layer, that layer. Parameters are trained or
        frozen as they were when it was saved, and modules train or evaluate as in the model given.

    Raises:
        FileNotFoundError: If there is no such folder, or no model in it.
        ValueError: If a file is damaged, of another program or of a later version, or the model
            given was made otherwise than the saved one: the message says where. The model is then
            unchanged.
        TypeError: If ``model`` is neither a module nor makes one, or is given first.

    Example::

        model = comera.load_model("small", lambda: MyTransformer())
    """
    if isinstance(folder, nn.Module):
        raise TypeError("a model is given where the folder is wanted: load_model(folder, model)")
    folder = Path(folder).expanduser()
    described, tensors = _read(folder)
    model = _made(model, described)
    here = next((param.device for param in model.parameters() if not param.is_meta), "cpu")
    where = torch.device(here if device is None else device)
    with experts_apart(model, described["split_experts"]):
        made = build_layers(described["layers"])
        check_places(model, made)
        tensors = _with_tied(tensors, described["tied"], folder)
        check_tensors(model, made, {name: tuple(t.shape) for name, t in tensors.items()})
    model = put_in_place_(model, made)
    fill_(model, tensors, described["tied"], described["frozen"])
    for name in described["served"]:
        refuse_training_(model.get_submodule(name))
    for name, buffer in model.named_buffers():
        if buffer.is_meta:  # of which no state dict has the values
            raise ValueError(
                f"{name} is on the meta device, and being no part of the state dict it was not "
                "saved: make the model given on a device"
            )
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

    ``comera.load_model(huggingface_hub.snapshot_download(repo_id), factory)`` makes it again.

    Args:
        model: As :func:`~comera.save_model` takes it.
        repo_id: ``"user/name"``; the repository is made if it is not there.
        config: How the model was compressed, kept in ``comera.json`` for people.
        private: Whether a new repository is private; by default what the account says.
        token: That of the account; by default the one that ``hf auth login`` has stored.
        message: Of the commit.
        options: More of ``huggingface_hub.HfApi.upload_folder``, such as ``revision``.

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


def read_description(folder: str | Path) -> dict[str, Any]:
    """Return what :func:`save_model` has written of a model beside its tensors.

    Raises:
        FileNotFoundError: If there is no model.
        ValueError: If it is damaged, of another program or of a later version.
    """
    return _read(Path(folder).expanduser(), tensors=False)[0]


# ── what is written ──────────────────────────────────────────────────────────────────────────────


def _inside(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers that change its names and nothing else."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _inside(model.module)
    compiled = getattr(model, "_orig_mod", None)
    return _inside(compiled) if isinstance(compiled, nn.Module) else model


def description_text(described: Mapping[str, Any]) -> str:
    """Return JSON with a list of numbers or strings on one line."""
    text = json.dumps(described, indent=1)
    # No string holds a line break: what is matched over several lines is a list.
    return re.sub(
        r"\[\n\s+([^][{}]*?)\n\s+\]",
        lambda found: "[" + re.sub(r"\n\s+", " ", found[1]) + "]",
        text,
    )


def _plain_state(state: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the state dict without tied names as tensors on the CPU, each in memory of its own.

    Raises:
        ValueError: If a part of it cannot be that.
    """
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        if name in tied:
            continue
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{name} is a {type(value).__qualname__}, and only plain tensors can be saved: "
                "save a model before its weights are quantized or sharded"
            )
        if value.is_meta or value.layout != torch.strided:
            where = "on the meta device" if value.is_meta else "sparse"
            raise ValueError(f"{name} is {where}: it cannot be saved")
        plain[name] = _own(value.detach(), seen)
    return plain


def _own(tensor: Tensor, seen: set[int]) -> Tensor:
    """Return a tensor on the CPU that has its memory for itself, copied where it has not."""
    moved = tensor.to("cpu").contiguous()
    memory = moved.untyped_storage()
    if memory.nbytes() != moved.nbytes or memory.data_ptr() in seen:
        moved = moved.clone()
    seen.add(moved.untyped_storage().data_ptr())
    return moved


def note_of(tensor: Tensor) -> dict[str, Any]:
    """Return what a description says of a tensor: dtype, shape and a checksum of its bytes."""
    numbers = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    shape = list(tensor.shape)
    return {"dtype": dtype_name(tensor), "shape": shape, "crc32": zlib.crc32(numbers)}


# ── what is read ─────────────────────────────────────────────────────────────────────────────────


def _read(folder: Path, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path = folder / WEIGHTS
    if not path.is_file():
        there = "is no folder" if not folder.is_dir() else f"holds no {WEIGHTS}"
        raise FileNotFoundError(f"{folder} {there}; comera.save_model(model, folder) writes one")
    try:
        with safe_open(path, "pt") as file:
            described = _description(folder, file.metadata() or {})
            # copied: what is mapped from a file would end with it
            read = {name: file.get_tensor(name).clone() for name in file.keys() if tensors}  # noqa: SIM118
    except (SafetensorError, RuntimeError) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    _check_sums(path, described.get("tensors") if tensors else None, read)
    return described, read


def _description(folder: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Return the description in the header of the weights, or else in a file beside them."""
    beside = folder / DESCRIPTION
    if _KEY not in header and not beside.is_file():
        raise ValueError(
            f"{folder / WEIGHTS} says nothing of its layers, and there is no {DESCRIPTION}: "
            "comera.save_model did not write it"
        )
    try:
        text = beside.read_text(encoding="utf-8") if beside.is_file() else None
    except UnicodeDecodeError as problem:
        raise ValueError(f"{beside} is damaged: {problem}") from problem
    if _KEY not in header:
        return check_description(_parse(str(text), beside), str(beside))
    described = check_description(_parse(header[_KEY], folder / WEIGHTS), str(folder / WEIGHTS))
    if text is not None and text.strip() != header[_KEY].strip():
        log.warning(
            "%s says something else than the header of %s, which counts: it was edited, or a save "
            "was broken off", beside, WEIGHTS,
        )  # fmt: skip
    return described


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem


def _check_sums(path: Path, noted: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check tensors against what was noted of them when they were saved, if anything was."""
    if noted is None:
        return
    if not isinstance(noted, dict) or noted.keys() != tensors.keys():
        raise ValueError(f"{path} is damaged: it does not hold the tensors that it says it does")
    for name, tensor in tensors.items():
        if noted[name] != note_of(tensor):
            raise ValueError(f"{path} is damaged: {name} is not what was saved")


def _with_tied(
    tensors: Mapping[str, Tensor], tied: Mapping[str, Any], folder: Path
) -> dict[str, Tensor]:
    """Add the other names of tied tensors."""
    lost = [first for first in tied.values() if first not in tensors]
    if lost:
        raise ValueError(f"{folder / WEIGHTS} is damaged: {lost[0]!r} is tied and not there")
    return {**tensors, **{name: tensors[first] for name, first in tied.items()}}


def _made(model: Any, described: Mapping[str, Any]) -> nn.Module:
    made = model if isinstance(model, nn.Module) or not callable(model) else model()
    if not isinstance(made, nn.Module):
        origin = described.get("model")
        name = origin.get("class") if isinstance(origin, Mapping) else None
        raise TypeError(
            f"model={model!r} must be the dense model or make it; it was saved from "
            f"{name or 'a model of a class that was not noted'}"
        )
    return made
