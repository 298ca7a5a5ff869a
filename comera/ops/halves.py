"""Join the two halves of tensor-train matrices, those of all layers of one shape together.

What comes out is what a batch multiplies by: ``left`` and ``right`` with the bond between them
padded to a multiple of eight, which matrix products are fastest at, and the bias as the last row
of ``right``. Where the batch has a one in that column, adding the bias and summing its gradient
happen inside products that run anyway.

Shape suffixes: G = layers, I = input width, O = output width, R = padded bond between the halves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.ops.autocast import without_autocast
from comera.ops.chain import (
    gate_chains,
    gate_grads,
    join,
    join_grads,
    stack_chains,
    stack_gates,
    unstack_chains,
    unstack_gates,
)
from comera.ops.operator import operator
from comera.planning.padding import padded_rank


@operator("comera::merge_halves")
def merge_halves(
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    biases: Sequence[Tensor],
    num_layers: int,
    split: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Join the first ``split`` cores of each layer, and the others.

    Args:
        cores: ``(left bond, mode, right bond)``, listed layer by layer; all layers have the same
            modes and bonds.
        gates: One vector for each inner bond, listed layer by layer, or none at all.
        biases: One for each layer, or none at all; they may be narrower than the output modes.
        num_layers: How many layers there are.
        split: How many cores of a layer carry the input.
        threshold: A gate at or below it is a pruned rank.

    Returns:
        ``left (G, I, R)`` and ``right (G, R, O)`` in the dtype of the cores; what pads the bond is
        zero, but for the last row of ``right``, which holds the bias.
    """
    with without_autocast(cores[0]):
        stacked, open_gates, _ = _stack(cores, gates, num_layers, threshold)
        gated = gate_chains(stacked, open_gates)
        rank = cores[split].shape[0]
        more = padded_rank(rank, bool(biases)) - rank
        gated[split - 1] = F.pad(gated[split - 1], (0, more))  # copies, even where more is 0
        gated[split] = F.pad(gated[split], (0, 0, 0, 0, 0, more))
        left, right = join(gated[:split])[:, 0], join(gated[split:])[..., 0]
        if biases:
            right[:, -1, : biases[0].shape[0]] = torch.stack(list(biases))
        return left.to(cores[0].dtype), right.to(cores[0].dtype)


@merge_halves.register_fake
def _(cores, gates, biases, num_layers, split, threshold):
    length = len(cores) // num_layers
    in_width = out_width = 1
    for core in cores[:split]:
        in_width *= core.shape[1]
    for core in cores[split:length]:
        out_width *= core.shape[1]
    width = padded_rank(cores[split].shape[0], bool(biases))
    left = cores[0].new_empty(num_layers, in_width, width)
    return left, cores[0].new_empty(num_layers, width, out_width)


def _setup_context(ctx, inputs, output) -> None:
    cores, gates, biases, ctx.num_layers, ctx.split, ctx.threshold = inputs
    ctx.counts = len(cores), len(gates), len(biases)
    ctx.bias_width = biases[0].shape[0] if biases else 0
    ctx.save_for_backward(*cores, *gates)


def _backward(ctx, grad_left_GIR: Tensor, grad_right_GRO: Tensor):
    saved = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    num_cores, num_gates, num_biases = ctx.counts
    cores, gates = saved[:num_cores], saved[num_cores : num_cores + num_gates]
    split, num_layers = ctx.split, ctx.num_layers
    with without_autocast(grad_left_GIR):
        stacked, open_gates, live = _stack(cores, gates, num_layers, ctx.threshold)
        gated = gate_chains(stacked, open_gates)
        rank, wide = stacked[split].shape[1], stacked[0].dtype
        grads = [
            *join_grads(grad_left_GIR[:, None, :, :rank].to(wide), gated[:split]),
            *join_grads(grad_right_GRO[:, :rank, :, None].to(wide), gated[split:]),
        ]
        grads, per_gate = gate_grads(grads, stacked, open_gates)
        grad_cores = unstack_chains(grads, cores, num_layers)
        grad_gates = unstack_gates(per_gate, live, gates, num_layers)
        grad_biases = list(grad_right_GRO[:, -1, : ctx.bias_width].unbind(0)) if num_biases else []
    return grad_cores, grad_gates, grad_biases, None, None, None


merge_halves.register_autograd(_backward, setup_context=_setup_context)


def _stack(
    cores: Sequence[Tensor], gates: Sequence[Tensor], num_layers: int, threshold: float
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    return stack_chains(cores, num_layers), *stack_gates(gates, num_layers, threshold)
