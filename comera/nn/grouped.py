"""Join the half-chains of all linear layers of a model in a few calls."""

from typing import Any

import torch
from torch import nn

from comera.nn.linear import TTLinear
from comera.nn.module import SharedGates, tensor_trains
from comera.ops.halves import merge_halves


class GroupedMerge:
    """A context in which the linear layers of a model share the work of joining their cores.

    By itself every :class:`~comera.TTLinear` joins its own cores in each forward pass: some dozen
    small operations a layer, whatever the batch. Inside this context the layers of equal shape
    are joined together when it is entered, and a forward pass uses what is there. Gradients flow
    as always. ``comera.TrainStep`` enters it in each step.

    The gates of all layers are put into one vector, of which a rank objective reads too: autograd
    then adds up two gradients of one vector instead of two of every gate.

    Args:
        model: Its layers are found once, here; their ranks may change between two uses.

    Note:
        Change no parameter inside, its dtype or device included, and call ``backward`` once for
        each time it is entered; inside, where activation checkpointing is used.
        The cores of a layer that the forward pass left out get a gradient of zeros, not None, as
        do the gates of all layers.

    Example::

        merged = comera.GroupedMerge(model)
        for batch in loader:
            with merged:
                loss_fn(model, batch).backward()
            optimizer.step()
    """

    def __init__(self, model: nn.Module) -> None:
        self._trains = list(tensor_trains(model).values())
        self._layers = [m for m in self._trains if isinstance(m, TTLinear)]
        self._key: object = None
        self._groups: list[tuple[list[TTLinear], tuple[Any, ...]]] = []

    def __enter__(self) -> "GroupedMerge":
        key = [layer.identity() for layer in self._layers]
        if key != self._key:
            self._key, self._groups = key, self._group()
        self._share_gates()
        for layers, (cores, *rest) in self._groups:
            gates = [gate for layer in layers for gate in layer.bond_gates()]
            lefts, rights = merge_halves(cores, gates, *rest)
            pairs = zip(lefts.unbind(0), rights.unbind(0), strict=True)
            for layer, halves in zip(layers, pairs, strict=True):
                layer.shared_halves = halves
        return self

    def __exit__(self, *problem: object) -> None:
        for layer in self._layers:
            layer.shared_halves = None
        for train in self._trains:
            train.shared_gates = None

    def _share_gates(self) -> None:
        gates = [list(train.gates) for train in self._trains]
        flat = [gate for of_one in gates for gate in of_one]
        alike = {(gate.dtype, gate.device, gate.requires_grad) for gate in flat}
        if len(alike) != 1:  # a frozen gate is to get no gradient
            return
        together = torch.cat(flat)
        parts = iter(together.split([gate.shape[0] for gate in flat]))
        start = 0
        for train, of_one in zip(self._trains, gates, strict=True):
            train.shared_gates = SharedGates(together, start, tuple(next(parts) for _ in of_one))
            start += sum(gate.shape[0] for gate in of_one)

    def _group(self) -> list[tuple[list[TTLinear], tuple[Any, ...]]]:
        """Layers that are joined together, and all arguments for it but the gates."""
        alike: dict[object, list[TTLinear]] = {}
        for layer in self._layers:
            alike.setdefault(layer.kind(), []).append(layer)
        return [
            (
                layers,
                (
                    [core for layer in layers for core in layer.cores],
                    [layer.bias for layer in layers if layer.bias is not None],
                    len(layers),
                    layers[0].shape.split,
                    layers[0].prune_below,
                ),
            )
            for layers in alike.values()
        ]
