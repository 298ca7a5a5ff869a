"""Scale a core's outgoing bond by its rank gate; a gate at or below the threshold is a pruned rank.

Gates stay float32 whatever the cores are: bfloat16 rounds 0.01 up past a threshold of 0.01, so
that a pruned rank would come back to life (CoMERA, arXiv 2405.14377, section 3).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.operator import operator


def open_gate(gate_R: Tensor, threshold: float) -> Tensor:
    """The gate where it lets its rank through, zero where the rank is pruned; NaN stays."""
    return F.threshold(gate_R, threshold, 0.0)


def rank_gate_reference(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    return core * open_gate(gate_R, threshold).to(core.dtype)


@operator("comera::rank_gate")
def rank_gate(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    """Multiply the last dimension of ``core`` by ``gate_R`` where that is above ``threshold``.

    Args:
        core: ``(..., R)``, any floating dtype.
        gate_R: ``(R,)``, float32 or float64.
        threshold: At or below it a rank is pruned: its slice is zero and gets no gradient.

    Returns:
        A tensor like ``core``.
    """
    return rank_gate_reference(core, gate_R, threshold)


@rank_gate.register_fake
def _(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(core)


def _setup_context(ctx, inputs, output) -> None:
    core, gate_R, ctx.threshold = inputs
    ctx.save_for_backward(core, gate_R)


def rank_gate_grads(
    grad: Tensor, core: Tensor, gate_R: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """Gradients of a gated core with respect to the core and to the gate."""
    per_rank_R = (grad.to(gate_R.dtype) * core).flatten(0, -2).sum(0)
    grad_gate_R = torch.where(gate_R > threshold, per_rank_R, 0)
    return rank_gate_reference(grad, gate_R, threshold), grad_gate_R


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    core, gate_R = ctx.saved_tensors
    return *rank_gate_grads(grad, core, gate_R, ctx.threshold), None


rank_gate.register_autograd(_backward, setup_context=_setup_context)
