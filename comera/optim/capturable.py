"""Optimizers whose step a CUDA graph can hold, and what it takes for that."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.optim.inner import AnyOptimizer, unwrap


def why_not_capturable(optimizer: AnyOptimizer) -> str | None:
    """Why a graph cannot hold the optimizer's step, in words; None if it can."""
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


def make_capturable_(optimizer: Optimizer, device: torch.device) -> bool:
    """Set an optimizer up for a CUDA graph, in place: ``capturable``, and rates in tensors.

    A graph reads the learning rate where it is; schedulers fill such a tensor in place. Counts of
    steps move to the device.

    Args:
        optimizer: One that :func:`why_not_capturable` says nothing against.
        device: Of its parameters.

    Returns:
        Whether anything had to be changed.
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
        return False
    if "capturable" in optimizer.defaults:
        optimizer.defaults["capturable"] = True
        # The first steps are not captured, of which torch would warn.
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)
    return True
