"""Contract the cores of all linear layers of a model to their factors in a few calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.linear import BTTLinear, CompressedLinear, TTLinear
from comera.nn.module import Shared, SharedGates, TensorTrainModule, check_unsharded, tensor_trains
from comera.ops.contract_cores import contract_groups
from comera.ops.cores import Chains
from comera.ops.dispatch import is_eager, shapes_are_static
from comera.ops.linear.blocks import block_factors
from comera.params import may_share, params_of, versions_of, wrappers_of


class BatchedContraction:
    """A context in which the linear layers of a model contract their cores together.

    The cores of layers of equal shape are contracted in one batch, and forward passes use the
    cached factors, with the same gradients. ``comera.TrainStep`` enters the context in each step.
    Ranks may change between two uses. ``autocast`` is the dtype of the factors under autocast; of
    tensor trains that fewer than ``least`` layers have alike, each contracts its own. Raises
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
        self, model: nn.Module, autocast: torch.dtype | None = None, *, least: int = 1
    ) -> None:
        check_unsharded(model, "BatchedContraction")
        self._model, self._autocast, self._least = model, autocast, least
        self._trains = list(tensor_trains(model).values())
        self._key: object = None
        self._apart: bool | None = None  # if together, DistributedDataParallel finds all used
        self._params: list[list[Tensor]] = []
        self._calls: list[tuple[list[list[TTLinear]], list[Chains]]] = []
        self._blocks: list[list[BTTLinear]] = []

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
                if "bias" in layer._parameters:  # it is not computed, as by torch.nn.utils.prune
                    alike.setdefault(layer if self._apart else layer.kind(), []).append(layer)
            chains = [of for of in alike.values() if of[0].is_chain and len(of) >= self._least]
            self._key, self._calls = key, _calls(chains, self._autocast, self._apart)
            self._blocks = [of for of in alike.values() if not of[0].is_chain]
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
        for groups, chains in self._calls:
            gates = [[gate for layer in of for gate in layer.bond_gates()] for of in groups]
            factors = contract_groups(
                [replace(one, gates=of) for one, of in zip(chains, gates, strict=True)]
            )
            _set_factors(groups, factors)
        for layers in self._blocks:
            lefts, rights = zip(*(params_of(layer.cores) for layer in layers), strict=True)
            gates = [layer.bond_gates()[0] for layer in layers]
            dtype = None if lefts[0].dtype == torch.float64 else self._autocast
            biases = [layer.bias for layer in layers if layer.bias is not None]
            pair = block_factors(lefts, gates, rights, biases, layers[0].prune_below, dtype)
            _set_factors([layers], [each.unflatten(0, (len(layers), -1)) for each in pair])

    def __exit__(self, *problem: object) -> None:
        for train in self._trains:  # a compiled step has to find layers as they were at first
            vars(train)["shared"] = vars(train)["shared_gates"] = None
            vars(train).pop("shared_factors", None)


def _calls(
    alike: Sequence[list[TTLinear]], autocast: torch.dtype | None, apart: bool
) -> list[tuple[list[list[TTLinear]], list[Chains]]]:
    """Group groups of equal layers by call, so that frozen layers, or all, have their own.

    Returns for each call the groups, and the argument of ``contract_groups``, still without gates.
    """
    together: dict[object, list[list[TTLinear]]] = {}
    for group in alike:
        core = group[0].cores[0]
        trained = any(param.requires_grad for layer in group for param in layer.parameters())
        own = apart and len(together)
        together.setdefault((core.dtype, core.device, trained, own), []).append(group)
    calls = []
    for groups in together.values():
        chains = []
        for group in groups:
            cores = [core for layer in group for core in layer.cores]
            biases = [layer.bias for layer in group if layer.bias is not None]
            split, threshold = group[0].shape.split, group[0].prune_below
            dtype = None if cores[0].dtype == torch.float64 else autocast
            chains.append(Chains(cores, [], biases, len(group), split, threshold, dtype=dtype))
        calls.append((groups, chains))
    return calls


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
