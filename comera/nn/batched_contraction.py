"""Contract the cores of all linear layers of a model to their factors in a few calls.

Hand out factors that were contracted together, each layer its own.

With torch's own ``unbind``, a layer that no gradient reaches, as behind ``detach()`` or under
``no_grad``, would get zeros for a gradient, with which optimizers go on moving it; by itself it
gets none.

Linear layers whose cores are contracted to their factors in a few calls.

The gates of many modules as one vector, of which each module and a rank objective read.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.linear import TTLinear
from comera.nn.module import (
    Shared,
    SharedGates,
    TensorTrainModule,
    check_unsharded,
    may_share,
    tensor_trains,
    versions_of,
)
from comera.ops.contract_cores import contract_groups, layout_of
from comera.ops.dispatch import is_eager, shapes_are_static


def hand_out(
    groups: Sequence[Sequence[nn.Module]], factors: Sequence[Tensor]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the factors of each layer of each group, ``(I, R)`` and ``(R, O)``.

    Where graphs are captured or functions transformed, layers that no gradient reaches get zeros.

    Args:
        groups: The layers, all of which were contracted in one call.
        factors: The left factors ``(G, I, R)`` and the right factors ``(G, R, O)`` of the first
            group of G layers, then those of the second, and so on.
    """
    plain = (
        not (factors[0].requires_grad and is_eager())
        or shapes_are_static(factors[0])
        or torch._C._are_functorch_transforms_active()
    )
    if plain:
        apart = [factor.unbind(0) for factor in factors]
    else:
        unbind: Callable[..., tuple[Tensor, ...]] = _HandOut.apply
        flat = iter(unbind(groups, *factors))
        apart = [tuple(islice(flat, len(factor))) for factor in factors]
    return [list(zip(*pair, strict=True)) for pair in zip(apart[::2], apart[1::2], strict=True)]


class _HandOut(torch.autograd.Function):
    """Unbind all factors; one node of all groups, since those behind it share one, too."""

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Sequence[nn.Module]], *factors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.groups = groups
        return tuple(part for factor in factors for part in factor.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        flat = iter(grads)
        apart = [list(islice(flat, len(layers))) for layers in ctx.groups for _ in range(2)]
        if any(grad is None for grad in grads):
            _keep_none(ctx.groups, apart)
        return None, *map(_stacked, apart)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        counts = [len(layers) for layers in ctx.groups for _ in range(2)]
        return tuple(
            part
            for tangent, count in zip(tangents, counts, strict=True)
            for part in ([None] * count if tangent is None else tangent.unbind(0))
        )


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


def _keep_none(
    groups: Sequence[Sequence[nn.Module]], apart: Sequence[Sequence[Tensor | None]]
) -> None:
    """Let layers that no gradient has reached have none after this backward pass, if not before."""
    without = [
        param
        for layers, lefts, rights in zip(groups, apart[::2], apart[1::2], strict=True)
        for layer, left, right in zip(layers, lefts, rights, strict=True)
        if left is None and right is None
        for param in layer.parameters()
        if param.requires_grad and param.grad is None
    ]

    def drop_zeros() -> None:
        for param in without:
            if param.grad is not None and not param.grad.any():
                param.grad = None

    if without:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(drop_zeros)


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


def share_gates(trains: Sequence[TensorTrainModule]) -> None:
    """Put the gates of all modules into one vector, and let each module read its part of it."""
    gates = [list(train.gates) for train in trains]
    flat = [gate for of_one in gates for gate in of_one]
    alike = {(gate.dtype, gate.device, gate.requires_grad) for gate in flat}
    if len(alike) != 1:  # such as a frozen gate, which is to get no gradient
        return
    together = torch.cat(flat)
    parts = iter(together.split([gate.shape[0] for gate in flat]))
    start = 0
    for train, of_one in zip(trains, gates, strict=True):
        vars(train)["shared_gates"] = SharedGates(
            together, start, tuple(next(parts) for _ in of_one)
        )
        start += sum(gate.shape[0] for gate in of_one)


def unshare_gates(trains: Sequence[TensorTrainModule]) -> None:
    """Let every module read its own gates again."""
    for train in trains:
        vars(train)["shared_gates"] = None


def gates_together(trains: Sequence[TensorTrainModule]) -> Tensor:
    """Return all gates in one vector, the shared one if it holds just these."""
    gates = [gate for train in trains for gate in train.gates]
    for train in trains:
        train.renew_shared()
    first, start = trains[0].shared_gates, 0
    if first is None or not may_share(first.flat, gates[0]):
        return torch.cat(gates)
    for train in trains:
        shared = train.shared_gates
        if shared is None or shared.flat is not first.flat or shared.start != start:
            return torch.cat(gates)
        start += sum(part.shape[0] for part in shared.parts)
    return first.flat if len(first.flat) == start else torch.cat(gates)


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
        check_unsharded(model, "BatchedContraction")
        self._model = model
        self._trains = list(tensor_trains(model).values())
        self._layers = LayersTogether(
            [m for m in self._trains if isinstance(m, TTLinear)], autocast
        )
        self._params: list[tuple[Tensor, ...]] = []

    def __enter__(self) -> "BatchedContraction":
        if self._layers.have_changed():
            check_unsharded(self._model, "BatchedContraction")  # it may have been sharded since
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


def _read_from(train: TensorTrainModule) -> tuple[Tensor, ...]:
    """Return the parameters that the tensors shared with a module are made of."""
    return tuple(train.parameters() if isinstance(train, TTLinear) else train.gates)
