"""Contract the cores of a model's linear layers together in each forward pass, in any loop.

:func:`~comera.tensorize_` leaves two hooks on the model, one before and one after its forward pass.
What :class:`~comera.BatchedContraction` does for a loop that enters it, they do for any other.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.batched_contraction import LayersTogether
from comera.nn.linear import TTLinear
from comera.nn.module import Shared, params_of, tensor_trains, versions_of
from comera.ops.context import autocast_dtype
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_concrete

_FEWEST_ON_CPU = 6
"""Layers from which on contracting them together pays on a CPU, where each call is cheap: 0.64 of
the speed of each by itself with two layers of width 64 and rank 4, 0.97 with five, 1.04 with six,
1.5 with 24. Encoders gain a tenth at width 768 and a fifth at 256."""

_MOST = 1 << 24
"""Numbers of all factors together up to which they are made without gradients, where they would
otherwise exist one layer at a time."""


def share_in_forward_(model: nn.Module) -> None:
    """Let a model contract the cores of its linear layers together in each forward pass.

    Outputs and gradients are those of each layer by itself, and every loop may go on as it does.
    The layers do so by themselves where they are called one by one, in parts of the model under
    activation checkpointing, while ``torch.compile`` or ``torch.func`` look on, and where
    parameters are sharded; and all of them on a CPU where they are fewer than six, which one by
    one are faster there.

    Those layers are served that the pass before has used, in the first pass all.

    Args:
        model: The model; nothing is left on it, or on a part of it that has done so, where there
            are fewer than two such layers.
    """
    for module in model.modules():
        if module is model or (_has_hooks(module) and len(_linears(module)) < 2):
            _remove_hooks(module)
    if len(_linears(model)) > 1:
        sharing = _ForwardSharing()
        model.register_forward_pre_hook(sharing.open)
        model.register_forward_hook(sharing.close, always_call=True)


def unshare_in_forward_(model: nn.Module) -> None:
    """Let each layer of a model contract its own cores again, as if it were the only one."""
    for module in model.modules():
        _remove_hooks(module)


def _remove_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if _is_ours(hook):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _has_hooks(module: nn.Module) -> bool:
    return any(map(_is_ours, module._forward_pre_hooks.values()))


def _is_ours(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), _ForwardSharing)


def _linears(model: nn.Module) -> list[TTLinear]:
    return [train for train in tensor_trains(model).values() if isinstance(train, TTLinear)]


class _ForwardSharing:
    """The two hooks of one model, and which of its layers they serve."""

    def __init__(self) -> None:
        self._thread: int | None = None  # in which a pass is under way
        self._forget()

    def _forget(self) -> None:
        self._layers: list[TTLinear] | None = None
        self._together: LayersTogether | None = None
        self._used: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to the layers of this model: a copy has its own."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def open(self, model: nn.Module, inputs: Any) -> None:
        """Share the factors of the layers until :meth:`close`."""
        if not (is_eager() and self._may_share(model)):
            return
        self._thread, self._used = threading.get_ident(), set()
        try:
            self._share()
        except BaseException:
            self._take_back()
            raise

    def close(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Let each layer contract its own cores again."""
        if is_eager() and self._thread == threading.get_ident():
            self._take_back()
            if output is not None:  # else the pass broke off
                self._learn(model)

    def _may_share(self, model: nn.Module) -> bool:
        if torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return False
        if getattr(model, "_is_replica", False):  # of nn.DataParallel: its layers are made anew
            return False
        if self._layers is None:
            self._layers = _linears(model)
            self._together = LayersTogether(self._layers)
        mine = self._thread == threading.get_ident()  # of a pass that ended by Ctrl-C
        if self._thread is not None and not mine:
            return False
        if not mine and any(layer.shared is not None for layer in self._layers):
            return False
        return _are_enough(self._layers)

    def _share(self) -> None:
        assert self._layers is not None
        assert self._together is not None
        for layer in self._layers:
            self._announce(layer, ())
        if self._is_ready(self._together):
            for layer, params in zip(self._together.layers, self._together.params, strict=True):
                self._announce(layer, params)
            self._together.contract()

    def _is_ready(self, together: LayersTogether) -> bool:
        """Arrange the layers if need be; False where each is better by itself."""
        if not _are_enough(together.layers):
            return False
        if not (torch.is_grad_enabled() or _numbers(together) <= _MOST):
            return False
        core = params_of(together.layers[0].cores)[0]
        dtype = autocast_dtype(core)
        together.autocast = None if dtype == core.dtype else dtype
        if together.have_changed():
            if not all(map(_is_whole, together.layers)):
                return False
            together.arrange()
        return True

    def _announce(self, layer: TTLinear, params: tuple[Tensor, ...]) -> None:
        """Let a layer say whether it is used, and notice it if its parameters are written to."""
        versions = versions_of(params)
        vars(layer)["shared"] = Shared(params, versions, self._share, self._thread, self._used)

    def _take_back(self) -> None:
        self._thread = None
        for layer in self._layers or ():
            for name in ("shared", "shared_factors", "narrow_factors"):
                vars(layer).pop(name, None)

    def _learn(self, model: nn.Module) -> None:
        """Serve the layers that this pass has used in the next one."""
        assert self._together is not None
        before = {id(layer) for layer in self._together.layers}
        if before == self._used:
            return
        self._layers = _linears(model)  # others may have taken the place of those left out
        self._together = LayersTogether([m for m in self._layers if id(m) in self._used])


def _are_enough(layers: list[TTLinear]) -> bool:
    """Say whether contracting them together pays."""
    if len(layers) < 2:
        return False
    return len(layers) >= _FEWEST_ON_CPU or not params_of(layers[0].cores)[0].is_cpu


def _is_whole(layer: TTLinear) -> bool:
    """Say whether all parameters are there: not sharded, nor taken away by a wrapper."""
    cores, gates = layer.cores._parameters.values(), layer.gates._parameters.values()
    if (len(cores), len(gates)) != (len(layer.cores), len(layer.gates)):
        return False
    for param in (*cores, *gates, layer.bias):
        if param is not None and not is_concrete(param):  # sharded ones are of a type of their own
            return False
    return all(core is not None and core.dim() == 3 for core in cores)


def _numbers(together: LayersTogether) -> int:
    """Count the numbers of all factors."""
    return sum(
        layer.factor_width * (layer.in_features + layer.out_features) for layer in together.layers
    )
