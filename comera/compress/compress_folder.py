"""A trained model made smaller block by block, from files to files, never whole in memory."""

import json
import logging
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera.compress.allocate import CompressedLayer, CompressedLayers, percent_meant
from comera.compress.block_inputs import (
    Calls,
    Filler,
    UnfinishedBlocks,
    empty_layers_,
    find_blocks,
    parameters_on_meta,
    record_calls,
)
from comera.compress.compress import Compression, compress_
from comera.compress.layer_moments import Layer, linear_targets
from comera.compress.sensitivity import look_at
from comera.extras import listed
from comera.files import replacing
from comera.nn.swap import evaluation_mode, every_layer_called
from comera.params import model_size
from comera.saved.description import describe
from comera.saved.model_folder import DESCRIPTION, WEIGHTS, description_text, note_of
from comera.saved.shards import INDEX, Shards, write_by_tensor

log = logging.getLogger("comera")

_UNFINISHED = "unfinished"
"""The folder for blocks that are done, inside that for the model."""


def compress_folder(
    source: str | Path,
    folder: str | Path,
    model: nn.Module | Callable[[], nn.Module],
    calibration: Iterable[Any],
    *,
    budget: float,
    target_modules: str | list[str] = "all-linear",
    exclude_modules: str | list[str] | None = None,
    blocks: str | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Compression:
    """Make a trained model smaller block by block, from files to files.

    In memory are one block with the moments of its layers, what the calibration batches are at that
    place, and before the first block what comes before it, as the table of words.

    Differs from :func:`~comera.compress_`: the gradient of the model's loss would need all of it.
    An error counts instead by what it does to the output of its own block: gradients are those
    of random projections of that output, whose second moments are, in the mean, those of the
    squared error. Losses of blocks do not compare, so every block gets the same share, which its
    layers divide among them as under one budget; losses are those of its outputs, half the squared
    error a row. Layers outside the blocks stay dense. Each block is looked at with the inputs that
    it has in the dense model.

    What is finished stands in a folder inside the target until all is: the same call goes on there.

    Args:
        source: A folder with ``model.safetensors``, or its shards and their index, as Hugging Face
            writes it; names are those of the model's state dict.
        folder: Where to. :func:`~comera.load_model` reads it, and where the source has a
            ``config.json``, so does ``from_pretrained`` of transformers, with
            ``comera.integrations.transformers`` imported. Small files of the source are copied.
        model: What makes the dense model, as ``lambda: AutoModelForCausalLM.from_config(config)``;
            its parameters are never kept. Or the model on the ``meta`` device, which is changed.
        calibration: Batches: mappings are given to the model as keywords, without labels, tuples
            and lists as arguments, anything else alone. Read once; some ten thousand rows.
        budget: Share of the parameters of each block that is left, in (0, 1).
        target_modules: Which layers, as :class:`~comera.TTConfig` has it.
        exclude_modules: Which not, likewise.
        blocks: Name of the list that holds the blocks; that with most of the layers if None.
        seed: Of the random projections.
        progress: Whether to show a bar.

    Returns:
        The ranks chosen, and sizes. The seconds are those of this call.

    Raises:
        FileNotFoundError: If there are no weights, or shards are missing.
        ValueError: If the budget is out of range or out of reach, files are damaged or of another
            model, blocks do not follow each other, or what is unfinished is of another call.
        TypeError: If ``model`` is neither a module nor makes one.

    Example::

        config = transformers.AutoConfig.from_pretrained("large")
        comera.compress_folder(
            "large", "small", lambda: transformers.AutoModelForCausalLM.from_config(config),
            batches, budget=0.8,
        )

    Source: SVD-LLM (arXiv 2403.07378) for going block by block; the projections are Hutchinson's
    estimator of the Gauss-Newton matrix of a block.
    """
    if not (isinstance(budget, float) and 0 < budget < 1):
        raise ValueError(
            f"budget={budget!r} must be between 0 and 1, the share of each block kept"
            f"{percent_meant(budget)}"
        )
    begun = time.monotonic()
    shards = Shards(source)
    folder = Path(folder).expanduser()
    if folder.resolve() == shards.folder.resolve():
        raise ValueError(f"folder={str(folder)!r} is the source: the result needs one of its own")
    model = _on_meta(model)
    before = model_size(model)
    filler = Filler(model, shards)
    if filler.unused:
        log.warning(
            "compress_folder: %s in %s, which the model does not have",
            listed(sorted(filler.unused)), shards.folder,
        )  # fmt: skip
    targets = linear_targets(model, target_modules, exclude_modules, "compress_folder")
    where = find_blocks(model, blocks, targets)
    parts = dict(model.get_submodule(where).named_children())
    bare = [name for name in targets if name.rpartition(".")[0] == where]
    if bare:
        raise ValueError(
            f"{bare[0]} is itself a linear layer: name with blocks= a list whose parts hold them"
        )
    outside = [name for name in targets if not name.startswith(f"{where}.")]
    if outside:
        log.warning("compress_folder leaves %s dense: outside %s", listed(outside), where)
    with evaluation_mode(model), every_layer_called():
        calls = _calls(model, filler, list(parts.values()), calibration)
        about = {
            "budget": budget, "seed": seed, "blocks": where, "targets": sorted(targets),
            "source": {
                name: (shards.folder / name).stat().st_size for name in sorted(shards.files)
            },
            "calibration": [_checksum(state) for state in calls.states],
        }  # fmt: skip
        unfinished = UnfinishedBlocks(folder / _UNFINISHED, about)
        first = unfinished.go_on(calls.states)
        ordered = list(parts.items())
        for k, (_, block) in enumerate(ordered[:first]):
            unfinished.put_layers_(k, block)
            calls.others[k].clear()
        for k in _shown(first, len(parts), progress):
            name, block = ordered[k]
            inside = f"{where}.{name}."
            mine = {
                target.removeprefix(inside): layer
                for target, layer in targets.items()
                if target.startswith(inside)
            }
            with filler.filled(block):
                _compress_block_(block, k, mine, calls, unfinished, budget, seed)
            empty_layers_(block)
    _write(
        model, filler, unfinished, {f"{where}.{name}": k for k, name in enumerate(parts)}, folder
    )
    _write_config(shards.folder, folder, model)
    layers = CompressedLayers(
        replace(layer, name=f"{where}.{name}.{layer.name}")
        for k, name in enumerate(parts)
        for layer in unfinished.layers(k)
    )
    shutil.rmtree(unfinished.folder)
    after, seconds = model_size(model), time.monotonic() - begun
    return Compression(layers, before.params, after.params, before.bytes, after.bytes, seconds)


def _on_meta(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(f"model={model!r} must be a model on the meta device, or make one")
        with parameters_on_meta():
            model = model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model made {model!r}, which is no nn.Module")
    real = [name for name, param in model.named_parameters() if not param.is_meta]
    if real:
        raise ValueError(
            f"{listed(real)} of the model given have numbers already: give a function that makes "
            "it, or make it on the meta device; comera.compress_ takes models in memory"
        )
    return model


def _calls(
    model: nn.Module, filler: Filler, blocks: Sequence[nn.Module], calibration: Iterable[Any]
) -> Calls:
    """Find out how the blocks are called, with what lies before them in memory."""
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]

    with filler.filled_when_called(outside):
        return record_calls(model, blocks, calibration, filler.filled)


def _compress_block_(
    block: nn.Module,
    k: int,
    targets: Mapping[str, Layer],
    calls: Calls,
    unfinished: UnfinishedBlocks,
    budget: float,
    seed: int,
) -> None:
    """Compress a block, write it, and have ``calls`` be those of the next one."""
    rows = list(enumerate(zip(calls.states, calls.others[k], strict=True)))
    with torch.no_grad():
        after = [_output(block, call) for _, call in rows]

    def projected(block: nn.Module, row: Any) -> Tensor:
        number, call = row
        output = _output(block, call)
        generator = torch.Generator().manual_seed(_mixed(seed, k, number))
        probe = torch.randn(output.shape, generator=generator).to(output)
        return (output * probe).sum() / output[..., 0].numel()

    layers: tuple[CompressedLayer, ...] = ()
    if targets:
        found = look_at(block, targets, rows, projected)
        layers = compress_(block, found, budget=budget).layers
    unfinished.add(k, block, layers, after)
    calls.states[:] = after
    calls.others[k].clear()


def _output(block: nn.Module, call: Any) -> Tensor:
    state, (args, kwargs) = call
    output = block(state.clone(), *args, **kwargs)  # it may write into what it is given
    return output[0] if isinstance(output, tuple) else output


def _write(
    model: nn.Module,
    filler: Filler,
    unfinished: UnfinishedBlocks,
    numbers: Mapping[str, int],
    folder: Path,
) -> None:
    """Write what ``load_model`` reads, one tensor at a time; ``numbers`` has the blocks by name."""
    depth = len(next(iter(numbers)).split("."))
    described = describe(model)
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in described["tied"]
    }

    def read(name: str) -> Tensor:
        words = name.split(".")
        number = numbers.get(".".join(words[:depth]))
        if number is not None:
            return unfinished.tensor(number, ".".join(words[depth:]))
        tensor = state[name]
        return filler.read(tensor) if tensor.is_meta else tensor.detach()

    described["tensors"] = {name: note_of(read(name)) for name in state}
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    text = description_text(described)
    write_by_tensor(folder / WEIGHTS, shapes, read, {"format": "pt", "comera": text})
    with replacing(folder / DESCRIPTION) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")


def _write_config(source: Path, folder: Path, model: nn.Module) -> None:
    """Copy small files, and say in the configuration of transformers what the layers are."""
    for path in source.iterdir():
        small = path.suffix in (".json", ".txt", ".model", ".jinja", ".md")
        if small and path.name not in (INDEX, DESCRIPTION, "config.json") and path.is_file():
            shutil.copy(path, folder / path.name)
    config = source / "config.json"
    if not config.is_file():
        return
    described = describe(model)
    del described["model"]  # the configuration is about it
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["quantization_config"] = {"quant_method": "comera", "described": described}
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")


def _mixed(*numbers: int) -> int:
    """Make one seed of several numbers, the same in each process."""
    return zlib.crc32(repr(numbers).encode())


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _shown(first: int, count: int, progress: bool) -> Iterable[int]:
    if not progress:
        return range(first, count)
    from rich.progress import track  # not needed without a bar

    return track(range(first, count), "blocks", count, completed=first)
