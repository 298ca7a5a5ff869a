"""Contract the cores of all linear layers of a model to their factors in a few calls."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.linear import CompressedLinear
from comera.nn.module import Shared, SharedGates, TensorTrainModule, check_unsharded, tensor_trains
from comera.ops.dispatch import is_eager, shapes_are_static
from comera.params import may_share, params_of, versions_of, wrappers_of


class BatchedContraction:
    """A context in which the linear layers of a model contract their cores together.

    The cores of layers of equal shape are contracted in one batch, and forward passes use the
    cached factors, with the same gradients. ``comera.TrainStep`` enters the context in each step.
    Ranks may change between two uses. ``autocast`` is the dtype of the factors under autocast. If
    ``sparing``, layers of which there are too few to gain by it on a CPU contract their own. Raises
    ``ValueError`` if a tensor train is sharded, as by ``fully_shard``.

    Note:
        Call ``backward`` once each time the context is entered; with activation checkpointing, of
        ``use_reentrant=False``, inside the context. If an optimizer or ``load_state_dict`` writes
        to a parameter inside, the cores are contracted again, except in a compiled model; a layer
        whose parameters ``torch.func.functional_call`` replaces contracts them by itself. Leave the
        context to write through ``.data``, or change the dtype or device. If no gradient reaches a
        layer, its gates get zeros instead of None; in a CUDA graph its cores do, too.

    Example::

        contracted = comera.BatchedContraction(model)
        for batch in loader:
            with contracted:
                loss_fn(model, batch).backward()
            optimizer.step()
    """

    def __init__(
        self, model: nn.Module, autocast: torch.dtype | None = None, *, sparing: bool = False
    ) -> None:
        check_unsharded(model, "BatchedContraction")
        self._model, self._autocast, self._sparing = model, autocast, sparing
        self._trains = list(tensor_trains(model).values())
        self._key: object = None
        self._apart: bool | None = None  # if together, DistributedDataParallel finds all used
        self._params: list[list[Tensor]] = []
        self._calls: list[list[list[Any]]] = []  # the groups of layers of each

    def __enter__(self) -> "BatchedContraction":
        layers = [train for train in self._trains if isinstance(train, CompressedLinear)]
        key = []  # changes if a parameter is replaced, resized, frozen or moved
        for layer in layers:
            cores, gates = params_of(layer.cores), params_of(layer.gates)
            ids = map(id, (*cores, *gates, layer._parameters.get("bias")))
            kinds = [(core.shape, core.requires_grad) for core in cores]
            key.append((*ids, kinds, cores[0].dtype, cores[0].device, layer.prune_below))
        if key != self._key:
            check_unsharded(self._model, "BatchedContraction")  # it may have been sharded since
            if self._apart is None:  # asked once: it takes long
                self._apart = any(each.find_unused_parameters for each in wrappers_of(self._trains))
            alike: dict[object, list[Any]] = {}
            for layer in layers:
                can_be = type(layer).stacked_factors is not CompressedLinear.stacked_factors
                # a bias may be computed, as by torch.nn.utils.prune
                if can_be and "bias" in layer._parameters:
                    alike.setdefault(layer if self._apart else layer.kind(), []).append(layer)
            groups = [
                of for of in alike.values() if not self._sparing or len(of) >= of[0].together_from
            ]
            self._key, self._calls = key, _calls(groups, self._apart)
            self._params = [train.shared_params() for train in self._trains]
        try:
            self._share()
        except BaseException:  # such as one of too little memory: nothing stays shared
            self.__exit__()
            raise
        return self

    def _share(self) -> None:
        for train, params in zip(self._trains, self._params, strict=True):
            vars(train)["shared"] = Shared(params, versions_of(params), self._share)
        gates = [gate for train in self._trains for gate in train.gates]
        alike = {(gate.dtype, gate.device, gate.requires_grad) for gate in gates}
        if len(alike) == 1:  # else one may be frozen, and must get no gradient
            flat = torch.cat(gates)
            parts = flat.split([gate.shape[0] for gate in gates])
            rest = iter(parts)
            for train in self._trains:
                own = list(islice(rest, len(train.gates)))
                vars(train)["shared_gates"] = SharedGates(flat, parts, own)
        for groups in self._calls:
            _set_factors(groups, groups[0][0].stacked_factors(groups, self._autocast))

    def __exit__(self, *problem: object) -> None:
        for train in self._trains:  # a compiled step has to find layers as they were at first
            vars(train)["shared"] = vars(train)["shared_gates"] = None
            vars(train).pop("shared_factors", None)


def _calls(alike: Sequence[list[Any]], apart: bool) -> list[list[list[Any]]]:
    """Group groups of equal layers by call, so that frozen layers, or all, have their own."""
    together: dict[object, list[list[Any]]] = {}
    for group in alike:
        first = group[0]
        trained = any(param.requires_grad for layer in group for param in layer.parameters())
        own = apart and len(together)
        key = type(first), first.cores[0].dtype, first.cores[0].device, trained, own
        together.setdefault(key, []).append(group)
    return list(together.values())


def gates_together(trains: Sequence[TensorTrainModule]) -> Tensor:
    """Return all gates in one vector: the shared vector if it has just these gates."""
    gates = [gate for train in trains for gate in train.gates]
    first = trains[0].shared_gates if all(train.renew_shared() for train in trains) else None
    if first is None or not may_share(first.flat, gates[0]):
        return torch.cat(gates)
    own = [part for train in trains if train.shared_gates for part in train.shared_gates.own]
    same = list(map(id, own)) == list(map(id, first.parts))
    return first.flat if same else torch.cat(gates)


def _set_factors(groups: Sequence[Sequence[nn.Module]], factors: Sequence[Tensor]) -> None:
    """Set on each layer its part of the factors ``(G, ...)`` of its group of G layers.

    In backward, a layer that no gradient reaches gets None, so that optimizers skip it; in captured
    graphs and under ``torch.func`` it gets zeros.
    """
    plain = (
        not (factors[0].requires_grad and is_eager())
        or shapes_are_static(factors[0])
        or torch._C._are_functorch_transforms_active()
    )
    if plain:
        apart = [factor.unbind(0) for factor in factors]
    else:
        unbind: Callable[..., tuple[Tensor, ...]] = _Unbind.apply
        flat = iter(unbind(groups, *factors))
        apart = [tuple(islice(flat, len(factor))) for factor in factors]
    for layers, lefts, rights in zip(groups, apart[::2], apart[1::2], strict=True):
        for layer, *pair in zip(layers, lefts, rights, strict=True):
            vars(layer)["shared_factors"] = tuple(pair)


class _Unbind(torch.autograd.Function):
    """Unbind the factors of all groups in one node of autograd, as one node contracted them."""

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
        without = [
            param
            for layers, lefts, rights in zip(ctx.groups, apart[::2], apart[1::2], strict=True)
            for layer, left, right in zip(layers, lefts, rights, strict=True)
            if left is None and right is None
            for param in layer.parameters()
            if param.requires_grad and param.grad is None
        ]

        for param in without:
            vars(param)["unreached"] = True  # for OptimizerInBackward, which steps before the drop

        def drop_zeros() -> None:
            for param in without:
                vars(param).pop("unreached", None)
                if param.grad is not None and not param.grad.any():
                    param.grad = None

        if without:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(drop_zeros)  # after this backward pass
        return None, *map(_stacked, apart)


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])
