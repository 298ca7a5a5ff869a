"""Describe the state that a recorded training step fixes: addresses, and settings on the host."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.optim.state_layout import AnyOptimizer, unwrap


class HostState:
    """The state that a :class:`~comera.TrainStep` depends on besides its batch."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def why_not_capturable(self, device: torch.device) -> str | None:
        """Return why the step cannot be a CUDA graph; None if no reason is known yet."""
        parallel = self._step.parallel
        if parallel is not None and (problem := parallel.why_not_capturable(device)):
            return problem
        for name, param in self._step.model.named_parameters():
            if type(param) is not nn.Parameter:
                return f"the parameter {name} is a {type(param).__name__}"
            if param.device != device:
                return f"the parameter {name} is on {param.device}, others are on {device}"
        return why_not_capturable(self._step.optimizer)

    def identity(self) -> dict[str, Any]:
        """Set the optimizer up for graphs, and return the state that a recording depends on."""
        step, optimizer = self._step, unwrap(self._step.optimizer)
        modules = list(step.model.modules())
        params = [p for m in modules for p in m._parameters.values() if p is not None]
        buffers = [b for m in modules for b in m._buffers.values() if b is not None]
        # First: it replaces rates by tensors, which would count as a change.
        make_capturable_(optimizer, params[0].device)
        groups = optimizer.param_groups
        of_step = step._loss_fn, step.accumulate, step.clip_norm, step.autocast, step.scaled
        return {
            # An address may be given away again, but not to as many numbers.
            "parameters": [(param.data_ptr(), param.numel()) for param in params],
            "which parameters are trained": [param.requires_grad for param in params],
            "buffers": [(buffer.data_ptr(), buffer.numel()) for buffer in buffers],
            # A module may give way to one of other code over the same parameters.
            "modules": _objects(modules),
            "buffers of DistributedDataParallel": (
                None if step.parallel is None else step.parallel.times_renewed
            ),
            "training mode": [module.training for module in modules],
            # Numbers become constants of a graph; of a tensor it holds the address.
            "settings of the optimizer": [
                {
                    key: value.data_ptr() if isinstance(value, Tensor) else value
                    for key, value in group.items()
                    if key != "params"
                }
                for group in groups
            ],
            "parameters of the optimizer": _objects(p for group in groups for p in group["params"]),
            "state of the optimizer": _objects(
                value for state in optimizer.state.values() for value in state.values()
            ),
            "hooks of the optimizer": (
                len(optimizer._optimizer_step_pre_hooks),
                len(optimizer._optimizer_step_post_hooks),
            ),
            "stage of rank learning": None if step.ranks is None else step.ranks.identity(),
            "settings of the step": of_step,
            "rounding of float32 products": torch.backends.cuda.matmul.fp32_precision,
        }

    def hold(self) -> Callable[[], None]:
        """Return a function that restores the present host state, after a failed recording."""
        step, optimizer = self._step, unwrap(self._step.optimizer)
        states = {param: dict(state) for param, state in optimizer.state.items()}
        of_ranks = {} if step.ranks is None else dict(vars(step.ranks))

        def put_back() -> None:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()
            optimizer.state.update(states)
            if step.ranks is not None:
                vars(step.ranks).update(of_ranks)
                step.ranks.discard_()  # what importance pruning has added to tensors in place
            if step.parallel is not None:
                step.parallel.forget()

        return put_back


def _objects(found: Iterable[Any]) -> list[tuple[int, Any]]:
    """Return objects with their ids: pairs compare by identity, and keep the objects alive."""
    return [(id(each), each) for each in found]


def why_not_capturable(optimizer: AnyOptimizer) -> str | None:
    """Return why a CUDA graph cannot hold the optimizer's step; None if it can."""
    name = type(optimizer).__name__
    why = getattr(optimizer, "not_capturable", None)
    if why is not None:
        return f"{name} {why}"
    optimizer = unwrap(optimizer)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its step, which a graph would not run"
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD):
            if not group["fused"]:
                return "SGD reads its learning rate on the host: make it with fused=True"
        elif "capturable" not in group:
            return (
                f"{name} has no setting capturable: comera.MuonAdamW, comera.CAME and most of "
                "torch's optimizers do"
            )
    return None


def make_capturable_(optimizer: Optimizer, device: torch.device) -> None:
    """Set an optimizer up for a CUDA graph, in place.

    Sets ``capturable`` in the groups. Step counts and learning rates become tensors on the device;
    schedulers fill the learning rates in place.
    """
    changed = False
    for group in optimizer.param_groups:
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device != device:
            group["lr"] = torch.as_tensor(lr, dtype=torch.float32).to(device)
            changed = True
        if not group.get("capturable", True):
            group["capturable"] = changed = True
    if not changed:
        return
    if "capturable" in optimizer.defaults:
        optimizer.defaults["capturable"] = True
        # No warning of torch that the first steps are not captured.
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


def host_random_state() -> dict[str, Any]:
    """Return the random states of torch's CPU, Python and NumPy as tensors and plain values."""
    state: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, *others = state
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *others),
    }


def set_host_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002


def random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**host_random_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of :func:`random_state`, also on a machine without a GPU."""
    set_host_random_state(state)
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
