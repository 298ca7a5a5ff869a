"""Compress a trained model block by block, from files to files, never whole in memory."""

import json
import logging
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
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
from comera.files import local_folder, write_text
from comera.nn.swap import evaluation_mode, every_layer_called
from comera.params import checksum, model_size
from comera.planning.printing import with_bar
from comera.saved.description import describe, rebuild_
from comera.saved.model_folder import DESCRIPTION, INDEX, Shards, write_folder

log = logging.getLogger("comera")

_UNFINISHED = "unfinished"
"""The folder for finished blocks, inside that for the model."""


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
    """Compress a trained model block by block, from files to files.

    Memory holds one block with the moments of its layers, its inputs for all calibration batches,
    and before the first block the modules before it, such as the embedding.

    :func:`~comera.compress_` needs gradients of the whole model. Here, an error of a weight counts
    by its effect on its block's output: half the squared error per row, estimated by gradients of
    random projections of that output. Losses of different blocks are not comparable, so every block
    gets the same share of parameters. Layers outside the blocks stay dense. Each block is
    calibrated with its inputs in the dense model.

    Finished blocks are kept in a folder inside the target, from which the same call resumes.

    Args:
        source: A folder with ``model.safetensors``, or its shards and their index, as Hugging Face
            writes it; names are those of the model's state dict.
        folder: The target. :func:`~comera.load_model` reads it; if the source has a
            ``config.json``, so does ``from_pretrained`` of transformers, with
            ``comera.integrations.transformers`` imported. Small files of the source are copied.
        model: A function that makes the dense model, such as
            ``lambda: AutoModelForCausalLM.from_config(config)``; its parameters never take memory.
            Or the model on the ``meta`` device, which is changed.
        calibration: Batches, which are read once; some ten thousand rows are enough. Mappings are
            passed to the model as keywords, without labels, tuples and lists as arguments, anything
            else as the only argument.
        budget: Share of the parameters of each block that is left, in (0, 1).
        target_modules: Layers to compress, as for :class:`~comera.TTConfig`.
        exclude_modules: Layers to leave out, as for :class:`~comera.TTConfig`.
        blocks: Name of the list that holds the blocks; if None, the list with most of the layers.
        seed: Seed of the random projections.
        progress: Whether to show a progress bar.

    Returns:
        The chosen ranks, and sizes. ``seconds`` counts the time of this call alone.

    Raises:
        FileNotFoundError: If there are no weights, or shards are missing.
        ValueError: If the budget is out of range or out of reach, files are damaged or of another
            model, blocks do not follow each other, or unfinished blocks are from another call.
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
    folder = local_folder(folder)
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
    if bare := [name for name in targets if name.rpartition(".")[0] == where]:
        raise ValueError(
            f"{bare[0]} is itself a linear layer: name with blocks= a list whose parts hold them"
        )
    if outside := [name for name in targets if not name.startswith(f"{where}.")]:
        log.warning("compress_folder leaves %s dense: outside %s", listed(outside), where)
    inside = {part for block in parts.values() for part in block.modules()}
    with evaluation_mode(model, caches=False), every_layer_called():
        with filler.filled_when_called([each for each in model.modules() if each not in inside]):
            calls = record_calls(model, list(parts.values()), calibration, filler.filled)
        about = {
            "budget": budget, "seed": seed, "blocks": where, "targets": sorted(targets),
            # Their bytes are too many to look at: a file that was written anew is another.
            "source": {
                name: [found.st_size, found.st_mtime_ns]
                for name in sorted(shards.files)
                for found in [(shards.folder / name).stat()]
            },
            "calibration": [checksum(state) for state in calls.states],
        }  # fmt: skip
        unfinished = UnfinishedBlocks(folder / _UNFINISHED, about)
        first = unfinished.resume(calls.states)
        ordered = list(parts.items())
        for k, (_, block) in enumerate(ordered[:first]):
            rebuild_(block, unfinished.noted(k)["described"])
            calls.others[k].clear()
        for k in with_bar(range(first, len(parts)), "blocks", progress, len(parts), first):
            name, block = ordered[k]
            prefix = f"{where}.{name}."
            mine = {
                target.removeprefix(prefix): layer
                for target, layer in targets.items()
                if target.startswith(prefix)
            }
            with filler.filled(block):
                _compress_block_(block, k, mine, calls, unfinished, budget, seed)
            empty_layers_(block)
    _write(model, filler, unfinished, [f"{where}.{name}" for name in parts], folder)
    _write_config(shards.folder, folder, model)
    layers = CompressedLayers(
        CompressedLayer(**layer | {"name": f"{where}.{name}.{layer['name']}"})
        for k, name in enumerate(parts)
        for layer in unfinished.noted(k)["layers"]
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
    if real := [name for name, param in model.named_parameters() if not param.is_meta]:
        raise ValueError(
            f"{listed(real)} of the model given have numbers already: give a function that makes "
            "it, or make it on the meta device; comera.compress_ takes models in memory"
        )
    return model


def _compress_block_(
    block: nn.Module,
    k: int,
    targets: Mapping[str, Layer],
    calls: Calls,
    unfinished: UnfinishedBlocks,
    budget: float,
    seed: int,
) -> None:
    """Compress and write block number ``k``; replace the states in ``calls`` by its outputs."""
    rows = list(enumerate(zip(calls.states, calls.others[k], strict=True)))
    with torch.no_grad():
        after = [_output(block, call) for _, call in rows]

    def projected(block: nn.Module, row: Any) -> Tensor:
        number, call = row
        output = _output(block, call)
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, k, number)).encode()))
        probe = torch.randn(output.shape, generator=generator).to(output)
        return (output * probe).sum() / output[..., 0].numel()

    layers: tuple[CompressedLayer, ...] = ()
    if targets:
        layers = compress_(block, look_at(block, targets, rows, projected), budget=budget).layers
    unfinished.add(k, block, layers, after)
    calls.states[:] = after
    calls.others[k].clear()


def _output(block: nn.Module, call: Any) -> Tensor:
    state, (args, kwargs) = call
    output = block(state.clone(), *args, **kwargs)  # it may write into its input
    return output[0] if isinstance(output, tuple) else output


def _write(
    model: nn.Module, filler: Filler, unfinished: UnfinishedBlocks, blocks: list[str], folder: Path
) -> None:
    depth = len(blocks[0].split("."))
    described = describe(model)
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in described["tied"]
    }

    def read(name: str) -> Tensor:
        words = name.split(".")
        block = ".".join(words[:depth])
        if block in blocks:
            return unfinished.tensor(blocks.index(block), ".".join(words[depth:]))
        tensor = state[name]
        return filler.read(tensor) if tensor.is_meta else tensor.detach()

    write_folder(folder, described, state, read)


def _write_config(source: Path, folder: Path, model: nn.Module) -> None:
    for path in source.iterdir():
        small = path.suffix in (".json", ".txt", ".model", ".jinja", ".md")
        if small and path.name not in (INDEX, DESCRIPTION, "config.json") and path.is_file():
            shutil.copy(path, folder / path.name)
    config = source / "config.json"
    if config.is_file():
        described = describe(model)
        del described["model"]  # the configuration is about it
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings["quantization_config"] = {"quant_method": "comera", "described": described}
        write_text(folder / "config.json", f"{json.dumps(settings, indent=2)}\n")
