"""Step each parameter inside backward, and free its gradient at once (per-layer updates).

After LOMO (arXiv 2306.09782) and GaLore (arXiv 2403.03507, section 4.3); the hook is
``torch.Tensor.register_post_accumulate_grad_hook``.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from comera.optim.state_layout import plain_step, step_param
from comera.params import check_unflattened, is_sharded


class OptimizerInBackward:
    """Steps each parameter in backward, as soon as its gradient is complete.

    Gradients then need the memory of the largest layers instead of all. Schedulers, checkpoints and
    ``truncate_`` go on using the wrapped optimizer, and its steps are the same, bit for bit on a
    CPU. Still call :meth:`step` (or the optimizer's) once in each iteration: it ends the iteration,
    runs the optimizer's post hooks, and steps parameters without a hook, as of groups added later.

    Args:
        optimizer: Any optimizer that updates each parameter only from its own gradient and state.
        process_group: Group of processes over which each gradient is averaged before its step,
            instead of ``DistributedDataParallel``, which keeps all gradients in buckets. All
            processes start with equal parameters and use the same parameters in the same order in
            each backward. A model of ``torch.distributed.fsdp.fully_shard`` needs no group.

    Note:
        There is no clipping of the global norm (CAME and Adafactor bound each parameter's own
        step), no :class:`torch.amp.GradScaler` (use bfloat16), and no gradient after backward. A
        gradient that is not finite is applied, and an exception in backward leaves some parameters
        updated: check the loss before, as ``comera.TrainStep`` does. If a layer is used twice,
        activation checkpointing needs ``use_reentrant=False``.
        CAME and Muon update tensors of equal shape one by one here, not together: CAME takes some
        0.2 ms for each on a CPU. The hooks live as long as the parameters, or until :meth:`remove`.

    Raises:
        TypeError: If ``optimizer`` is no optimizer; in backward, if its steps change its groups.
        ValueError: If it cannot step in backward; the message says why, and what to use instead.

    Example::

        optimizer = comera.GaLoreAdamW(comera.galore_param_groups(model, lr=1e-2, rank=128))
        updates = comera.OptimizerInBackward(optimizer)
        for batch in loader:
            loss_fn(model, batch).backward()  # parameters change here
            updates.step()
    """

    not_capturable = "steps in hooks of the backward pass, which a graph would not run"

    def __init__(
        self, optimizer: Optimizer, *, process_group: "dist.ProcessGroup | None" = None
    ) -> None:
        _check(optimizer, process_group)
        self.optimizer, self.process_group = optimizer, process_group
        self._position: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        self._accumulating = False
        # Each device has a thread of its own in backward, and they share the optimizer.
        self._lock = threading.Lock()
        self._before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        self._handles: list[Any] = [self._before, after]
        for position, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad:
                    self._position[param] = position
                    self._handles.append(param.register_post_accumulate_grad_hook(self._on_grad))
        # So that GradScaler calls the optimizer's step, which raises in _before_step.
        self._undo = {k: v for k, v in vars(optimizer).items() if k == _SUPPORTS_SCALING}
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self.optimizer!r}"

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients without steps; run all parts of a batch but the last inside."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End an iteration: step parameters that still have a gradient, and drop it.

        Returns the result of ``closure``, which computes the loss and its backward pass. Raises
        ``RuntimeError`` if an updated parameter has a gradient again, or a ``GradScaler`` calls.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that are left, if any."""
        self.optimizer.zero_grad(set_to_none)

    def discard_(self) -> None:
        """Drop the gradients of an interrupted iteration; updated parameters stay updated."""
        self._stepped.clear()
        self.zero_grad()

    def remove(self) -> None:
        """Remove the hooks, so that the optimizer steps as it did before."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            vars(self.optimizer).pop(_SUPPORTS_SCALING, None)
            vars(self.optimizer).update(self._undo)
        self._handles, self._position = [], {}
        self._stepped.clear()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Return the state of the optimizer."""
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; there is nothing else to save."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state, saved with or without per-layer updates."""
        self.optimizer.load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise an error, as only ``GradScaler.step`` reads this, and a scaler cannot work here."""
        raise RuntimeError(_SCALED)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "OptimizerInBackward cannot be copied or pickled, as its hooks belong to these very "
            "parameters: save state_dict(), and make a new one around the other optimizer"
        )

    def _on_grad(self, param: Tensor) -> None:
        """Step a parameter whose gradient is complete (and reduced, under ``fully_shard``)."""
        if self._accumulating:
            return
        if vars(param).get("unreached") and param.grad is not None and not param.grad.any():
            param.grad = None  # BatchedContraction drops these zeros only after backward
            return
        with self._lock:
            if param in self._stepped:
                raise RuntimeError(f"{self._name(param)} {_TWICE}")
            self._average(param)
            self._stepped.add(param)
            step_param(self.optimizer, param, self._position[param])
            param.grad = None

    def _average(self, param: Tensor) -> None:
        if self.process_group is not None and param.grad is not None:
            # Divided first, as DistributedDataParallel does: the sum of many can overflow.
            param.grad.div_(dist.get_world_size(self.process_group))
            dist.all_reduce(param.grad, group=self.process_group)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._lock.locked():
            return  # a class that calls its parent's step, which has hooks of its own
        if hasattr(optimizer, "found_inf"):  # set by GradScaler for the time of a step
            vars(optimizer).pop("found_inf", None)
            vars(optimizer).pop("grad_scale", None)
            raise RuntimeError(_SCALED)
        _check_hooks(optimizer, mine=self._before.id)
        for param in self._stepped:
            if param.grad is not None:
                raise RuntimeError(
                    f"{self._name(param)} was updated in backward and has a gradient again. If the "
                    "model is wrapped in DistributedDataParallel, do not wrap it and give "
                    "OptimizerInBackward process_group=torch.distributed.group.WORLD, which "
                    "averages each gradient before its step; if accumulate() came after the last "
                    "backward, let it come first"
                )
        if self.process_group is not None:
            if any(value is not None for value in (*args[1:], *kwargs.values())):
                raise ValueError(
                    "step(closure) does not go with process_group=: call backward, then step()"
                )
            for group in optimizer.param_groups:
                for param in group["params"]:
                    self._average(param)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._lock.locked():
            self.zero_grad()  # else the next iteration would add to the gradients that are left
            self._stepped.clear()

    def _name(self, param: Tensor) -> str:
        number = self._position[param]
        group = self.optimizer.param_groups[number]
        index = next(k for k, p in enumerate(group["params"]) if p is param)
        shape = f"of shape {tuple(param.shape)}"
        if "param_names" in group:
            return f"the parameter {group['param_names'][index]!r} {shape}"
        return f"parameter {index} {shape} of parameter group {group.get('name', number)!r}"


_SUPPORTS_SCALING = "_step_supports_amp_scaling"

_TWICE = (
    "got a second gradient after it was updated in backward. Call step() of OptimizerInBackward "
    "once after each backward; where gradients of several backward passes belong together, run all "
    "but the last in `with updates.accumulate():`; where one pass runs activation checkpointing of "
    "a layer that is used twice, give torch.utils.checkpoint use_reentrant=False"
)

_SCALED = (
    "a GradScaler cannot work with OptimizerInBackward: parameters were updated in backward, with "
    "gradients still scaled. Train in bfloat16 without a scaler (torch.autocast(dtype="
    "torch.bfloat16)), or without per-layer updates"
)


def _check(optimizer: Optimizer, process_group: "dist.ProcessGroup | None") -> None:
    """Raise if the optimizer's steps in backward would differ from its ordinary steps."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; it must be an optimizer that holds "
            "all parameters, such as torch.optim.AdamW(model.parameters())"
        )
    name = type(optimizer).__name__
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), OptimizerInBackward) for hook in hooks):
        raise ValueError(f"this {name} is in an OptimizerInBackward already: remove() that first")
    _check_hooks(optimizer)
    closure = inspect.signature(plain_step(type(optimizer))).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{name} needs all gradients at once, several times in a step: call its "
            "step(closure) itself"
        )
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ValueError(
            f"{name} sends whole parameters around after its step: shard the model with "
            "torch.distributed.fsdp.fully_shard instead, and give a plain optimizer"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("differentiable=True needs the graph that backward frees: leave it out")
    why = getattr(optimizer, "needs_whole_matrices", None)
    if isinstance(optimizer, torch.optim.Adafactor):
        why = "takes norms in place, which torch cannot do on shards"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    check_unflattened(params, "OptimizerInBackward")
    for param in filter(is_sharded, params):
        if process_group is not None:
            raise ValueError(
                "process_group= is for whole parameters; these are sharded, and fully_shard "
                "reduces their gradients itself: leave process_group out"
            )
        if why is not None:
            raise ValueError(
                f"{name} {why}, and a parameter of shape {tuple(param.shape)} is sharded "
                "(DTensor): use torch.optim.AdamW, or leave the model whole and give "
                "process_group="
            )


def _check_hooks(optimizer: Optimizer, mine: int | None = None) -> None:
    hooks = optimizer._optimizer_step_pre_hooks
    others = [hook for number, hook in hooks.items() if number != mine]
    if others:
        shown = getattr(others[0], "__qualname__", repr(others[0]))
        raise ValueError(
            f"{type(optimizer).__name__} has a step pre-hook ({shown}), which would find no "
            "gradients: they are gone after backward. Hook the parameters "
            "(Tensor.register_hook), or use register_step_post_hook"
        )
