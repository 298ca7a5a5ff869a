"""What closing a rank would cost the loss, as its gate's gradients tell while a model trains."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NEW_SHARE = 0.02
"""Of the present step in the running mean: it looks back some fifty steps."""


class Sensitivities:
    """Running mean, over training steps, of the square of gate times gradient, for every rank.

    Gate times gradient is what the loss of a batch would lose with the rank, to first order; its
    mean nearly vanishes where a model has converged, its mean square does not (Molchanov et al.,
    arXiv 1906.10771, equation 8).

    Args:
        gates: Vectors, each once or more often.

    Attributes:
        mean: Of all gates, one after the other.

    Raises:
        ValueError: If a gate is frozen.
    """

    def __init__(self, gates: Iterable[nn.Parameter]) -> None:
        self._gates = list({id(gate): gate for gate in gates}.values())
        frozen = sum(not gate.requires_grad for gate in self._gates)
        if frozen:
            raise ValueError(
                f"{frozen} of {len(self._gates)} rank gates are frozen (requires_grad=False): "
                "without a gradient there is no telling what their ranks are worth"
            )
        self._grads: dict[int, Tensor] = {}
        self._hooks: dict[int, Any] = {}
        self.mean = torch.cat([torch.zeros_like(gate) for gate in self._gates]).detach()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_grads": {}, "_hooks": {}}  # gates of a copy have no hooks

    def watch_(self) -> None:
        """Hear of every gate's gradient from the next backward pass on."""
        for number, gate in enumerate(self._gates):
            if number not in self._hooks:
                keep = partial(self._grads.__setitem__, number)
                keep.__torch_unserializable__ = True  # type: ignore[attr-defined]
                self._hooks[number] = gate.register_hook(keep)

    @torch.no_grad()
    def follow_(self) -> None:
        """Take in the gradients of one step, after its backward pass; on the device, in place."""
        if not self._grads:
            return
        grads = [self._grads.get(k, torch.zeros_like(g)) for k, g in enumerate(self._gates)]
        self._grads.clear()
        if self.mean.device != grads[0].device:  # the model has been moved
            self.mean = self.mean.to(grads[0].device)
        lost = torch.cat(grads) * torch.cat([gate.detach() for gate in self._gates])
        self.mean.lerp_(lost.square(), _NEW_SHARE)

    @torch.no_grad()
    def finish_(self, group: "dist.ProcessGroup | None" = None) -> dict[int, Tensor]:
        """By the ``id`` of each gate what its ranks are worth, alike in all processes of a group.

        Gates are no longer watched.
        """
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._grads.clear()
        if group is not None:
            dist.all_reduce(self.mean, group=group)
        parts = self.mean.split([gate.numel() for gate in self._gates])
        return {id(gate): part for gate, part in zip(self._gates, parts, strict=True)}
