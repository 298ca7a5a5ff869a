"""Say whether to call a module is to compute what its class was written to, and nothing more.

Only then may others compute it in its place: a hook or a patch would be skipped.
"""

from typing import Any

from torch import nn

from comera.nn.module import TensorTrainModule

_CALL = nn.Module.__call__


def is_hooked(module: nn.Module) -> bool:
    """Check for hooks on a module's passes: it must then run by itself, or they are skipped.

    A forward pass of its own counts as one, as accelerate hooks its modules, and so does what has
    been patched into its class, or into all modules, for being called.
    """
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks) or "forward" in vars(module) or type(module).__call__ is not _CALL


def has_pass_of_its_own(module: nn.Module) -> bool:
    """Say whether a pass was put on the object, or on a tensor train's class by somebody else."""
    if "forward" in vars(module):
        return True
    ours: Any = type(module).forward
    return isinstance(module, TensorTrainModule) and not ours.__module__.startswith("comera.")


def passes_of(*kinds: Any) -> dict[Any, Any]:
    """Note the forward pass of each class as it is now, for :func:`is_as_noted`."""
    return {kind: kind.forward for kind in kinds}


def is_as_noted(module: nn.Module, passes: dict[Any, Any]) -> bool:
    """Say whether a module is of one of these very classes, not patched since, and not hooked."""
    kind: Any = type(module)
    return kind in passes and kind.forward is passes[kind] and not is_hooked(module)
