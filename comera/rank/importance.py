"""The importance of ranks: what the loss would lose with each, as gradients of gates tell."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from comera.nn.module import TensorTrainModule

_NEW_SHARE = 0.02
"""Share of the present step in the running mean, which so looks back some fifty steps."""


class ImportanceScores:
    """Running mean, over training steps, of the square of gate times gradient, for every rank.

    Gate times gradient is what the loss of a batch would lose with the rank, to first order; its
    mean nearly vanishes where a model has converged, its mean square does not (Molchanov et al.,
    arXiv 1906.10771, equation 8).

    Args:
        layers: The layers whose gates are observed, by name.

    Attributes:
        mean: Running mean of all gates, one after the other, ``(all ranks,)``; None before the
            first step.
    """

    def __init__(self, layers: Mapping[str, TensorTrainModule]) -> None:
        self._layers = dict(layers)
        self._lost: dict[int, Tensor] = {}
        self._observed: dict[int, tuple[nn.Parameter, Any]] = {}
        self.mean: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lost": {}, "_observed": {}}  # gates of a copy have no hooks

    @property
    def _gates(self) -> list[nn.Parameter]:
        """Return each gate once, shared ones too."""
        layers = self._layers.values()
        return list({id(gate): gate for layer in layers for gate in layer.gates}.values())

    def observe_(self) -> None:
        """Observe every gate's gradient from the next backward pass on.

        Raises:
            ValueError: If a gate is frozen.
        """
        for number, gate in enumerate(self._gates):
            if not gate.requires_grad:
                raise ValueError(
                    f"the rank gates of {self._owner(gate)} have been frozen (requires_grad=False) "
                    "since rank learning began: without their gradients there is no telling the "
                    "importance of its ranks. Let them train, or make a new ImportancePruning, "
                    "which leaves them"
                )
            observed, hook = self._observed.get(number, (None, None))
            if observed is gate:
                continue
            if hook is not None:  # the parameter has been replaced
                hook.remove()
            add = unserializable_hook(partial(self._add, number))
            self._observed[number] = gate, gate.register_hook(add)

    def _owner(self, gate: nn.Parameter) -> str:
        for name, layer in self._layers.items():
            if any(held is gate for held in layer.gates):
                return name or "the layer"
        raise AssertionError("a gate of none of the layers")

    def _add(self, number: int, grad: Tensor) -> None:
        """Add gate times gradient of one part of a batch, while the gate is still what it was."""
        lost = grad.detach() * self._observed[number][0].detach()
        before = self._lost.get(number)
        self._lost[number] = lost if before is None else before + lost

    @torch.no_grad()
    def follow_(self, group: "dist.ProcessGroup | None" = None) -> None:
        """Take in one step, after its backward pass: on the device, in place.

        A step whose gradients are not finite is left out; after truncation the mean starts anew.
        What the processes of a group observe, each on rows of its own, is averaged.
        """
        if not self._lost:
            return
        parts = [
            self._lost[k] if k in self._lost else torch.zeros_like(gate)
            for k, gate in enumerate(self._gates)
        ]
        self._lost.clear()
        lost = torch.cat(parts)
        if group is not None:
            lost /= dist.get_world_size(group)
            dist.all_reduce(lost, group=group)
        square = lost.square()
        if self.mean is None or self.mean.shape != square.shape:
            self.mean = torch.zeros_like(square)
        elif (self.mean.device, self.mean.dtype) != (square.device, square.dtype):
            self.mean = self.mean.to(square)
        sound = torch.isfinite(square).all()
        self.mean.lerp_(torch.where(sound, square, self.mean), _NEW_SHARE)

    def discard_(self) -> None:
        """Leave out the gradients observed since the last step: the step is not taken."""
        self._lost.clear()

    def reset_(self) -> None:
        """Start anew, after ranks have come to mean something else."""
        if self.mean is not None:
            self.mean.zero_()

    def stop_(self) -> None:
        """Observe gates no longer."""
        for _, hook in self._observed.values():
            hook.remove()
        self._observed.clear()
        self._lost.clear()

    @torch.no_grad()
    def importance(self, group: "dist.ProcessGroup | None" = None) -> dict[int, Tensor] | None:
        """Return the importance of the ranks of each gate, ``(R,)``, by the gate's ``id``.

        Alike in all processes of a group, which call it together. None if no gradient has been
        observed.
        """
        gates = self._gates
        widths = [gate.numel() for gate in gates]
        mean = self.mean
        if mean is None or mean.numel() != sum(widths):
            mean = torch.cat([torch.zeros_like(gate) for gate in gates])
        if group is not None:
            mean = mean.clone()
            dist.all_reduce(mean, group=group)
        if not mean.any():
            return None
        return {id(g): part for g, part in zip(gates, mean.split(widths), strict=True)}
