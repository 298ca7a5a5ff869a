"""Contract the cores of all linear layers of a model to their factors in a few calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.handed_out import hand_out
from comera.nn.linear import TTLinear
from comera.nn.module import (
    Shared,
    TensorTrainModule,
    check_whole,
    tensor_trains,
    versions_of,
)
from comera.nn.shared_gates import share_gates, unshare_gates
from comera.ops.factors import contract_groups, layout_of


class BatchedContraction:
    """A context in which the linear layers of a model contract their cores together.

    By itself every :class:`~comera.TTLinear` contracts its own cores to a left and a right factor
    in each forward pass: some dozen small operations a layer, whatever the batch. When this context
    is entered, the cores of layers of equal shape are contracted in one batch, and a forward pass
    uses the factors that are there. Gradients flow as always. ``comera.TrainStep`` enters it in
    each step. The gates of all layers are one vector meanwhile, of which a rank objective reads
    too.

    Args:
        model: The model, whose layers are found once, here; their ranks may change between two
            uses.
        autocast: Dtype in which the layers will be used: the factors are made in it, for layers
            that are called while autocast is on; one that is called outside contracts its own.

    Raises:
        ValueError: If a tensor train is sharded, as by ``fully_shard``.

    Note:
        Call ``backward`` once for each time it is entered; inside, where activation checkpointing
        is used. A parameter that is written to inside, by an optimizer or ``load_state_dict``, is
        noticed, and everything is contracted anew; not by a compiled model, and not where it is
        written to through ``.data``, replaced, or brought to another dtype or device: leave the
        context for that.
        The gates of a layer that no gradient reaches get one of zeros, not None, where they are
        part of one vector with others; in a CUDA graph its cores do, too.

    Example::

        contracted = comera.BatchedContraction(model)
        for batch in loader:
            with contracted:
                loss_fn(model, batch).backward()
            optimizer.step()
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        check_whole(model, "BatchedContraction")
        self._model = model
        self._trains = list(tensor_trains(model).values())
        self._layers = LayersTogether(
            [m for m in self._trains if isinstance(m, TTLinear)], autocast
        )
        self._params: list[tuple[Tensor, ...]] = []

    def __enter__(self) -> "BatchedContraction":
        if self._layers.have_changed():
            check_whole(self._model, "BatchedContraction")  # it may have been sharded since
            self._layers.arrange()
            self._params = [_read_from(train) for train in self._trains]
        try:
            self._share()
        except BaseException:  # such as one of too little memory: nothing stays shared
            self.__exit__()
            raise
        return self

    def _share(self) -> None:
        """Gather the gates and contract the cores of all layers, which then use what was made."""
        for train, params in zip(self._trains, self._params, strict=True):
            vars(train)["shared"] = Shared(params, versions_of(params), self._share)
        share_gates(self._trains)
        self._layers.contract()

    def __exit__(self, *problem: object) -> None:
        self._layers.take_back()
        unshare_gates(self._trains)
        for train in self._trains:
            vars(train)["shared"] = None


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
        """Say whether a parameter was replaced, resized, frozen, cast or moved since."""
        return self._key != self._identity()

    def _identity(self) -> object:
        return self.autocast, [layer.identity() for layer in self.layers]

    def arrange(self) -> None:
        """Arrange all groups in one call, but that trained layers stay apart from frozen ones."""
        self._key = self._identity()
        self.params = [tuple(layer.parameters()) for layer in self.layers]
        alike: dict[object, list[TTLinear]] = {}
        for layer in self.layers:
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


def _read_from(train: TensorTrainModule) -> tuple[Tensor, ...]:
    """Return the parameters that the tensors shared with a module are made of."""
    return tuple(train.parameters() if isinstance(train, TTLinear) else train.gates)


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
