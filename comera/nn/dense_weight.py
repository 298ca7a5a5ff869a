"""Provide the dense weight of a tensor train as a read-only tensor that can be assigned."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from comera.ops.dispatch import is_eager

_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_NO_PARAMETER = (
    "layer.weight is computed in each access, so that this would change nothing: "
    "layer.requires_grad_(False) freezes the layer, and hooks go on each of layer.parameters()"
)
_FOR_PARAMETERS = Tensor.requires_grad.__set__, Tensor.requires_grad_, Tensor.register_hook  # type: ignore[attr-defined]


class DenseWeight(Tensor):
    """A read-only weight computed from cores.

    Any write raises ``RuntimeError``: by a method, an ``out=`` argument, assignment to ``.data`` or
    a list function of an optimizer. Tensors that share its memory (``.data``, ``detach()``, views)
    are read-only too; other results are ordinary tensors, as is an ``nn.Parameter`` made of it.
    """

    _remedy = ""
    _is_hf_initialized = True
    """Mark by which transformers does not initialise it when a model is loaded."""

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """Become an ordinary parameter: ``nn.Parameter(weight)`` sets this flag."""
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def set_(self, *source: Any) -> Any:
        """Refuse what torch shows no subclass."""
        raise RuntimeError(self._remedy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            guarded = [part for part in tree_leaves((args, kwargs)) if isinstance(part, cls)]
            if func == Tensor.data.__set__ and guarded:  # type: ignore[attr-defined]
                raise RuntimeError(guarded[0]._remedy)
            if func == Tensor.grad.__set__ and args[1] is not None:  # type: ignore[union-attr]
                raise RuntimeError(_NO_PARAMETER)
            if func in _FOR_PARAMETERS and args[0]._is_whole:
                given = next(iter((*args[1:], *kwargs.values(), True)))  # a flag, or a hook
                if given != args[0].requires_grad:
                    raise RuntimeError(_NO_PARAMETER)
            before = [tensor._version for tensor in guarded]
            result = func(*args, **kwargs)
            for tensor, version in zip(guarded, before, strict=True):
                if tensor._version != version:
                    raise RuntimeError(tensor._remedy)
            return _guard_views(result, guarded)


def read_only(compute: Callable[[], Tensor], remedy: str) -> Tensor:
    """Return the computed weight as a :class:`DenseWeight`; ``remedy`` is the error of a write.

    Returns an ordinary tensor while compiling, under ``torch.func``, and for other tensor types.
    """
    if is_eager() and torch.is_inference_mode_enabled():  # where torch counts no versions
        with torch.inference_mode(False), torch.no_grad():
            weight = compute().contiguous()
    else:
        weight = compute().contiguous()
    if not is_eager() or type(weight) is not Tensor or _is_transformed(weight):
        return weight
    return _guarded(weight, remedy, is_whole=True)


def _guarded(tensor: Tensor, remedy: str, is_whole: bool = False) -> Tensor:
    made: Any = tensor.as_subclass(DenseWeight)
    made._remedy, made._is_whole = remedy, is_whole
    return made


def _guard_views(result: Any, guarded: list[Any]) -> Any:
    """Make a function's result read-only if it shares the memory of a read-only argument."""
    if isinstance(result, (list, tuple)) and guarded:
        views = [_guard_views(part, guarded) for part in result]
        if all(view is part for view, part in zip(views, result, strict=True)):
            return result  # keeps a named tuple what it is
        return type(result)(views)
    if type(result) is not Tensor:
        return result
    memory = _memory(result)
    for source in guarded:
        if memory is not None and memory == _memory(source):
            return _guarded(result, source._remedy)
    return result


def _memory(tensor: Tensor) -> int | None:
    has_storage = tensor.layout == torch.strided and not _is_transformed(tensor)
    return tensor.untyped_storage()._cdata if has_storage else None


PARAMETRIZED = (
    "the weight of a tensor-train layer is computed from its cores and is no parameter that "
    "weight_norm, another parametrization or functional_call could take: leave the layer dense, by "
    "TTConfig(exclude_modules=...)"
)


class WithoutWeight(dict[str, Any]):
    """Parameters by name, none of them ``weight``: the old ``weight_norm`` asks nothing else."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(PARAMETRIZED) if name == "weight" else KeyError(name)

    def __delitem__(self, name: str) -> None:
        self[name]  # or say why not
        super().__delitem__(name)


class WeightByAssignment(nn.Module):
    """A module whose ``weight`` is a property, which can also be assigned an ``nn.Parameter``."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set the property on ``layer.weight = nn.Parameter(...)``; register other parameters."""
        if isinstance(param, DenseWeight):  # as torch.nn.utils.prune does, to multiply it by a mask
            raise RuntimeError(param._remedy)
        if name == "weight" and param is not None:
            self.weight = param.detach()
        else:
            super().register_parameter(name, param)
