"""Linear layers whose cores are contracted to their factors in a few calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.nn.handed_out import hand_out
from comera.nn.linear import TTLinear
from comera.ops.contract_cores import contract_groups, layout_of


class LayersTogether:
    """Linear layers arranged by shape, once, to contract their cores together as often as wanted.

    Args:
        layers: The layers.
        autocast: Dtype of the factors, but float64 stays; None for that of the cores.

    Attributes:
        params: The parameters of each layer, when it was arranged.
    """

    def __init__(self, layers: Sequence[TTLinear], autocast: torch.dtype | None = None) -> None:
        self.layers, self.autocast = list(layers), autocast
        self.params: list[tuple[Tensor, ...]] = []
        self._key: object = None
        self._calls: list[tuple[list[list[TTLinear]], tuple[Any, ...]]] = []

    def have_changed(self) -> bool:
        """Say whether something was done to a parameter, or ``prune_below`` set, since."""
        return self._key != self._identity()

    def _identity(self) -> object:
        return self.autocast, [layer.identity() for layer in self.layers]

    def arrange(self) -> None:
        """Arrange all groups in one call, but that trained layers stay apart from frozen ones.

        A layer whose bias is computed from parameters stays out and contracts its own cores.
        """
        self._key = self._identity()
        self.params = [tuple(layer.parameters()) for layer in self.layers]
        alike: dict[object, list[TTLinear]] = {}
        for layer in self.layers:
            if "bias" not in layer._parameters:  # a hook on its own pass may compute it, as prune's
                continue
            alike.setdefault(layer.kind(), []).append(layer)
        together: dict[object, list[list[TTLinear]]] = {}
        for layers in alike.values():
            core = layers[0].cores[0]
            trained = any(p.requires_grad for layer in layers for p in layer.parameters())
            together.setdefault((core.dtype, core.device, trained), []).append(layers)
        self._calls = [(g, _arguments(g, self.autocast)) for g in together.values()]

    def contract(self) -> None:
        """Contract the cores of all layers, which then use what was made."""
        for groups, (cores, *rest) in self._calls:
            gates = [gate for layers in groups for m in layers for gate in m.bond_gates()]
            factors = contract_groups(cores, gates, *rest)
            narrow = factors[0].dtype != cores[0].dtype
            name = "narrow_factors" if narrow else "shared_factors"
            for layers, pairs in zip(groups, hand_out(groups, factors), strict=True):
                for layer, pair in zip(layers, pairs, strict=True):
                    vars(layer)[name] = pair

    def take_back(self) -> None:
        """Let each layer contract its own cores again.

        Nothing is left on it: a compiled step is to find it as it was the first time.
        """
        for layer in self.layers:
            for name in ("shared_factors", "narrow_factors"):
                vars(layer).pop(name, None)


def _arguments(groups: list[list[TTLinear]], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Collect what a grouped contraction takes besides gates: cores, biases, layout, threshold.

    Args:
        groups: The layers.
        dtype: Autocast's, which leaves float64 as it is; None for that of the cores.
    """
    tensors: tuple[list[Tensor], ...] = [], [], []
    layout: list[int] = []
    for layers in groups:
        parts = (
            [core for layer in layers for core in layer.cores],
            [gate for layer in layers for gate in layer.gates],
            [layer.bias for layer in layers if layer.bias is not None],
        )
        for whole, part in zip(tensors, parts, strict=True):
            whole.extend(part)
        wanted = None if parts[0][0].dtype == torch.float64 else dtype
        layout += layout_of(*parts, len(layers), layers[0].shape.split, dtype=wanted)
    cores, _, biases = tensors
    return cores, biases, layout, [layers[0].prune_below for layers in groups]
