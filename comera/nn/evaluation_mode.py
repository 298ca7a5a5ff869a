"""Have a model evaluate for a while.

Have transformer layers of torch's call the layers inside them for a while.

By how much outputs of layers will be off when their weights are approximated.

Shape suffixes: N = rows, I = input width, O = output width.

How large a model is.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards each of its modules is as it was."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


@contextmanager
def every_layer_called() -> Iterator[None]:
    """Switch off the fast path of ``nn.TransformerEncoder``; afterwards it is as it was.

    In evaluation mode without gradients it reads the weights of the layers and calls none of them,
    and where padding is masked it hands on nested tensors, whose rows hooks cannot read, and gives
    zeros for the padding.
    """
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


@torch.no_grad()
def input_moments(
    model: nn.Module, layers: Mapping[str, nn.Linear], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """Run batches forward and sum ``x x^T`` of what each layer is given, ``(I, I)``, by name.

    Args:
        model: Is in evaluation mode meanwhile.
        layers: Those of it to watch.
        batches: What the model takes: a mapping as keywords, a tuple or list as arguments, anything
            else as the only one.

    Raises:
        ValueError: If there is no batch, or a layer is given nothing.
    """
    found: dict[str, Tensor] = {}

    def watch(name: str):
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            x_NI = args[0].flatten(0, -2).to(torch.promote_types(args[0].dtype, torch.float32))
            found[name] = found[name] + x_NI.T @ x_NI if name in found else x_NI.T @ x_NI

        return before

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    count = 0
    try:
        with evaluation_mode(model), every_layer_called():
            for batch in batches:
                count += 1
                if isinstance(batch, Mapping):
                    model(**batch)
                elif isinstance(batch, tuple | list):
                    model(*batch)
                else:
                    model(batch)
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name in layers if name not in found]
    if not count or idle:
        what = f"reaches no {', '.join(idle[:3])}" if count else "has no batch"
        raise ValueError(f"calibration {what}: the error of outputs cannot be told")
    return found


@torch.no_grad()
def output_error(old_OI: Tensor, new_OI: Tensor, moments_II: Tensor) -> float:
    """Return the relative Frobenius error of outputs whose inputs have these second moments."""
    wide, moments = old_OI.to(moments_II.dtype), moments_II
    error = new_OI.to(wide) - wide
    off, whole = ((one @ moments * one).sum().clamp_min(0) for one in (error, wide))
    return float((off / whole).sqrt()) if whole > 0 else 0.0


class ModelSize(NamedTuple):
    """Parameters of a model, shared ones counted once, and their bytes."""

    params: int
    bytes: int


def model_size(model: nn.Module) -> ModelSize:
    """Count the parameters of a model, on any device, ``meta`` too."""
    params = list(model.parameters())
    return ModelSize(sum(param.numel() for param in params), sum(param.nbytes for param in params))
