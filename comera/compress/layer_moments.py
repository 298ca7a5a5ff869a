"""Second moments of what goes into linear layers and of the loss' gradient at what comes out.

Shape suffixes: N = rows, I = input width, O = output width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
) -> dict[str, Moments]:
    """Run batches forward and backward and collect :class:`Moments` of layers, batch by batch.

    The model is in evaluation mode meanwhile; its parameters get no gradient and keep what they
    have.

    Args:
        model: Holds the layers.
        layers: By name.
        batches: What ``loss_fn`` takes, one at a time; only one is held at once.
        loss_fn: ``loss_fn(model, batch)``, the mean loss over the batch.

    Returns:
        Moments in float32 or wider, by name.

    Raises:
        ValueError: If there is no batch, a loss is no finite number, or a layer is never called.
    """
    found = {name: _empty(layer) for name, layer in layers.items()}
    count = 0
    with _measured(model), torch.enable_grad():
        for batch in batches:
            with _watched(layers, found) as first:
                loss = loss_fn(model, batch)
                if loss.numel() != 1 or not bool(torch.isfinite(loss)):
                    raise ValueError(
                        f"loss_fn gave {loss!r} for batch {count}; it must be one finite number"
                    )
                if first:
                    torch.autograd.grad(loss, first, allow_unused=True)
            count += 1
    if not count:
        raise ValueError("calibration has no batch; some hundred sequences are enough")
    idle = [name for name, moments in found.items() if not moments.rows]
    if idle:
        raise ValueError(f"loss_fn never called {', '.join(idle)}: exclude what it does not reach")
    return found


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
