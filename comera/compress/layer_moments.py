"""Second moments of what goes into linear layers and of the loss' gradient at what comes out.

Shape suffixes: N = rows, I = input width, O = output width.
"""

import itertools
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from comera.files import replacing

log = logging.getLogger("comera")

_SAVE_EVERY = 120.0
"""Seconds between two states of the file that an interrupted calibration goes on from."""

LossFn = Callable[[nn.Module, Any], Tensor]
"""Takes the model and a batch, and returns the mean loss."""


@dataclass
class Moments:
    """Means over the rows that a linear layer has seen.

    Attributes:
        inputs_II: Of ``x x^T``.
        grads_OO: Of ``g g^T``, g being the gradient of a row's own loss by the layer's output.
        rows: How many rows there were.
    """

    inputs_II: Tensor
    grads_OO: Tensor
    rows: int = 0

    def add(self, x_NI: Tensor, grad_NO: Tensor) -> None:
        """Take in the rows of one call, with the gradient of the mean loss."""
        count = x_NI.shape[0]
        if not count:
            return
        kept, new = self.rows / (self.rows + count), 1 / (self.rows + count)
        self.inputs_II.addmm_(x_NI.T, x_NI, beta=kept, alpha=new)
        # The gradient of a mean over N rows is an N-th of that of a row's own loss.
        self.grads_OO.addmm_(grad_NO.T, grad_NO, beta=kept, alpha=new * count**2)
        self.rows += count


def gather_moments(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[Any],
    loss_fn: LossFn,
    keep: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Moments]:
    """Run batches forward and backward and collect :class:`Moments` of layers, batch by batch.

    The model is in evaluation mode meanwhile; its parameters get no gradient and keep what they
    have.

    Args:
        model: Holds the layers.
        layers: By name.
        batches: What ``loss_fn`` takes, one at a time; only one is held at once.
        loss_fn: ``loss_fn(model, batch)``, the mean loss over the batch.
        keep: A file for the moments, written every two minutes and at the end. One that is there
            already, of the same weights, is gone on from: as many batches are skipped as it has
            seen, and all of them if it was complete.
        progress: Whether to show a bar.

    Returns:
        Moments in float32 or wider, by name.

    Raises:
        ValueError: If there is no batch, a loss is no finite number, a layer is never called, or
            the file is of other layers or weights.
    """
    found = {name: _empty(layer) for name, layer in layers.items()}
    seen, complete = _read(keep, layers, found) if keep and Path(keep).exists() else (0, False)
    if complete:
        return found
    saved = time.monotonic()
    with _measured(model), torch.enable_grad():
        for batch in _shown(itertools.islice(batches, seen, None), batches, seen, progress):
            with _watched(layers, found) as first:
                loss = loss_fn(model, batch)
                if loss.numel() != 1 or not bool(torch.isfinite(loss)):
                    raise ValueError(
                        f"loss_fn gave {loss!r} for batch {seen}; it must be one finite number"
                    )
                if first:
                    torch.autograd.grad(loss, first, allow_unused=True)
            seen += 1
            if keep and time.monotonic() - saved > _SAVE_EVERY:
                _write(keep, layers, found, seen, complete=False)
                saved = time.monotonic()
    if not seen:
        raise ValueError("calibration has no batch; some hundred sequences are enough")
    idle = [name for name, moments in found.items() if not moments.rows]
    if idle:
        raise ValueError(f"loss_fn never called {', '.join(idle)}: exclude what it does not reach")
    if keep:
        _write(keep, layers, found, seen, complete=True)
    return found


def _shown(left: Iterator[Any], batches: Iterable[Any], seen: int, progress: bool) -> Iterator[Any]:
    """Pass batches on, with a bar if one is wanted."""
    if not progress:
        yield from left
        return
    from rich.progress import track  # not needed without a bar

    total = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    yield from track(left, "calibration", total, completed=seen)


def _write(
    path: str | Path,
    layers: Mapping[str, nn.Linear],
    found: Mapping[str, Moments],
    seen: int,
    complete: bool,
) -> None:
    about = {
        "batches": seen,
        "complete": complete,
        "rows": {name: moments.rows for name, moments in found.items()},
        "weights": {name: _digest(layer.weight) for name, layer in layers.items()},
    }
    tensors = {f"{name}.inputs_II": moments.inputs_II for name, moments in found.items()}
    tensors |= {f"{name}.grads_OO": moments.grads_OO for name, moments in found.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, {"comera_moments": json.dumps(about)})


def _read(
    path: str | Path, layers: Mapping[str, nn.Linear], found: Mapping[str, Moments]
) -> tuple[int, bool]:
    """Fill in what a file has; returns how many batches it has seen, and whether those are all."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["comera_moments"])
            wrong = [
                name for name in {**layers, **about["weights"]}
                if name not in layers or about["weights"].get(name) != _digest(layers[name].weight)
            ]  # fmt: skip
            if wrong:
                raise ValueError(
                    f"{path} has the moments of other layers or weights ({', '.join(wrong[:3])}): "
                    "remove it, or name another file"
                )
            for name, moments in found.items():
                moments.inputs_II.copy_(file.get_tensor(f"{name}.inputs_II"))
                moments.grads_OO.copy_(file.get_tensor(f"{name}.grads_OO"))
                moments.rows = about["rows"][name]
    except (SafetensorError, KeyError):
        raise ValueError(f"{path} is no file of moments: remove it, or name another") from None
    log.info("%s: %d batches of calibration were done before", path, about["batches"])
    return about["batches"], about["complete"]


def _digest(weight: Tensor) -> int:
    """Return a checksum of a weight's bytes."""
    return zlib.crc32(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def _empty(layer: nn.Linear) -> Moments:
    weight = layer.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    out_features, in_features = weight.shape
    return Moments(
        torch.zeros(in_features, in_features, dtype=dtype, device=weight.device),
        torch.zeros(out_features, out_features, dtype=dtype, device=weight.device),
    )


@contextmanager
def _measured(model: nn.Module) -> Iterator[None]:
    """Have the model evaluate, with parameters that ask for no gradient."""
    training = {module: module.training for module in model.modules()}
    wanted = {param: param.requires_grad for param in model.parameters()}
    model.eval()
    for param in wanted:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
        for param, was in wanted.items():
            param.requires_grad_(was)


@contextmanager
def _watched(
    layers: Mapping[str, nn.Linear], found: Mapping[str, Moments]
) -> Iterator[list[Tensor]]:
    """Add what passes each layer to its moments; yields where the graph of autograd begins.

    No parameter asks for a gradient: the first layers' outputs are made to ask for one.
    """
    first: list[Tensor] = []

    def watch(moments: Moments) -> Callable[..., None]:
        def after(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            x_NI = args[0].detach().flatten(0, -2).to(moments.inputs_II.dtype)

            def take(grad: Tensor) -> None:
                moments.add(x_NI, grad.flatten(0, -2).to(moments.grads_OO.dtype))

            if not output.requires_grad:
                first.append(output.requires_grad_())
            output.register_hook(take)

        return after

    handles = [layer.register_forward_hook(watch(found[name])) for name, layer in layers.items()]
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()
