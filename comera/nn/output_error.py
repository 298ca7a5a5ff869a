"""By how much outputs of layers will be off when their weights are approximated.

Shape suffixes: N = rows, I = input width, O = output width.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.evaluation_mode import evaluation_mode
from comera.nn.every_layer_called import every_layer_called


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
