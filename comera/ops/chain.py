"""Join neighbouring cores along their bonds, gates applied on the way.

The half-chains of a layer are small next to its batch, so they are joined first; everything
the batch then meets is a thin matrix. The backward pass absorbs one core at a time and shares
the partial products between all the cores' gradients (CoMERA, arXiv 2405.14377, section 4).
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from comera.ops.rank_gate import rank_gate_grads, rank_gate_reference


def merge_chain_reference(
    cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float
) -> Tensor:
    """The same as :func:`merge_chain`, core by core, for autograd to differentiate."""
    gated = _apply_gates(cores, gates, threshold)
    out = gated[0]
    for core in gated[1:]:
        out = torch.tensordot(out, core, 1)
    return out.flatten(1, -2)


@torch.library.custom_op("comera::merge_chain", mutates_args=())
def merge_chain(cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float) -> Tensor:
    """Contract a run of cores into one ``(first bond, product of modes, last bond)``.

    Args:
        cores: Each ``(left bond, mode(s), right bond)``; neighbours agree on their bond.
        gates: ``gates[k]`` scales the right bond of ``cores[k]``. As many as there are cores, or
            one fewer when the last bond carries no gate. float32 or wider.
        threshold: A gate at or below it is a pruned rank.

    Returns:
        A tensor of the cores' dtype. Narrow dtypes are joined in float32 and rounded once.
    """
    with without_autocast(cores[0]):
        wide = [core.to(_wide(core)) for core in cores]
        partial = _partial_products(_apply_gates(wide, gates, threshold))
        merged = partial[-1] if _from_left(cores) else partial[0]
        shape = (cores[0].shape[0], _modes(cores), cores[-1].shape[-1])
        # A single core without a gate passes through untouched, but an op may not return its input.
        return merged.reshape(shape).to(cores[0].dtype, copy=len(cores) == 1 and not gates)


@merge_chain.register_fake
def _(cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float) -> Tensor:
    return cores[0].new_empty(cores[0].shape[0], _modes(cores), cores[-1].shape[-1])


def _setup_context(ctx, inputs, output) -> None:
    cores, gates, ctx.threshold = inputs
    ctx.num_cores = len(cores)
    ctx.save_for_backward(*cores, *gates)


def _backward(ctx, grad: Tensor):
    saved = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    cores, gates = saved[: ctx.num_cores], saved[ctx.num_cores :]
    with without_autocast(grad):
        wide = [core.to(_wide(core)) for core in cores]
        gated = _apply_gates(wide, gates, ctx.threshold)
        grads = _gradients(grad.to(wide[0].dtype), gated)
        grad_gates = []
        for k, gate in enumerate(gates):
            grads[k], grad_gate = rank_gate_grads(grads[k], wide[k], gate, ctx.threshold)
            grad_gates.append(grad_gate)
    grad_cores = [g.reshape(c.shape).to(c.dtype) for g, c in zip(grads, cores, strict=True)]
    return grad_cores, grad_gates, None


merge_chain.register_autograd(_backward, setup_context=_setup_context)


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Autocast off on the tensor's device; the meta device has none to switch off."""
    kind = like.device.type
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _apply_gates(
    cores: Sequence[Tensor], gates: Sequence[Tensor], threshold: float
) -> list[Tensor]:
    gated = [rank_gate_reference(c, g, threshold) for c, g in zip(cores, gates, strict=False)]
    return [*gated, *cores[len(gates) :]]


def _partial_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """Running products, started from the narrower end: ``out[k]`` covers that end up to core k."""
    if _from_left(cores):
        out = [cores[0].flatten(0, -2)]
        for core in cores[1:]:
            rows = out[-1].shape[0] * _modes([core])
            out.append((out[-1] @ core.flatten(1)).reshape(rows, core.shape[-1]))
        return out
    out = [cores[-1].flatten(1)]
    for core in reversed(cores[:-1]):
        columns = out[-1].shape[1] * _modes([core])
        out.append((core.flatten(0, -2) @ out[-1]).reshape(core.shape[0], columns))
    return out[::-1]


def _gradients(grad: Tensor, cores: Sequence[Tensor]) -> list[Tensor]:
    """Each core's gradient; the remaining gradient shrinks by one core at a time."""
    partial, grads = _partial_products(cores), []
    if _from_left(cores):
        rest = grad.reshape(partial[-1].shape)
        for core, before in zip(reversed(cores[1:]), reversed(partial[:-1]), strict=True):
            rest = rest.reshape(before.shape[0], _modes([core]) * core.shape[-1])
            grads.append((before.T @ rest).reshape(core.shape))
            rest = rest @ core.flatten(1).T
        return [rest.reshape(cores[0].shape), *reversed(grads)]
    rest = grad.reshape(partial[0].shape)
    for core, after in zip(cores[:-1], partial[1:], strict=True):
        rest = rest.reshape(core.shape[0] * _modes([core]), after.shape[1])
        grads.append((rest @ after.T).reshape(core.shape))
        rest = core.flatten(0, -2).T @ rest
    return [*grads, rest.reshape(cores[-1].shape)]


def _from_left(cores: Sequence[Tensor]) -> bool:
    return cores[0].shape[0] <= cores[-1].shape[-1]


def _modes(cores: Sequence[Tensor]) -> int:
    return math.prod(size for core in cores for size in core.shape[1:-1])


def _wide(core: Tensor) -> torch.dtype:
    return torch.promote_types(core.dtype, torch.float32)
